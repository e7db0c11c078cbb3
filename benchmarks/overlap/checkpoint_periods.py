"""Periods of steps, each with one checkpoint or none, in turn, on the ranks that train.

Takes a case as JSON holds it; gives seconds of every period, and how long each kind of checkpoint took to the disk.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from app.checkpoint.periodic import CheckpointManager
from app.settings.optimization import CheckpointSettings, OptimizerSettings
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.training.engines import build_engine, build_optimizer
from app.training.run_folder import RunFolder
from benchmarks.overlap.async_save import AsyncSave
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, TrainingEngine

KINDS = ("none", "blocking", "two-phase")
LR = 1e-4


def measure(communicator: Communicator, case: dict[str, Any]) -> dict[str, Any]:
    """Seconds of each part of the periods of each kind, as this rank saw them: what comes before the first step, every
    step, and what comes after the last.

    A period with a checkpoint begins with it, and ends when it is on the disk: a run waits for it before the next.

    Args:
        case: fields of ``Case``, and the ``folder`` to write to.
    """
    engine = engine_of(communicator, case)
    steps = itertools.count()
    parts = microbatches(engine, case)
    folder, kinds = RunFolder(Path(case["folder"])), case["kinds"]
    found: dict[str, Any] = {kind: [] for kind in kinds} | {"write_s": {kind: [] for kind in kinds}}
    device = torch.device("cpu")
    blocking = CheckpointManager(
        CheckpointSettings(0, checkpoint_write="blocking"), folder.last, folder.best, engine, device, 0
    )
    with contextlib.ExitStack() as stack:
        two_phase = stack.enter_context(
            CheckpointManager(CheckpointSettings(0), folder.last, folder.best, engine, device, 0)
        )
        writers: dict[str, CheckpointManager | AsyncSave | None] = {
            "none": None,
            "blocking": blocking,
            "two-phase": two_phase,
        }
        if "async-save" in kinds:
            writers["async-save"] = stack.enter_context(contextlib.closing(AsyncSave(folder.path / "async", engine)))
        for round_number in range(1 + case["rounds"]):
            # Each comes after each other as often.
            for kind in kinds if round_number % 2 else kinds[::-1]:
                communicator.barrier()
                parts_s, written_s = _period(engine, parts, steps, case["every"], two_phase, writers[kind])
                if round_number:  # in the first, memory is taken for the first time
                    found[kind].append(parts_s)
                    found["write_s"][kind].append(written_s)
        found["tuned"] = two_phase.every
    found["threads"] = torch.get_num_threads()
    found["bytes"] = folder.last.stat().st_size if communicator.rank == 0 else 0
    engine.close()
    return found


def _period(
    engine: TrainingEngine,
    parts: list[Microbatch],
    steps: itertools.count[int],
    every: int,
    told: CheckpointManager,
    writer: CheckpointManager | AsyncSave | None,
) -> tuple[list[float], float]:
    """Seconds of each part, and until the step after which the checkpoint was on the disk."""
    begun_s = time.monotonic()
    moments, written_s = [begun_s], 0.0
    if writer is not None:
        state = engine.state_dict()
        writer.save({**state, "step": 0} if state else {}, 0, begun_s, best=False)
    moments.append(time.monotonic())
    for _ in range(every):
        engine.step(parts, next(steps), LR)
        moments.append(time.monotonic())
        told.add_step(moments[-1] - moments[-2])
        if not written_s and not (writer and writer.busy):
            written_s = moments[-1] - begun_s
    for each in {told, writer or told}:
        each.finish()
    moments.append(time.monotonic())
    return [end - begin for begin, end in itertools.pairwise(moments)], written_s or moments[-1] - begun_s


def engine_of(communicator: Communicator, case: dict[str, Any]) -> TrainingEngine:
    """As ``app.train`` makes it."""
    asked = StrategySettings(
        case["strategy"], ranks=case["ranks"], batch=case["batch"], microbatches=case["m"], device="cpu"
    )
    assert strategy_errors(asked) == []
    torch.manual_seed(0)
    return build_engine(
        asked.to_strategy("cpu"),
        build_model(case["model"], classes=2).to(memory_format=torch.channels_last),
        F.cross_entropy,
        functools.partial(build_optimizer, OptimizerSettings(lr=LR)),
        communicator,
        batch=case["batch"],
        tile=case["px"],
        seed=0,
        device=torch.device("cpu"),
    )


def microbatches(engine: TrainingEngine, case: dict[str, Any]) -> list[Microbatch]:
    """Random tiles, of each what this rank wants."""
    shape = (case["batch"] // case["m"], 3, case["px"], case["px"])
    images = torch.randn(shape, generator=torch.Generator().manual_seed(0)).contiguous(
        memory_format=torch.channels_last
    )
    targets = torch.arange(shape[0]) % 2
    wants = [engine.wants(i) for i in engine.share]
    return [Microbatch(images if want.images else None, targets if want.targets else None, shape) for want in wants]
