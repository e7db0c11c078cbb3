"""A run of a small model with checkpoints that can be held up at a chosen point, to be killed there.

    python -m tests.helpers.drilled_run FOLDER copying|writing|renamed|nowhere

Touches FOLDER/held when it is there, and stays. Imported, ``train`` is the same run undisturbed, or resumed.
"""

from __future__ import annotations

import functools
import os
import stat
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from app.checkpoint import two_phase
from app.checkpoint.file import load_checkpoint
from app.checkpoint.periodic import CheckpointManager
from app.settings.optimization import CheckpointSettings
from app.training.run_folder import RunFolder
from benchmarks.whole_engine import whole_engine
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch
from tests.helpers.tiny_models import classifier

STEPS, EVERY = 6, 2
HELD_AT = 2
"""Number of the checkpoint that is held up, from 1."""


def train(path: Path) -> dict[str, Any]:
    """The state after ``STEPS`` steps, from the last checkpoint in ``path`` if there is one."""
    torch.manual_seed(3)
    net: nn.Module = classifier(2)
    rule = functools.partial(torch.optim.AdamW, lr=1e-2)
    engine = whole_engine(net, F.cross_entropy, rule, LocalCommunicator(), batch=4, m=2, shape=microbatch(0).shape)
    folder, first = RunFolder(path), 0
    if folder.last.exists():
        state = load_checkpoint(folder.last)
        engine.load_state_dict(state)
        first = state["step"]
    settings = CheckpointSettings(checkpoint_every=EVERY)
    with CheckpointManager(settings, folder.last, folder.best, engine, torch.device("cpu"), first) as checkpoints:
        for step in range(first, STEPS):
            engine.step([microbatch(2 * step), microbatch(2 * step + 1)], step, 1e-2)
            checkpoints.add_step(0.01)
            if checkpoints.due(step + 1):
                checkpoints.save({**engine.state_dict(), "step": step + 1}, step + 1, time.monotonic(), best=False)
    return engine.state_dict()


def microbatch(seed: int) -> Microbatch:
    images: Tensor = torch.randn(2, 3, 40, 40, generator=torch.Generator().manual_seed(seed))
    return Microbatch(images, torch.tensor([0, 1]), tuple(images.shape))


def hold(marker: Path) -> None:
    """Say so and stay until killed."""
    marker.touch()
    time.sleep(600)


def hold_copies(marker: Path) -> None:
    copied, plain = [0], two_phase.copy_bytes
    copies = len(list(classifier(2).parameters())) * 4  # each with three tensors of AdamW's

    def copy_bytes(source: Tensor, target: Tensor) -> None:
        if threading.current_thread().name == "checkpoint":
            copied[0] += 1
            if copied[0] == (HELD_AT - 1) * copies + copies // 2:
                hold(marker)
        plain(source, target)

    two_phase.copy_bytes = copy_bytes


def hold_writes(marker: Path, renamed: bool) -> None:
    """Hold the thread that writes before its rename, or between that and the flush of the folder."""
    written, plain = [0], os.fsync

    def fsync(descriptor: int) -> None:
        of_folder = stat.S_ISDIR(os.fstat(descriptor).st_mode)
        written[0] += not of_folder
        if written[0] == HELD_AT and of_folder == renamed:
            hold(marker)
        plain(descriptor)

    os.fsync = fsync


def main() -> None:
    path, where = Path(sys.argv[1]), sys.argv[2]
    if where == "copying":
        hold_copies(path / "held")
    elif where != "nowhere":
        hold_writes(path / "held", renamed=where == "renamed")
    train(path)


if __name__ == "__main__":
    main()
