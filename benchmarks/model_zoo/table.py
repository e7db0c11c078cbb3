"""The rows of the table: kept in a CSV file as they come, and summed up in Markdown.

Takes rows; gives them back, and the tables of the README.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from benchmarks.results import markdown_table

STAGES = ("2 stages", "4 stages")
WAYS = (*STAGES, "recompute")
"""How a model is computed: in stages by 1F1B, or by one process that computes every block again for its backward."""

STATUSES = ("exact", "refused", "wrong", "failed", "late", "large", "died")
FAULTS = ("wrong", "failed", "late", "large", "died")


@dataclass(frozen=True)
class Row:
    """What became of one model, computed one way.

    Attributes:
        way: of ``WAYS``.
        library: whose model it is.
        status: exact; wrong: an error above the tolerance; refused: with a reason for the user, before the first step;
            failed: with an error of somebody else's; late, large: not done within the limits of
            time or memory; died: its process ended.
        parameters: in the whole model.
        layers: that the model was traced into; 0: it cannot be traced.
        whole: kinds of the modules that could not be looked into.
        reached: tensors whose gradient in the plain step is not zero, of all.
        seconds: of the processor.
        peak_gib: largest resident memory of the process so far.
        loss, gradients, state: largest relative errors; state is updated parameters, buffers and optimizer state.
        note: why not exact.
    """

    model: str
    way: str
    library: str
    status: str
    dtype: str
    tile: int
    tiles: int
    seconds: float = 0.0
    parameters: int = 0
    layers: int = 0
    whole: str = ""
    reached: str = ""
    peak_gib: float = 0.0
    loss: float = 0.0
    gradients: float = 0.0
    state: float = 0.0
    note: str = ""

    @property
    def largest(self) -> float:
        errors = (self.loss, self.gradients, self.state)
        return max(errors) if all(map(math.isfinite, errors)) else math.inf

    def at(self, way: str) -> Row:
        """The same, of another way."""
        return replace(self, way=way)


COLUMNS = [field.name for field in fields(Row)]


def append(path: Path, row: Row) -> None:
    """Add ``row`` to the file, which is made when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    begins = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        if begins:
            writer.writeheader()
        writer.writerow(asdict(row))


def read(path: Path) -> dict[tuple[str, str], Row]:
    """Model and way -> the last row of the file; none when it is not there."""
    if not path.exists():
        return {}
    kinds = {"int": int, "float": float, "str": str}
    rows = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            row = Row(**{field.name: kinds[str(field.type)](line[field.name]) for field in fields(Row)})
            rows[row.model, row.way] = row
    return rows


def summary(rows: Sequence[Row], wanted: int) -> str:
    """Counts by library, a line a model, and every row that is not exact.

    Args:
        wanted: models that were to be computed; there may be rows of fewer.
    """
    of_model = _by_model(rows)
    tried = f"{wanted} models." if len(of_model) == wanted else f"{len(of_model)} of {wanted} models."
    parts = [f"{tried} {_largest(rows)}\n", _libraries(rows)]
    header = ("model", "parameters", "type", "px", "layers", "gradients", *WAYS)
    for library in _libraries_of(rows):
        ours = [(name, by_way) for name, by_way in of_model.items() if _first(by_way).library == library]
        parts += [f"{library}:\n", markdown_table(header, [_line(by_way) for _, by_way in ours])]
    parts += _others(rows)
    if whole := [(row.model, row.whole) for row in map(_first, of_model.values()) if row.whole]:
        parts += ["Modules that stay whole, by model:\n", markdown_table(("model", "kinds"), whole)]
    return "\n".join(parts)


def grid_summary(rows: Sequence[Row], ways: Sequence[str]) -> str:
    """A line a model and side of tiles, with the largest error of each way, and every row that is not exact."""
    of_model = _by_model(rows)
    counts = ", ".join(f"{n} {status}" for status in STATUSES if (n := sum(row.status == status for row in rows)))
    lines = [(*_about(_first(by_way)), *(_outcome(by_way.get(way)) for way in ways)) for by_way in of_model.values()]
    models = len({name.partition(" at ")[0] for name in of_model})
    parts = [f"{models} models, {len(rows)} rows: {counts}. {_largest(rows)}\n"]
    parts.append(markdown_table(("model", "parameters", *ways), lines))
    return "\n".join([*parts, *_others(rows)])


def _others(rows: Sequence[Row]) -> list[str]:
    """Every row that is not exact."""
    why: dict[tuple[str, str, str], list[str]] = {}
    for row in rows:
        if row.status != "exact":
            why.setdefault((row.model, row.status, row.note.replace("|", "/")), []).append(row.way)
    lines = [(model, ", ".join(ways), status, note) for (model, status, note), ways in why.items()]
    return ["What is not exact:\n", markdown_table(("model", "way", "status", "why"), lines)] if lines else []


def totals(rows: Sequence[Row]) -> str:
    """One line: by library, the models that are exact in 2 and in 4 stages, and the rows by status."""
    parts = []
    for library in _libraries_of(rows):
        ours = [row for row in rows if row.library == library]
        counts = ", ".join(f"{n} {s}" for s in STATUSES if (n := sum(row.status == s for row in ours)) or s == "wrong")
        parts.append(f"{library} {_in_stages(ours)} models exact in 2 and 4 stages (rows: {counts})")
    return "; ".join(parts)


def _libraries(rows: Sequence[Row]) -> str:
    header = ("library", "exact in 2 and 4 stages", "exact recomputed", *(f"rows {status}" for status in STATUSES))
    lines = []
    for library in [*_libraries_of(rows), "all"]:
        ours = [row for row in rows if library in ("all", row.library)]
        again = [row for row in ours if row.way == "recompute"]
        recomputed = f"{sum(row.status == 'exact' for row in again)} of {len(again)}"
        counts = [str(sum(row.status == status for row in ours)) for status in STATUSES]
        lines.append((library, _in_stages(ours), recomputed, *counts))
    return markdown_table(header, lines)


def _in_stages(rows: Sequence[Row]) -> str:
    of_model = _by_model(rows)
    exact = sum(all(way in by and by[way].status == "exact" for way in STAGES) for by in of_model.values())
    return f"{exact} of {len(of_model)}"


def _by_model(rows: Iterable[Row]) -> dict[str, dict[str, Row]]:
    of_model: dict[str, dict[str, Row]] = {}
    for row in rows:
        of_model.setdefault(row.model, {})[row.way] = row
    return of_model


def _libraries_of(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row.library for row in rows))


def _first(by_way: dict[str, Row]) -> Row:
    return next(iter(by_way.values()))


def _line(by_way: dict[str, Row]) -> Sequence[str]:
    row = _first(by_way)
    outcomes = [_outcome(by_way.get(way)) for way in WAYS]
    return (*_about(row), row.dtype, str(row.tile), str(row.layers), row.reached, *outcomes)


def _about(row: Row) -> tuple[str, str]:
    """Name and size."""
    size = f"{row.parameters / 1e6:.1f} M" if row.parameters >= 1e5 else f"{row.parameters / 1e3:.1f} k"
    return row.model, size


def _outcome(row: Row | None) -> str:
    if row is None:
        return ""
    return _number(row.largest) if row.status == "exact" else row.status


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "infinite"


def _largest(rows: Sequence[Row]) -> str:
    """The largest error of what is exact, and the most memory."""
    exact = [row for row in rows if row.status == "exact"]
    if not exact:
        return "None is exact."
    errors = "; ".join(
        f"{dtype} {_number(max(row.largest for row in exact if row.dtype == dtype))}"
        for dtype in ("float64", "float32")
        if any(row.dtype == dtype for row in exact)
    )
    most = max(rows, key=lambda row: row.peak_gib)
    return f"Largest relative error of what is exact: {errors}. Most memory: {most.peak_gib:.1f} GiB, {most.model}."
