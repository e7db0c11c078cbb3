"""Steps of an engine compared with the plain step, cell by cell.

Takes cells that share ranks and communicator; gives a row for each: its status, the largest relative errors of losses,
gradients, parameters, running statistics and optimizer state, and why it did not pass. Cells run in processes of their
own, so that one that dies, hangs or takes too much memory is a row too.
"""

from __future__ import annotations

import functools
import gc
import math
import os
import resource
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import nn

import benchmarks.ranks
from app.planning.workload import Workload
from app.settings.launcher import TORCHRUN
from app.settings.strategy import StrategySettings
from app.settings.strategy_errors import strategy_errors
from app.training.engines import build_engine
from app.training.exactness import KINDS, Errors, verify_engine
from app.training.plain_training import ExactnessTrial, PlainTraining
from benchmarks.exactness.cells import Cell
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.graph.partition import Partition, equal_cost
from parallel.memory.policy import ActivationPolicy, Recompute
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.recompute_search import chosen_runs
from parallel.memory.stage_bytes import StageMemory
from parallel.schedule.shares import split_batch
from parallel.strategy import Strategy

CPU, CLASSES, SEED = torch.device("cpu"), 3, 0
PATIENCE_S = 900
"""Seconds that a rank waits for another."""
MOST_BYTES = 14 << 30
"""Memory that a process may take."""
ERRORS = ("loss", *KINDS)
FAULTS = ("inexact", "failed")
ENLARGED = 16
"""Recomputation is planned for tiles so much larger, whose activations outweigh the parameters."""
Row = dict[str, Any]


def measured(cells: Sequence[Cell], limit_s: float) -> Iterator[Row]:
    """Yield the rows of cells with ranks and communicator in common; after a failure each runs alone.

    Args:
        limit_s: seconds of a cell.
    """
    first = cells[0]
    try:
        yield from benchmarks.ranks.run_on_ranks(
            1 if first.over == "threads" else first.ranks,
            "benchmarks.exactness.measure:rows",
            [asdict(cell) for cell in cells],
            launcher="mpi" if first.over == "mpi" else "torch",
            timeout_s=PATIENCE_S,
            limit_s=limit_s * len(cells),
        )[0]
    except RuntimeError as fault:
        if len(cells) == 1:
            yield {**_about(first), "status": "failed", "seconds": 0.0, "note": _line(fault)}
            return
        for cell in cells:
            yield from measured([cell], limit_s)


def rows(communicator: Communicator, cells: list[dict[str, Any]]) -> list[Row]:
    """Return the rows of ``cells``, on each rank; those of rank 0 count."""
    resource.setrlimit(resource.RLIMIT_DATA, (MOST_BYTES, MOST_BYTES))
    torch.set_num_threads(1)
    if cells[0]["over"] == "threads":  # settings would take the ranks of a launcher, which is this process alone
        for name in TORCHRUN:
            os.environ.pop(name, None)
    found = []
    for values in cells:
        row = row_of(Cell(**values), communicator)
        gc.collect()  # an engine is cyclic garbage, of hundreds of megabytes
        found += [] if row is None else [row]
    return found


def row_of(cell: Cell, communicator: Communicator | None = None) -> Row | None:
    """Return the row of a cell; None on ranks other than 0.

    Args:
        communicator: of this rank, where ranks are processes.
    """
    begun, note = time.perf_counter(), ""
    try:
        trial, note = _trial(cell)
        errors = _errors(cell, trial, communicator)
    except ValueError as reason:  # every rank refuses alike
        outcome: Row = {"status": "refused", "note": _line(reason)}
    except Exception as fault:
        if cell.over != "threads":  # the other ranks wait: all end, and the cells are tried one by one
            raise
        outcome = {"status": "failed", "note": _line(fault)}
    else:
        if errors is None:
            return None
        worst = ", ".join(f"{name} {errors.of_tensors[kind][name]:.1e}" for kind, name in errors.excesses[:3])
        status, why = ("passed", note) if errors.passed else ("inexact", worst or "loss")
        outcome = {"status": status, "note": why, "loss": errors.loss, **{kind: errors.of_kind(kind) for kind in KINDS}}
    return {**_about(cell), **outcome, "seconds": time.perf_counter() - begun}


def _about(cell: Cell) -> Row:
    return {"cell": str(cell), "model": cell.model, "way": cell.way, "dtype": cell.dtype}


def largest(row: Row) -> float:
    """Return the largest error of a row; infinite if nothing was computed."""
    return max((row[error] for error in ERRORS if error in row), default=math.inf)


def _errors(cell: Cell, trial: ExactnessTrial, communicator: Communicator | None) -> Errors | None:
    settings = _settings(cell)
    if faults := strategy_errors(settings):
        raise ValueError(" ".join(faults))
    # Tiles are small here, and what is to be moved is moved.
    strategy = settings.to_strategy("cpu").under(smallest=0)
    make = functools.partial(build_engine, strategy, batch=cell.batch, tile=cell.tile, seed=SEED, device=CPU)
    if communicator is not None and cell.over != "threads":
        return verify_engine(trial, make, communicator)

    def rank(of_rank: Communicator, _: None) -> Errors | None:
        return verify_engine(trial, make, of_rank)

    return run_on_threads(settings.world, rank, timeout_s=PATIENCE_S)[0]


def _settings(cell: Cell) -> StrategySettings:
    asked = replace(cell.strategy_settings, channels_last=cell.library)
    return replace(asked, recompute_runs=_planned_runs(cell)) if cell.planned else asked


def _trial(cell: Cell) -> tuple[ExactnessTrial, str]:
    """Return the trial, and a note where the model does not run on what is channels_last."""
    sizes = tuple(map(len, split_batch(cell.batch, cell.m)))
    module, dtype = _module(cell.factory, cell.library), getattr(torch, cell.dtype)
    trial = ExactnessTrial(module, sizes, cell.tile, dtype, CPU, cell.steps, SEED, channels_last=cell.library)
    trial = replace(trial, by_boxes="stream" in dict(cell.settings))
    if cell.library:
        try:
            PlainTraining(trial).step(0)
        except RuntimeError as fault:  # of a view of what is channels_last
            return replace(trial, channels_last=False), f"with --no-channels-last: else {_line(fault)}"
    return trial, ""


@functools.lru_cache(maxsize=1)
def _module(factory: str, moves: bool) -> nn.Module:
    """Return the model with random weights.

    Args:
        moves: parameters that begin constant (a zero head, scales of 1) are moved off it, or gradients would be zero
            whatever is computed.
    """
    torch.manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what libraries say of themselves
        module = build_model(factory, classes=CLASSES)
    with torch.no_grad():
        for parameter in module.parameters() if moves else ():
            if bool((parameter == parameter.flatten()[0]).all()):
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return module


def _planned_runs(cell: Cell) -> str:
    """Return the layers to recompute for half of what blocks save, as ``--recompute-runs`` takes them."""
    graph = Workload(cell.factory, ENLARGED * cell.tile, CLASSES).in_float32
    memory, whole = StageMemory(graph), Partition(graph, (0,))
    rules: tuple[Recompute, ...] = ("none", "block")
    strategy = Strategy("ddp", cell.ranks, 1, cell.m)
    mesh, schedule = strategy.mesh, strategy.schedule({})
    stages = [memory.kept(whole, ActivationPolicy(rule)) for rule in rules]
    ends = [rank_bytes(stage, mesh, schedule, slots=1)[0].total for stage in stages]
    runs = chosen_runs(whole, mesh, schedule, equal_cost(graph), sum(ends) / 2, slots=1)
    assert runs, f"nothing to compute again in {cell.model}"
    return ",".join(f"{first}:{last}" for first, last in runs)


def _line(fault: Exception) -> str:
    """Return an error as one line, with files of the project as they are called in it."""
    return f"{type(fault).__name__}: {' '.join(str(fault).split())}".replace(f"{benchmarks.ranks.ROOT}/", "")[:600]
