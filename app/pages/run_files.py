"""The files of a run folder, read for the report.

Takes a run folder, finished, broken off or still being written to; has empty values for what is not there. A torn last
line of a table and an empty cell are missing values, not errors.
"""

from __future__ import annotations

import contextlib
import csv
import io
import itertools
import math
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.settings.cli import RunError
from app.settings.fields import read_data
from pipelines.catalog.table import original, read_rows

LOG_LINES = 12
"""Of the end of ``run.log``: enough for what was done last and the message of an error."""

Columns = Mapping[str, NDArray[np.float64]]
"""Column name -> float64 (rows,), NaN where a cell is empty; no value is infinite."""

Rows = tuple[Mapping[str, str], ...]


class RunFiles:
    """Content of the run folder ``run``.

    Attributes:
        plan: forecast of --parallel auto.
        schedule: picture of a step as SVG, "" where the model was not split.

    Raises:
        RunError: ``run`` is no run folder, or a file in it cannot be understood; the file is named.
    """

    def __init__(self, run: Path) -> None:
        if not run.is_dir():
            what = "is a file" if run.exists() else "does not exist"
            raise RunError(f"a report needs a run folder; {run} {what}. Give the --out folder of app.train")
        if not (run / "config.yaml").is_file():
            raise RunError(f"{run} is no run folder: config.yaml is missing. Give the --out folder of app.train")
        self.folder = run
        self.config = _mapping(run / "config.yaml")
        self.environment, self.summary, self.plan = (
            _mapping(run / name) for name in ("env.json", "summary.json", "plan.json")
        )
        self.metrics, self.validation = _columns(run / "metrics.csv"), _columns(run / "validation.csv")
        self.predictions, self.splits, self.failed = (
            _rows(run / name) for name in ("predictions.csv", "splits.csv", "failed_slides.csv")
        )
        self.overlays = sorted((run / "tissue").rglob("*.png"))
        self.schedule = _text(run / "schedule.svg")
        self.log_end = _text(run / "run.log").splitlines()[-LOG_LINES:]


@contextlib.contextmanager
def naming_the_summary(run: Path) -> Iterator[None]:
    """Name ``summary.json`` where one of its values has another type than app.train writes.

    Raises:
        RunError: one has.
    """
    try:
        yield
    except (AttributeError, LookupError, TypeError) as fault:
        raise RunError(
            f"{run / 'summary.json'}, or config.yaml or env.json beside it, holds a value of another type than "
            f"app.train writes: {fault}. Restore it or remove it"
        ) from fault


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    except OSError as fault:
        raise RunError(f"{path} cannot be read: {fault.strerror}. Check its permissions") from fault


def _mapping(path: Path) -> Mapping[str, Any]:
    try:
        return read_data(path) if path.is_file() and path.stat().st_size else {}
    except ValueError as fault:
        raise RunError(f"{fault}. Restore it or remove it") from fault


def _rows(path: Path) -> Rows:
    return tuple(read_rows(io.StringIO(_text(path), newline="")))


def _columns(path: Path) -> Columns:
    """Return the columns of a table of numbers, read row by row: a long run has a million rows."""
    rows = csv.reader(io.StringIO(_text(path), newline=""))
    names = [original(name) for name in next(rows, [])]
    cells = [array("d") for _ in names]
    for row in filter(None, rows):
        for column, cell in itertools.zip_longest(cells, row[: len(names)], fillvalue=""):
            assert isinstance(column, array)
            column.append(number_in(cell))
    columns = {name: np.frombuffer(column, np.float64) for name, column in zip(names, cells, strict=True) if column}
    if "step" in columns:  # a torn line without a step has no place on an axis
        whole = np.isfinite(columns["step"])
        columns = {name: values[whole] for name, values in columns.items()}
    return columns


def number_in(cell: str) -> float:
    """Return the number in a cell of a table; NaN where it is empty, or none."""
    try:
        value = float(cell)
    except ValueError:
        return math.nan
    return value if math.isfinite(value) else math.nan
