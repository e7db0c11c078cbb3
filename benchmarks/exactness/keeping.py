"""Is every way of keeping exact, under every kind of schedule? Recomputation, offload, parameters on the host.

Takes nothing; gives a row a cell in ``bench-data/exactness_keeping.json`` as they come, and a table in the README: the
largest error of losses, gradients, running statistics and parameters over all models, by way and schedule. Exit code 0
when every cell has passed.

    python -m benchmarks.exactness.keeping [--only WORD ...] [--again | --known] [--write]
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from app.settings.strategy_errors import strategy_errors
from app.training.engines import build_engine
from app.training.exactness import KINDS, Errors, ExactnessTrial, verify_engine
from benchmarks.exactness.keeping_cells import CLASSES, SCHEDULES, SUBJECTS, WAYS, Cell, all_cells
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.registry import build_model
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.schedule.shares import split_batch

OUT = Path(__file__).parents[2] / "bench-data" / "exactness_keeping.json"
CPU, SEED, PATIENCE_S = torch.device("cpu"), 0, 300
ERRORS = ("loss", *KINDS)


@functools.lru_cache(maxsize=1)
def _module(subject: str) -> nn.Module:
    torch.manual_seed(SEED)
    return build_model(SUBJECTS[subject].model, classes=CLASSES)


def _trial(subject: str) -> ExactnessTrial:
    one = SUBJECTS[subject]
    sizes = tuple(map(len, split_batch(one.batch, one.m)))
    return ExactnessTrial(_module(subject), sizes, one.tile, torch.float64, CPU, one.steps, SEED)


def measure(cell: Cell) -> dict[str, Any]:
    """The largest relative errors of a cell, whether it passed, and if not why: worst tensors, or what was raised."""
    trial = _trial(cell.subject)
    asked = cell.asked
    faults = strategy_errors(asked)
    assert not faults, faults
    begun = time.perf_counter()
    # Tiles are small here, and what is to be moved is moved.
    strategy = asked.to_strategy("cpu").under(smallest=0)
    make = functools.partial(build_engine, strategy, batch=asked.batch, tile=trial.tile, seed=SEED, device=CPU)

    def rank(communicator: Communicator, _: None) -> Errors | None:
        return verify_engine(trial, make, communicator)

    try:
        errors = run_on_threads(asked.world, rank, timeout_s=PATIENCE_S)[0]
    except Exception as fault:
        reason = " ".join(f"{type(fault).__name__}: {fault}".split())
        return {"status": "failed", "seconds": time.perf_counter() - begun, "note": reason[:400]}
    assert errors is not None
    return {
        "status": "passed" if errors.passed else "inexact",
        "seconds": time.perf_counter() - begun,
        "loss": errors.loss,
        **{kind: errors.of_kind(kind) for kind in KINDS},
        "note": ", ".join(f"{kind} of {name}" for kind, name in errors.excesses[:4]),
    }


def largest(row: dict[str, Any]) -> float:
    return max((row[error] for error in ERRORS if error in row), default=float("inf"))


def summary(rows: dict[Cell, dict[str, Any]]) -> str:
    """The table, the largest error of each kind, then every cell that did not pass."""
    lines = []
    for way in WAYS:
        columns = ([row for cell, row in rows.items() if (cell.way, cell.schedule) == (way, s)] for s in SCHEDULES)
        lines.append((way, *map(_entry, columns)))
    passed = sum(row["status"] == "passed" for row in rows.values())
    kinds = ", ".join(f"{kind} {max(row.get(kind, 0.0) for row in rows.values()):.1e}" for kind in ERRORS)
    parts = [
        f"float64, one step ({SUBJECTS['dropout'].steps} of dropout), 2 ranks, "
        f"{', '.join(dict.fromkeys(cell.subject for cell in rows))}; largest error (cells passed of all):\n",
        markdown_table(("kept", *SCHEDULES), lines),
        f"{len(rows)} cells: {passed} passed. Largest relative errors of all: {kinds}.\n",
    ]
    others = [(str(cell), row["status"], row["note"]) for cell, row in rows.items() if row["status"] != "passed"]
    if others:
        parts.append(markdown_table(("cell", "status", "why"), others))
    return "\n".join(parts)


def _entry(rows: list[dict[str, Any]]) -> str:
    if not rows:
        return ""
    passed = sum(row["status"] == "passed" for row in rows)
    return f"{max(map(largest, rows)):.1e} ({passed} of {len(rows)})"


def chosen(only: Iterable[str]) -> list[Cell]:
    """The cells whose description has all of the words ``only``; all cells without any."""
    return [cell for cell in all_cells() if all(f" {word} " in f" {cell} " for word in only)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="WORD", help="cells with all of these: dropout 1f1b")
    parser.add_argument("--again", action="store_true", help="also those that the file already has")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, dict[str, Any]] = json.loads(OUT.read_text()) if OUT.exists() else {}
    wanted = chosen(arguments.only)
    if not wanted:
        asked = " ".join(arguments.only)
        parser.error(f"--only names no cell; got {asked}: a cell is described as '{next(all_cells())}'")
    for cell in wanted:
        known = str(cell) in found and found[str(cell)]["status"] != "failed"
        if arguments.known or (known and not arguments.again):
            continue
        row = found[str(cell)] = measure(cell)
        gc.collect()  # an engine is cyclic garbage, of hundreds of megabytes
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(found, indent=1) + "\n")
        print(f"{row['status']:8}{largest(row):9.1e}{row['seconds']:7.1f} s  {cell}  {row['note']}", flush=True)
    rows = {cell: found[str(cell)] for cell in wanted if str(cell) in found}
    text = results("python -m benchmarks.exactness.keeping --write", summary(rows))
    print(f"\n{text}")
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text, "keeping")
    sys.exit(any(row["status"] != "passed" for row in rows.values()))


if __name__ == "__main__":
    main()
