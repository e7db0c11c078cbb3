"""Is every schedule exact, for every kind of model, on every mesh, over every communicator? The whole table.

Takes nothing; gives a row a cell in ``bench-data/exactness.csv`` as they come, so that it may be stopped and continued,
and the largest errors in the README. Exit code 0 when no cell is inexact or has failed.

    python -m benchmarks.exactness.run [--only WORD ...] [--again | --known] [--write]
"""

from __future__ import annotations

import itertools
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.exactness.cells import Cell, all_cells
from benchmarks.exactness.measure import PATIENCE_S, Row, failed, on_ranks, on_threads
from benchmarks.exactness.table import append, read, summary
from benchmarks.ranks import run_on_ranks
from benchmarks.results import parser_of, results, write_results
from parallel.comm.communicator import CommunicationError, Communicator

CSV = Path(__file__).parents[2] / "bench-data" / "exactness.csv"


def measure(communicator: Communicator, argument: dict[str, Any]) -> None:
    """On each rank: the cells, one after the other. A rank that fails says so in the file, and all end."""
    for values in argument["cells"]:
        cell = Cell(**values)
        try:
            row = on_ranks(cell, communicator)
        except CommunicationError:  # another rank has failed and says why
            raise
        except Exception as fault:
            append(CSV, failed(cell, fault))
            raise
        if row is not None:
            _note(row)


def _note(row: Row) -> None:
    append(CSV, row)
    print(f"{row.status:8}{row.largest:9.1e}{row.seconds:7.1f} s  {row.cell}  {row.note}", flush=True)


def _on_processes(cells: list[Cell]) -> None:
    """All ``cells``, which have ranks and communicator in common; the rest are started again after one that fails."""
    while cells:
        launcher: Literal["torch", "mpi"] = "mpi" if cells[0].communicator == "mpi" else "torch"
        earlier = len(read(CSV))
        argument = {"cells": [asdict(cell) for cell in cells]}
        fault = None
        try:
            target = "benchmarks.exactness.run:measure"
            run_on_ranks(cells[0].ranks, target, argument, launcher=launcher, timeout_s=PATIENCE_S)
        except RuntimeError as ended:
            fault = ended
        rows = [row for row in read(CSV)[earlier:] if row.cell in cells]
        done = {row.cell for row in rows}
        cells = [cell for cell in cells if cell not in done]
        if fault and cells and not (rows and rows[-1].status == "failed"):
            _note(failed(cells.pop(0), fault))


def chosen(only: list[str]) -> list[Cell]:
    """The cells whose description has all of the words ``only``; all cells without any."""
    return [cell for cell in all_cells() if all(f" {word} " in f" {cell} " for word in only)]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="WORD", help="cells that have all of these, such as: gloo mast 2x2"
    )
    parser.add_argument("--again", action="store_true", help="also those that the file already has")
    parser.add_argument("--known", action="store_true", help="compute nothing, sum up what the file has")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    wanted = chosen(arguments.only)
    known = set() if arguments.again else {row.cell for row in read(CSV) if row.status != "failed"}
    todo = [] if arguments.known else [cell for cell in wanted if cell not in known]
    begun = time.perf_counter()
    for (communicator, _), group in itertools.groupby(todo, key=lambda cell: (cell.communicator, cell.ranks)):
        cells = list(group)
        if communicator == "threads":
            for cell in cells:
                _note(on_threads(cell))
        else:
            _on_processes(cells)
    last = {row.cell: row for row in read(CSV)}
    rows = [last[cell] for cell in wanted if cell in last]
    text = results("python -m benchmarks.exactness.run --write", summary(rows, len(wanted)))
    print(f"\n{text}\n{time.perf_counter() - begun:.0f} s")
    if arguments.write:
        write_results(Path(__file__).with_name("README.md"), text)
    sys.exit(any(row.status in ("inexact", "failed") for row in rows))


if __name__ == "__main__":
    main()
