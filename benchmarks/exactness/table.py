"""The rows of the table: kept in a CSV file as they come, and summed up in Markdown.

Takes rows; gives them back, and the tables of the README.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, fields
from pathlib import Path

from benchmarks.exactness.cells import COMMUNICATORS, STEPS, SUBJECTS, Cell
from benchmarks.exactness.measure import Row
from benchmarks.results import markdown_table
from parallel.schedule.registry import SCHEDULES

CELL = [field.name for field in fields(Cell)]
COLUMNS = [*CELL, *(field.name for field in fields(Row) if field.name != "cell")]
ERRORS = ("loss", "gradients", "parameters", "statistics", "optimizer")


def append(path: Path, row: Row) -> None:
    """Add ``row`` to the file, which is made when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    values = {**asdict(row.cell), **{name: getattr(row, name) for name in COLUMNS if name not in CELL}}
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if begins:
            writer.writeheader()
        writer.writerow(values)


def read(path: Path) -> list[Row]:
    """All rows of the file, in the order in which they came; none when it is not there."""
    if not path.exists():
        return []
    rows = []
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            numbers = {name: int(line[name]) for name in ("groups", "depth", "steps")}
            cell = Cell(**{name: line[name] for name in CELL} | numbers)  # type: ignore[arg-type]
            errors = {name: float(line[name]) for name in ERRORS}
            rows.append(Row(cell, line["status"], float(line["seconds"]), **errors, note=line["note"]))
    return rows


def summary(rows: Iterable[Row], wanted: int) -> str:
    """Tables of what was found, then every cell that did not pass.

    Args:
        wanted: cells that were to be computed; there may be fewer rows.
    """
    every = list(rows)
    short = [row for row in every if row.cell.steps == STEPS]
    many = [row for row in every if row.cell.steps != STEPS]
    parts = []
    for dtype in ("float64", "float32"):
        chosen = [row for row in short if row.cell.dtype == dtype]
        if chosen:
            parts += [f"{dtype}, {STEPS} steps, by model:\n", _table("model", SUBJECTS, chosen, _subject)]
    chosen = [row for row in short if row.cell.dtype == "float64"]
    parts += [f"float64, {STEPS} steps, by schedule:\n", _table("schedule", SCHEDULES, chosen, _schedule)]
    if many:
        models = ", ".join(sorted({row.cell.subject for row in many}))
        steps = many[0].cell.steps
        parts += [f"float64, {steps} steps, {models}, by schedule:\n", _table("schedule", SCHEDULES, many, _schedule)]
    parts.append(f"{_total(every, wanted)}\n")
    others = [row for row in every if row.status != "passed"]
    if others:
        lines = [(str(row.cell), row.status, row.note.replace("|", "/")) for row in others]
        parts += ["Cells that did not pass:\n", markdown_table(("cell", "status", "why"), lines)]
    return "\n".join(parts)


def _subject(row: Row) -> str:
    return row.cell.subject


def _schedule(row: Row) -> str:
    return row.cell.schedule


def _table(first: str, keys: Iterable[str], rows: Sequence[Row], key: Callable[[Row], str]) -> str:
    lines = []
    for name in keys:
        of_name = [row for row in rows if key(row) == name]
        if of_name:
            parts = [[row for row in of_name if row.cell.communicator == each] for each in COMMUNICATORS]
            lines.append((name, *map(_cell, parts), *(_number(_largest(of_name, error)) for error in ERRORS)))
    return markdown_table((first, *COMMUNICATORS, *ERRORS), lines)


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    passed = sum(row.status == "passed" for row in rows)
    return f"{_number(max(_largest(rows, error) for error in ERRORS))} ({passed} of {len(rows)})"


def _largest(rows: Sequence[Row], error: str) -> float:
    return max((float(getattr(row, error)) for row in rows), default=0.0)


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "infinite"


def _total(rows: Sequence[Row], wanted: int) -> str:
    """How many cells passed, and the largest error of all, for each type."""
    counts = ", ".join(
        f"{sum(row.status == status for row in rows)} {status}" for status in ("passed", "refused", "inexact", "failed")
    )
    largest = "; ".join(
        f"{dtype} {_number(max(row.largest for row in rows if row.cell.dtype == dtype))}"
        for dtype in ("float64", "float32")
        if any(row.cell.dtype == dtype for row in rows)
    )
    computed = f"{wanted} cells" if len(rows) == wanted else f"{len(rows)} of {wanted} cells computed"
    return f"{computed}: {counts}. Largest relative error of all: {largest}."
