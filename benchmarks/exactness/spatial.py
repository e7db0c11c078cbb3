"""Is a tile divided among ranks exact? Operations by teams of every grid, models under every strategy that has teams.

Takes nothing; gives a row a cell in ``bench-data/exactness_spatial.json`` as they come, so that it may be stopped and
continued, and tables in the README, peers among them. Exit code 0 when every cell of ours has passed, or was refused by
name.

    python -m benchmarks.exactness.spatial [--only WORD ...] [--again | --known] [--write]
"""

from __future__ import annotations

import itertools
import json
import sys
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks.exactness.spatial_cells import Cell, ModelCell, OperationCell, all_cells
from benchmarks.exactness.spatial_measure import PATIENCE_S, Row, measure_operation, on_threads
from benchmarks.exactness.spatial_table import largest, summary
from benchmarks.ranks import run_on_ranks
from benchmarks.results import parser_of, results, write_results

OUT = Path(__file__).parents[2] / "bench-data" / "exactness_spatial.json"
AT_ONCE = 20
"""Cells of processes between two writes of the file."""


class Rows:
    """What was found, by description of the cell; kept in a file."""

    def __init__(self) -> None:
        self.found: dict[str, Row] = json.loads(OUT.read_text()) if OUT.exists() else {}

    def add(self, rows: dict[str, Row]) -> None:
        self.found |= rows
        OUT.parent.mkdir(exist_ok=True)
        OUT.write_text(json.dumps(self.found, indent=1) + "\n")
        for name, row in rows.items():
            print(
                f"{row['status']:8}{largest(row):9.1e}{row['seconds']:7.1f} s  {name}  {row.get('note', '')}",
                flush=True,
            )


def _on_processes(cells: Sequence[ModelCell], rows: Rows) -> None:
    """Cells that have communicator and ranks in common."""
    for first in range(0, len(cells), AT_ONCE):
        some = cells[first : first + AT_ONCE]
        argument = {"cells": [asdict(cell) for cell in some]}
        try:
            found = run_on_ranks(
                some[0].ranks,
                "benchmarks.exactness.spatial_measure:on_ranks",
                argument,
                launcher="mpi" if some[0].communicator == "mpi" else "torch",
                timeout_s=PATIENCE_S,
            )[0]
        except RuntimeError as fault:
            found = {str(cell): {"status": "failed", "seconds": 0.0, "note": str(fault)[:200]} for cell in some}
        rows.add(found)


def chosen(only: Iterable[str]) -> list[Cell]:
    """The cells whose description has all of the parts ``only``; all cells without any."""
    return [cell for cell in all_cells() if set(only) <= set(str(cell).split(" / "))]


def measure(cells: Sequence[Cell], rows: Rows) -> None:
    """Compute cells and keep their rows; those of operations a hundred at a time."""
    operations = [cell for cell in cells if isinstance(cell, OperationCell)]
    for first in range(0, len(operations), 100):
        rows.add({str(cell): measure_operation(cell) for cell in operations[first : first + 100]})
    models = [cell for cell in cells if isinstance(cell, ModelCell)]
    for (communicator, _), group in itertools.groupby(models, key=lambda cell: (cell.communicator, cell.ranks)):
        if communicator == "threads":
            for cell in group:
                rows.add({str(cell): on_threads(cell)})
        else:
            _on_processes(list(group), rows)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="cells with all of these: resnet18 gloo")
    parser.add_argument("--again", action="store_true", help="also those that the file already has")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Using padding='same'")
    rows, wanted, begun = Rows(), chosen(arguments.only), time.perf_counter()
    if not wanted:
        parser.error(f"--only names no cell: a cell is described as '{next(all_cells())}'")
    known = {name for name, row in rows.found.items() if row["status"] != "failed"}
    if not arguments.known:
        measure([cell for cell in wanted if arguments.again or str(cell) not in known], rows)
    there = {cell: rows.found[str(cell)] for cell in wanted if str(cell) in rows.found}
    text = results("python -m benchmarks.exactness.spatial --write", summary(there, len(wanted)))
    print(f"\n{text}\n{time.perf_counter() - begun:.0f} s")
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text, "spatial")
    ours = (row for cell, row in there.items() if isinstance(cell, ModelCell) or cell.by == "teams")
    sys.exit(any(row["status"] in ("inexact", "failed") for row in ours))


if __name__ == "__main__":
    main()
