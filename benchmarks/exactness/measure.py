"""One cell of the table: the engine's steps held against the plain step.

Takes a cell and, where ranks are processes, this rank's communicator; gives a row: the largest errors of losses,
gradients, updated parameters and running statistics.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from app.training.exactness import KINDS, Errors, ExactnessTrial, verify_engine
from benchmarks.exactness.cells import SUBJECTS, Cell
from models.registry import build_model
from parallel.build import assemble
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.engine import Engine
from parallel.engine.optimizer_step import MakeOptimizer
from parallel.stage.stage import Loss

CLASSES, SEED = 3, 0
CPU = torch.device("cpu")
PATIENCE_S = 180
"""How long a rank waits for another before the cell has failed."""


@dataclass(frozen=True)
class Row:
    """What became of a cell.

    Attributes:
        status: passed; inexact: an error above the tolerance; refused: before the first step, with the reason; failed.
        loss, gradients, parameters, statistics, optimizer: largest relative errors.
        note: why not passed.
    """

    cell: Cell
    status: str
    seconds: float
    loss: float = 0.0
    gradients: float = 0.0
    parameters: float = 0.0
    statistics: float = 0.0
    optimizer: float = 0.0
    note: str = ""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.parameters, self.statistics, self.optimizer)


Ranks = Callable[[ExactnessTrial, Callable[..., Engine]], Errors | None]


def on_threads(cell: Cell) -> Row:
    """The row of ``cell``, its ranks threads of this process."""

    def run(trial: ExactnessTrial, make_engine: Callable[..., Engine]) -> Errors | None:
        def rank(communicator: Communicator, _: None) -> Errors | None:
            return verify_engine(trial, make_engine, communicator)

        return run_on_threads(cell.ranks, rank, timeout_s=PATIENCE_S)[0]

    try:
        row = _measure(cell, run, shows=True)
        assert row is not None
    except Exception as fault:
        row = failed(cell, fault)
    gc.collect()  # an engine is cyclic garbage, of hundreds of megabytes
    return row


def on_ranks(cell: Cell, communicator: Communicator) -> Row | None:
    """The row of ``cell`` on rank 0, None on the others; every rank takes part."""
    row = _measure(cell, lambda trial, make: verify_engine(trial, make, communicator), shows=communicator.rank == 0)
    gc.collect()
    return row


def failed(cell: Cell, fault: Exception) -> Row:
    reason = " ".join(f"{type(fault).__name__}: {fault}".split())
    return Row(cell, "failed", 0.0, note=reason[:400])


def _measure(cell: Cell, run: Ranks, shows: bool) -> Row | None:
    trial = _trial(cell)
    begun = time.perf_counter()

    def make_engine(module: nn.Module, loss: Loss, make: MakeOptimizer, communicator: Communicator) -> Engine:
        shape = (max(trial.sizes), 3, trial.tile, trial.tile)
        batch = sum(trial.sizes)
        return assemble(
            module, loss, make, communicator, cell.strategy, shape=shape, batch=batch, device=CPU, seed=trial.seed
        )

    try:
        errors = run(trial, make_engine)
    except ValueError as reason:  # every rank refuses alike
        return Row(cell, "refused", time.perf_counter() - begun, note=" ".join(str(reason).split())) if shows else None
    return None if errors is None else _row(cell, errors, time.perf_counter() - begun)


def _row(cell: Cell, errors: Errors, seconds: float) -> Row:
    worst = ", ".join(f"{kind} of {name}" for kind, name in errors.excesses[:4])
    largest = {kind: errors.of_kind(kind) for kind in KINDS}
    return Row(cell, "passed" if errors.passed else "inexact", seconds, errors.loss, **largest, note=worst)


def _trial(cell: Cell) -> ExactnessTrial:
    subject = SUBJECTS[cell.subject]
    return ExactnessTrial(
        _module(cell.subject), subject.sizes(cell.m), subject.tile, getattr(torch, cell.dtype), CPU, cell.steps, SEED
    )


@functools.lru_cache(maxsize=1)
def _module(subject: str) -> nn.Module:
    torch.manual_seed(SEED)
    return build_model(SUBJECTS[subject].model, classes=CLASSES)
