"""Checkpoints by torch's own ``async_save``, to compare ours with: staged in shared memory, written by torch's process.

Takes an engine of one rank; writes a folder of torch's distributed checkpoint format. Without a process group torch's
process cannot be started, so one of this rank alone is made. Pinned memory and copies that do not block ask for a GPU.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint import FileSystemWriter, async_save
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from parallel.engine.engine import Engine


class AsyncSave:
    """Saves and waits as ``Checkpoints`` does.

    Args:
        folder: written anew by each checkpoint.
        engine: whose updates wait for the copy, beside what else they wait for.
    """

    def __init__(self, folder: Path, engine: Engine) -> None:
        self._folder = folder
        os.environ["MASTER_ADDR"] = "127.0.0.1"  # the process that writes joins a group of its own there
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self._stager = DefaultStager(
            StagingOptions(use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=True)
        )
        self._under_way: AsyncSaveResponse | None = None
        others = engine._work.update._before_update
        engine.before_update(lambda: (others(), self._await_copy()))

    @property
    def busy(self) -> bool:
        """A checkpoint is being staged or written."""
        return self._under_way is not None and not self._under_way.upload_completion.done()

    def save(self, state: dict[str, Any], step: int, begun_s: float, *, best: bool) -> None:
        """Begin to write ``state``."""
        self.finish()
        response = async_save(
            state,
            storage_writer=FileSystemWriter(self._folder),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
            no_dist=True,
        )
        assert isinstance(response, AsyncSaveResponse)
        self._under_way = response

    def _await_copy(self) -> None:
        if self._under_way is not None:
            self._under_way.staging_completion.result()

    def finish(self) -> None:
        """Wait until the checkpoint under way is on the disk."""
        if self._under_way is not None:
            self._under_way.upload_completion.result()
            self._under_way = None

    def close(self) -> None:
        self.finish()
        self._stager.close()
        dist.destroy_process_group()
