"""Rows of the smoke part that need torch alone: engines on small models, compared with the plain step on their device.

Takes cases as JSON holds them, on every rank; appends a row per case to a file. The first error ends all ranks, since a
CUDA error leaves a process of no use; ``smoke`` starts the rest again.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
import os
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from app.checkpoint.file import load_checkpoint
from app.checkpoint.two_phase import TwoPhaseCheckpoints, tensors_in
from app.settings.cli import parse
from app.settings.strategy import StrategySettings
from app.training.engines import build_engine
from app.training.exactness import TOLERANCE, CroppedImages, Errors, compare, verify_engine
from app.training.plain_training import ExactnessTrial, MakeEngine, MeasuredEngine, PlainTraining
from benchmarks.exactness.odd.blocks import Head, block
from benchmarks.gpu.setting import Row
from benchmarks.gpu.smoke_commands import STOP_AFTER
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.profile.gpu import set_tf32
from parallel.schedule.shares import split_batch

SEED = 0
STEPS = 2
CPU_ALLOWED = 1e-3
"""Largest error of a gradient in float32 between two kinds of device, whose kernels add in other orders."""
BF16_LOSS, BF16_ANGLE = 0.05, 0.1
"""Largest relative error of the loss in bfloat16, and 1 - cosine of the gradient that differs most in direction."""
WARM_STEPS = 2
SYNCHRONISED = "called a synchronizing CUDA operation"
"""Beginning of torch's warnings; that this is a prototype is another."""


def net(classes: int) -> nn.Sequential:
    """Return a classifier with batch norm, small enough for a CPU."""
    return nn.Sequential(block(3, 8, 2), block(8, 16, 2), block(16, 16, 2), Head(16, classes))


def dropping(classes: int) -> nn.Module:
    """Return the same with dropout in every half of it. Asks this process to stop after ``STOP_AFTER`` updates."""
    if STOP_AFTER in os.environ:
        updates = itertools.count(1)

        def stop(*_: object) -> None:
            if next(updates) == int(os.environ.get(STOP_AFTER, 0)):
                os.kill(os.getpid(), signal.SIGTERM)

        register_optimizer_step_post_hook(stop)
    first, second, third, head = net(classes)
    return nn.Sequential(first, second, nn.Dropout(0.2), third, nn.Dropout(0.2), head)


def run_all(communicator: Communicator, argument: Mapping[str, Any]) -> None:
    """Run ``argument["cases"]`` on ``argument["device"]``; rank 0 appends their rows to the file ``rows``."""
    device = torch.device(argument["device"])
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) % torch.cuda.device_count())
        torch.cuda.set_device(device)
        set_tf32(False)
    if communicator.world == 1:
        communicator = LocalCommunicator()
    for case in argument["cases"]:
        began = time.perf_counter()
        row = RUNS[case["run"]](communicator, case, device)
        communicator.barrier()
        if communicator.rank == 0:
            with Path(argument["rows"]).open("a") as file:
                file.write(json.dumps({**case, **row, "seconds": time.perf_counter() - began}) + "\n")


def _against_plain(communicator: Communicator, case: Row, device: torch.device) -> Row:
    """Compare an engine with the plain step on the device: in float32, and where that is not within 1e-5 in float64."""
    errors = _errors(communicator, case, device, torch.float32)
    failed = torch.tensor([errors is not None and not errors.passed]).int()
    communicator.broadcast(failed)
    wide = _errors(communicator, case, device, torch.float64) if failed else None
    if errors is None:
        return {}
    if wide is None:
        return _row(errors.largest, errors.tolerance, "float32")
    return {**_row(wide.largest, wide.tolerance, "float64"), "float32_error": errors.largest}


def _against_float32(communicator: Communicator, case: Row, device: torch.device) -> Row:
    """Compare the first gradients in bfloat16 with those of the plain step in float32, by their direction."""
    trial = _trial(case, device, torch.float32)
    engine = _engine(communicator, case, trial, torch.bfloat16)
    loss = _step(engine, trial, 0)
    plain = PlainTraining(trial).step(0)
    gradients = engine.gradients()
    engine.close()
    cosines = [F.cosine_similarity(g.flatten(), plain.gradients[k].flatten(), 0) for k, g in gradients.items()]
    row = _row(1.0 - float(min(cosines)), BF16_ANGLE, "1 - cosine")
    return {**row, "passed": row["passed"] and abs(loss - plain.loss) <= BF16_LOSS * abs(plain.loss)}


def _against_cpu(communicator: Communicator, case: Row, device: torch.device) -> Row:
    """Compare the plain step on the device with that on the CPU."""
    trial = _trial(case, torch.device("cpu"), torch.float32)
    expected = PlainTraining(trial)
    found = PlainTraining(dataclasses.replace(trial, device=device))
    errors = compare(expected.step(0), [found.step(0)], expected.parameters)
    return _row(max(errors.loss, errors.of_kind("gradients")), CPU_ALLOWED, "float32")


def _checkpoint(communicator: Communicator, case: Row, device: torch.device) -> Row:
    """Write a checkpoint in two phases during a step; load it into another engine, whose next steps are compared."""
    trial = _trial(case, device, torch.float32)
    engine, resumed = _engine(communicator, case, trial), _engine(communicator, case, trial)
    checkpoints = TwoPhaseCheckpoints(device)
    engine.before_update(checkpoints.await_copy)
    _step(engine, trial, 0)
    state = engine.state_dict()
    expected = [tensor.detach().cpu().clone() for tensor in tensors_in(copy.copy(state))]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "last.pt"
        checkpoints.begin(state, engine.parameter_names, path, None)
        losses = [_step(engine, trial, step) for step in range(1, 1 + STEPS)]
        checkpoints.finish()
        loaded = load_checkpoint(path)
    same = all(map(torch.equal, expected, tensors_in(loaded)))
    resumed.load_state_dict(loaded)
    again = [_step(resumed, trial, step) for step in range(1, 1 + STEPS)]
    error = max(abs(one - other) / abs(one) for one, other in zip(losses, again, strict=True))
    row = _row(error, TOLERANCE[torch.float32], "loss")
    return {**row, "passed": row["passed"] and same, "failure": None if same else "the file is not the state"}


def _host_syncs(communicator: Communicator, case: Row, device: torch.device) -> Row:
    """Count what torch reports as synchronisations of the host in a step, on the rank that has most."""
    trial = _trial(case, device, torch.float32)
    engine = _engine(communicator, case, trial)
    for step in range(WARM_STEPS):
        _step(engine, trial, step)
    microbatches = _microbatches(engine, trial, WARM_STEPS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.set_sync_debug_mode("warn")
        engine.step(microbatches, WARM_STEPS, 0.0)
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("default")
    engine.close()
    count = torch.zeros(communicator.world)
    count[communicator.rank] = sum(SYNCHRONISED in str(warning.message) for warning in caught)
    communicator.all_reduce(count)
    return {"syncs": float(count.max()) / len(trial.sizes) if device.type == "cuda" else None, "passed": True}


RUNS: dict[str, Callable[[Communicator, Row, torch.device], Row]] = {
    "plain": _against_plain,
    "bf16": _against_float32,
    "cpu": _against_cpu,
    "checkpoint": _checkpoint,
    "syncs": _host_syncs,
}


def _row(error: float, allowed: float, of: str) -> Row:
    return {"error": error, "allowed": allowed, "of": of, "passed": error <= allowed}


def _settings(case: Row) -> StrategySettings:
    settings = parse(StrategySettings, case["flags"].split(), "smoke")
    assert settings is not None
    return settings


def _trial(case: Row, device: torch.device, dtype: torch.dtype) -> ExactnessTrial:
    settings = _settings(case)
    torch.manual_seed(SEED)
    module, sizes = build_model(case["model"], classes=3), tuple(map(len, split_batch(settings.batch, settings.m)))
    trial = ExactnessTrial(module, sizes, case["px"], dtype, device, STEPS, SEED, channels_last=True)
    return dataclasses.replace(trial, by_boxes=settings.stream_px is not None)


def _engine(
    communicator: Communicator, case: Row, trial: ExactnessTrial, autocast: torch.dtype | None = None
) -> MeasuredEngine:
    return _make_engine(case, trial, autocast)(trial.fresh_module(), trial.loss, trial.make_optimizer, communicator)


def _make_engine(case: Row, trial: ExactnessTrial, autocast: torch.dtype | None = None) -> MakeEngine:
    settings = _settings(case)
    strategy = settings.to_strategy(trial.device.type).under(
        smallest=0
    )  # tiles are small: what is to be moved is moved
    sizes: Any = {"batch": settings.batch, "tile": case["px"]}
    return functools.partial(build_engine, strategy, **sizes, seed=SEED, device=trial.device, autocast=autocast)


def _step(engine: MeasuredEngine, trial: ExactnessTrial, step: int) -> float:
    return engine.step(_microbatches(engine, trial, step), step, trial.lr).loss


def _microbatches(engine: MeasuredEngine, trial: ExactnessTrial, step: int) -> list[Microbatch]:
    """Return this rank's microbatches of a step as the engine takes them."""
    found = [trial.microbatch(step, i, engine.wants(i)) for i in engine.share]
    if not trial.by_boxes:
        return found
    return [m._replace(images=CroppedImages(m.images)) if isinstance(m.images, Tensor) else m for m in found]


def _errors(communicator: Communicator, case: Row, device: torch.device, dtype: torch.dtype) -> Errors | None:
    trial = _trial(case, device, dtype)
    return verify_engine(trial, _make_engine(case, trial), communicator)
