"""The rows of the table: kept in a CSV file as they come, and summed up in Markdown.

Takes rows; gives them back, and the tables of the README.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from benchmarks.results import markdown_table

DEPTHS = (2, 4)


@dataclass(frozen=True)
class Row:
    """What became of one model in one number of stages.

    Attributes:
        status: passed; inexact: an error above the tolerance; refused: cannot be split so, with the reason; failed;
            died: its process ended, or was ended at the time limit.
        parameters: in the whole model.
        layers: that the model was traced into.
        whole: kinds of the modules that could not be looked into.
        cuts: the layers that begin the stages after the first.
        reached: tensors whose gradient in the plain step is not zero, of all.
        peak_gib: largest resident memory of the process so far.
        loss, gradients, statistics: largest relative errors.
        note: why not passed.
    """

    model: str
    depth: int
    status: str
    dtype: str
    tile: int
    tiles: int
    seconds: float = 0.0
    parameters: int = 0
    layers: int = 0
    whole: str = ""
    cuts: str = ""
    reached: str = ""
    peak_gib: float = 0.0
    loss: float = 0.0
    gradients: float = 0.0
    statistics: float = 0.0
    note: str = ""

    @property
    def largest(self) -> float:
        return max(self.loss, self.gradients, self.statistics)


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


def read(path: Path) -> dict[tuple[str, int], Row]:
    """Model and depth -> the last row of the file; none when it is not there."""
    if not path.exists():
        return {}
    rows = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            row = row_of(line)
            rows[row.model, row.depth] = row
    return rows


def row_of(values: dict[str, str]) -> Row:
    """The row that a line of text holds."""
    kinds = {"int": int, "float": float, "str": str}
    return Row(**{field.name: kinds[str(field.type)](values[field.name]) for field in fields(Row)})


def summary(rows: Iterable[Row], wanted: int) -> str:
    """A line a model, how many of how many, and every row that did not pass.

    Args:
        wanted: models that were to be split; there may be rows of fewer.
    """
    of_model: dict[str, dict[int, Row]] = {}
    for row in rows:
        of_model.setdefault(row.model, {})[row.depth] = row
    header = ("model", "parameters", "type", "tile px", "layers", "gradients", *(f"{depth} stages" for depth in DEPTHS))
    lines = [_line(name, by_depth) for name, by_depth in of_model.items()]
    parts = [markdown_table(header, lines), _total(of_model, wanted)]
    others = [row for by_depth in of_model.values() for row in by_depth.values() if row.status != "passed"]
    if others:
        why = [(row.model, str(row.depth), row.status, row.note.replace("|", "/")) for row in others]
        parts += ["What did not pass:\n", markdown_table(("model", "stages", "status", "why"), why)]
    whole = [(row.model, row.whole) for row in (by_depth[min(by_depth)] for by_depth in of_model.values()) if row.whole]
    if whole:
        parts += ["Modules that stay whole, by model:\n", markdown_table(("model", "kinds"), whole)]
    return "\n".join(parts)


def _line(name: str, by_depth: dict[int, Row]) -> Sequence[str]:
    row = by_depth[max(by_depth)]
    outcomes = [_outcome(by_depth.get(depth)) for depth in DEPTHS]
    return (
        name.removeprefix("torchvision:"),
        f"{row.parameters / 1e6:.1f} M",
        row.dtype,
        str(row.tile),
        str(row.layers),
        row.reached,
        *outcomes,
    )


def _outcome(row: Row | None) -> str:
    if row is None:
        return ""
    return _number(row.largest) if row.status == "passed" else row.status


def _number(error: float) -> str:
    return f"{error:.1e}" if math.isfinite(error) else "infinite"


def _source(name: str) -> str:
    known = {"torchvision": "classifiers of torchvision", "unet": "U-Nets over encoders of timm"}
    return known.get(name.partition(":")[0], "models with auxiliary heads")


def _total(of_model: dict[str, dict[int, Row]], wanted: int) -> str:
    """How many models passed in every number of stages, by where they are from."""
    parts = []
    for source in dict.fromkeys(_source(name) for name in of_model):
        ours = [by_depth for name, by_depth in of_model.items() if _source(name) == source]
        counts = [sum(depth in by and by[depth].status == "passed" for by in ours) for depth in DEPTHS]
        both = sum(all(depth in by and by[depth].status == "passed" for depth in DEPTHS) for by in ours)
        shares = ", ".join(f"{n} in {depth} stages" for n, depth in zip(counts, DEPTHS, strict=True))
        parts.append(f"{both} of {len(ours)} {source} exact ({shares})")
    rows = [row for by_depth in of_model.values() for row in by_depth.values() if row.status == "passed"]
    largest = "; ".join(
        f"{dtype} {_number(max(row.largest for row in rows if row.dtype == dtype))}"
        for dtype in ("float64", "float32")
        if any(row.dtype == dtype for row in rows)
    )
    known = f"{wanted} tried" if len(of_model) == wanted else f"{len(of_model)} of {wanted} tried"
    text = f"{known}. {'; '.join(parts)}. Largest relative error of those that passed: {largest or 'none'}."
    if rows:
        most = max(rows, key=lambda row: row.peak_gib)
        text += f" Most memory of a process: {most.peak_gib:.1f} GiB, {most.model}."
    return f"{text}\n"
