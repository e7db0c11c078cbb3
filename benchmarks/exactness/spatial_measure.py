"""One cell of the table of teams: what a team, or a peer, computes held against one device.

Takes a cell; gives a row: its status, seconds, largest relative error of each kind, and why it did not pass.
"""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from app.settings.strategy_errors import strategy_errors
from app.training.engines import build_engine
from app.training.exactness import KINDS, TOLERANCE, Errors, ExactnessTrial, verify_engine
from benchmarks.exactness.peer_error import TILES as PEER_TILES
from benchmarks.exactness.peer_error import peer_error
from benchmarks.exactness.peers import DTENSOR
from benchmarks.exactness.spatial_cells import CLASSES, MICROBATCHES, SIZES, SUBJECTS, TILES, ModelCell, OperationCell
from benchmarks.exactness.spatial_ops import OPERATIONS
from benchmarks.exactness.team_error import team_error
from benchmarks.ranks import run_on_ranks
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.space.team import Grid

CPU, SEED, PATIENCE_S = torch.device("cpu"), 0, 180
Row = dict[str, Any]
assert PEER_TILES == TILES


def measure_operation(cell: OperationCell) -> Row:
    """Return the row of an operation."""
    begun = time.perf_counter()
    try:
        if cell.by == DTENSOR:
            argument = {"cells": [{"operation": cell.operation, "sides": SIZES[cell.size], "grid": cell.grid}]}
            row = run_on_ranks(2, "benchmarks.exactness.peer_error:dtensor_errors", argument, timeout_s=60)[0][0]
        elif cell.by != "teams":
            row = peer_error(cell.by, cell.operation, SIZES[cell.size], Grid.parse(cell.grid))
        else:
            row = _by_team(cell)
    except ValueError as reason:
        row = {"status": "refused", "note": _line(reason)}
    except Exception as fault:
        row = {"status": "failed", "note": _line(fault)}
    if row.get("status") not in ("refused", "failed"):
        passed = max(v for v in row.values() if isinstance(v, float)) <= TOLERANCE[getattr(torch, cell.dtype)]
        row["status"] = "passed" if passed else "inexact"
    return {**row, "seconds": time.perf_counter() - begun}


def _by_team(cell: OperationCell) -> Row:
    torch.manual_seed(SEED)
    network = OPERATIONS[cell.operation].network().to(getattr(torch, cell.dtype))
    errors = team_error(network, (TILES, 2, *SIZES[cell.size]), Grid.parse(cell.grid))
    row: Row = {kind: getattr(errors, kind) for kind in ("output", "image", "parameters", "statistics")}
    if errors.ends_at is not None:
        row["note"] = "member 0 alone from " + ": ".join(errors.ends_at)
    return row


def on_threads(cell: ModelCell) -> Row:
    """Return the row of a model whose ranks are threads of this process."""

    def run(trial: ExactnessTrial, make: Callable[..., Any]) -> Errors | None:
        def rank(communicator: Communicator, _: None) -> Errors | None:
            return verify_engine(trial, make, communicator)

        return run_on_threads(cell.ranks, rank, timeout_s=PATIENCE_S)[0]

    try:
        row = _model_row(cell, run, shows=True)
        assert row is not None
    except Exception as fault:
        row = {"status": "failed", "seconds": 0.0, "note": _line(fault)}
    gc.collect()  # an engine is cyclic garbage, of hundreds of megabytes
    return row


def on_ranks(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Row]:
    """On each process: the rows of cells of one number of ranks, by description; they are rank 0's."""
    torch.set_num_threads(1)
    rows: dict[str, Row] = {}
    for values in argument["cells"]:
        cell = ModelCell(**values)
        row = _model_row(cell, lambda trial, make: verify_engine(trial, make, communicator), communicator.rank == 0)
        gc.collect()
        if row is not None:
            rows[str(cell)] = row
    return rows


def _model_row(cell: ModelCell, run: Callable[..., Errors | None], shows: bool) -> Row | None:
    trial = _trial(cell.model)
    settings = cell.settings
    if faults := strategy_errors(settings):
        return {"status": "refused", "seconds": 0.0, "note": " ".join(faults)} if shows else None
    begun = time.perf_counter()
    # Tiles are small here, and what is to be moved is moved.
    strategy = settings.to_strategy("cpu").under(smallest=0)
    make = functools.partial(build_engine, strategy, batch=settings.batch, tile=trial.tile, seed=SEED, device=CPU)
    try:
        errors = run(trial, make)
    except ValueError as reason:  # every rank refuses alike
        return {"status": "refused", "seconds": time.perf_counter() - begun, "note": _line(reason)} if shows else None
    if errors is None:
        return None
    return {
        "status": "passed" if errors.passed else "inexact",
        "seconds": time.perf_counter() - begun,
        "loss": errors.loss,
        **{kind: errors.of_kind(kind) for kind in KINDS},
        "note": ", ".join(f"{kind} of {name}" for kind, name in errors.excesses[:4]),
    }


def _trial(model: str) -> ExactnessTrial:
    subject = SUBJECTS[model]
    return ExactnessTrial(_module(model), (subject.tiles,) * MICROBATCHES, subject.tile, torch.float64, CPU, 1, SEED)


@functools.lru_cache(maxsize=1)
def _module(model: str) -> nn.Module:
    torch.manual_seed(SEED)
    return build_model(SUBJECTS[model].model, classes=CLASSES)


def _line(fault: Exception) -> str:
    return " ".join(f"{type(fault).__name__}: {fault}".split())[:300]
