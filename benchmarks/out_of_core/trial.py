"""One step of a strategy on random tiles, on the ranks of this benchmark: bytes that were there, and the gradients.

Device bytes are those of all tensors that live at a time (``parallel.offload.live_bytes``), which on a CPU leaves out
what went to the host. The gradients go to a file, to be held against those of the plain step.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from app.settings.optimization import OptimizerSettings
from app.training.engines import build_engine, build_optimizer
from app.training.outcome import peak_resident_bytes
from benchmarks.out_of_core.problem import CLASSES
from benchmarks.resident import resident, settle
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.objects import gather_objects
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.fully_sharded import FullyShardedEngine
from parallel.engine.step import Microbatch, NeededInputs, TrainingEngine, microbatch_seed
from parallel.offload.live_bytes import LiveBytes
from parallel.plan.plan import PlanRow

LR = 1e-3
SMALL = 64
"""Px of the tiles of a first step."""


def microbatches(engine: Any, case: dict[str, Any]) -> Iterator[Microbatch]:
    """Tiles of this rank, each drawn from its number when it is asked for."""
    return (_microbatch(i, engine.wants(i), case) for i in engine.share)


def _microbatch(i: int, wants: NeededInputs, case: dict[str, Any]) -> Microbatch:
    shape, images = (1, 3, case["px"], case["px"]), None
    if wants.images:
        generator = torch.Generator().manual_seed(microbatch_seed(0, 0, i) >> 1)
        images = torch.randn(shape, generator=generator).contiguous(memory_format=torch.channels_last)
    labels = torch.zeros((1, *shape[2:]) if case["model"].startswith("unet") else (1,), dtype=torch.int64)
    return Microbatch(images, labels if wants.targets else None, shape)


def run(communicator: Communicator, case: dict[str, Any]) -> dict[str, Any]:
    """A step.

    Args:
        case: ``model``, ``px``, ``batch`` in tiles, ``row`` of a plan, ``state_on_host``; ``gradients``: file to write,
            or empty; ``threads``: of this rank, 1 where it is not said.

    Returns:
        device_bytes at most, constant_bytes of them (parameters, optimizer), resident bytes over those before,
        host_bytes of the pool, seconds, loss.
    """
    if communicator.world == 1:
        communicator = LocalCommunicator()  # as app.train does
    torch.set_num_threads(case.get("threads", 1))
    settle()
    before = resident("VmRSS")
    live = LiveBytes()
    torch.manual_seed(0)
    with live:
        model = build_model(case["model"], classes=CLASSES).to(memory_format=torch.channels_last)
        engine = build_engine(
            PlanRow.from_json(case["row"]).strategy.under(optimizer=case["state_on_host"]),
            model,
            F.cross_entropy,
            functools.partial(build_optimizer, OptimizerSettings(lr=LR)),
            communicator,
            batch=case["batch"],
            tile=case["px"],
            seed=0,
            device=torch.device("cpu"),
        )
        del model
        gc.collect()
        # From here on the optimizer has its state. A rate of 0: what Adam makes of gradients that are nothing but
        # rounding would have the weights differ from those that the next step is held against.
        engine.step(microbatches(engine, {**case, "px": SMALL}), 0, 0.0)
        settle()
        live.peak_bytes = live.bytes
        begun = time.perf_counter()
        result = engine.step(microbatches(engine, case), 1, LR)
        seconds = time.perf_counter() - begun
    constant = sum(tensor.untyped_storage().nbytes() for tensor in _constant(engine))
    found = {
        "device_bytes": live.peak_bytes,
        "constant_bytes": constant,
        "resident_bytes": peak_resident_bytes() - before,
        "host_bytes": _on_host(engine),
        "seconds": seconds,
        "loss": result.loss,
    }
    if case.get("gradients"):
        _write(engine, communicator, Path(case["gradients"]))
    engine.close()
    return found


def _constant(engine: Any) -> list[Tensor]:
    """Parameters and the optimizer's state."""
    sharded = isinstance(engine, FullyShardedEngine)
    optimizer = engine.optimizer if sharded else engine._work.update.optimizer
    if not sharded and engine._work.update._host is not None:
        optimizer = None  # on the host
    modules = [engine.module] if sharded else [stage.module for stage in engine._work.stages.values()]
    states = optimizer.state.values() if optimizer else ()
    state = [value for values in states for value in values.values() if isinstance(value, Tensor)]
    return [*(parameter for module in modules for parameter in module.parameters()), *state]


def _on_host(engine: Any) -> int:
    """Bytes of the host's pool at most."""
    stages = [] if isinstance(engine, FullyShardedEngine) else engine._work.stages.values()
    pools = {stage._saved_tensors.pool for stage in stages if stage._saved_tensors}
    return sum(pool.peak_bytes for pool in pools if pool is not None)


def _write(engine: TrainingEngine, communicator: Communicator, file: Path) -> None:
    own = {name: gradient.detach().clone() for name, gradient in engine.gradients().items()}  # type: ignore[attr-defined]
    ranks = gather_objects(communicator, own)
    if ranks is not None:
        torch.save({name: gradient for part in ranks for name, gradient in part.items()}, file)


def largest_error(file: Path, plain: Path) -> float:
    """Return the largest error of a gradient, relative to the largest value of its tensor. One that is nothing but
    rounding next to the others counts relative to the largest of all."""
    ours, theirs = torch.load(file), torch.load(plain)
    assert ours.keys() == theirs.keys()
    most = max(float(value.abs().max()) for value in theirs.values())
    errors = []
    for name, expected in theirs.items():
        scale = float(expected.abs().max())
        scale = scale if scale > 1e-4 * most else most
        errors.append(float((ours[name].double() - expected.double()).abs().max()) / scale)
    return max(errors)
