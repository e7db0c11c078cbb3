"""Checkpoints in two phases: copied while the next step computes, written while training goes on.

Takes a state and where to write it; returns at once. The engine's update waits for the copy (``await_copy``); another
process writes it (``writer.py``). After Mohan, Phanishayee, Chidambaram 2021, CheckFreq, section 4.2.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.checkpoint.file import not_written
from app.checkpoint.image import image_of
from app.checkpoint.shared_buffer import SharedBuffer
from app.checkpoint.snapshot import Snapshot
from app.checkpoint.writer import CheckpointWriter
from app.launch.priority import let_others_first
from parallel.comm.device_thread import on_current_device
from parallel.offload.copies import Copies
from parallel.profile.gpu import is_device_fault


@dataclass(frozen=True)
class Written:
    """The seconds that a checkpoint took.

    Attributes:
        held_s: how long an update waited for the copy.
        persist_s: from the step before it until it was on the disk.
    """

    held_s: float
    persist_s: float


class TwoPhaseCheckpoints:
    """Checkpoints in two phases, one at a time; memory and the process that writes are there from the first one on.

    Args:
        device: on which tensors may lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffer: SharedBuffer | None = None
        self._copies: Copies | None = None
        self._writer: CheckpointWriter | None = None
        self._job: _Job | None = None

    @property
    def writer(self) -> CheckpointWriter | None:
        """Return the process that writes; None before the first checkpoint."""
        return self._writer

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being copied or written."""
        return self._job is not None and self._job.is_alive()

    def begin(self, state: Mapping[str, Any], parameter_names: frozenset[str], path: Path, also: Path | None) -> None:
        """Begin a checkpoint; call ``finish`` before. From now on updates have to ``await_copy`` first.

        Args:
            state: what ``save_checkpoint`` takes.
            parameter_names: see ``Snapshot.begin``.
            path: of the file.
            also: second name of the file once it is there.

        Raises:
            OSError: there is no memory to copy to, or no process to write. What ``state`` holds may be changed again.
        """
        assert self._job is None, "finish comes first"
        if self._buffer is None:
            self._buffer = SharedBuffer(pinned=self._device.type == "cuda")
        if self._copies is None:
            self._copies = Copies.for_device(self._device)
        snapshot = Snapshot(self._buffer, self._copies)
        snapshot.begin(state, parameter_names)
        if self._writer is None:
            self._writer = CheckpointWriter(self._buffer.descriptor)
        self._job = _Job(snapshot, self._buffer, self._writer, path, also)
        self._job.start()

    def await_copy(self) -> None:
        """Wait until no copy is under way; from whatever thread updates."""
        job = self._job
        if job is not None:
            job.await_copy()

    def finish(self) -> Written | None:
        """Wait until the checkpoint under way is on the disk; return what it took, None when there is none.

        Raises:
            RunError: it could not be written; the one before is still there.
        """
        job = self._job
        if job is None:
            return None
        job.join()
        self._job = None
        if isinstance(job.fault, (OSError, RuntimeError)) and not is_device_fault(job.fault):
            raise not_written(job.path, job.fault) from job.fault
        if job.fault is not None:
            raise job.fault
        return Written(job.held_s, job.persist_s)

    def close(self) -> None:
        """Give memory and process back; call ``finish`` before."""
        if self._writer is not None:
            self._writer.close()
        if self._buffer is not None:
            self._buffer.close()
        self._buffer = self._writer = None


class _Job(threading.Thread):
    """One checkpoint from the copy to the disk. A daemon: an interpreter that has to end does not wait for it."""

    def __init__(
        self, snapshot: Snapshot, buffer: SharedBuffer, writer: CheckpointWriter, path: Path, also: Path | None
    ) -> None:
        super().__init__(target=on_current_device(self._copy_and_write), name="checkpoint", daemon=True)
        self._snapshot = snapshot
        self._buffer = buffer
        self._writer = writer
        self.path = path
        self._also = also
        self._copied = threading.Event()
        self._begun_s = time.monotonic()
        self.held_s = 0.0
        self.persist_s = 0.0
        self.fault: BaseException | None = None

    def _copy_and_write(self) -> None:
        """Copy, then write."""
        try:
            try:
                self._snapshot.complete()
            finally:
                self._copied.set()
            let_others_first()  # the copy is awaited, what follows is not
            spans = image_of(self._snapshot.state, self._buffer)
            self._writer.write(self.path, spans, self._also)
        except BaseException as fault:
            self.fault = fault
        finally:
            self.persist_s = time.monotonic() - self._begun_s
            del self._snapshot

    def await_copy(self) -> None:
        """Wait until the copy is complete, and count how long."""
        if self._copied.is_set():
            return
        begun_s = time.monotonic()
        self._copied.wait()
        self.held_s += time.monotonic() - begun_s
