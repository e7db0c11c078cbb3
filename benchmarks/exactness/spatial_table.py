"""The rows of the table of teams in Markdown: operations, models, peers, and every cell that did not pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from app.training.exactness import KINDS
from benchmarks.exactness.cells import COMMUNICATORS
from benchmarks.exactness.peers import PEER_OPERATIONS
from benchmarks.exactness.spatial_cells import GRIDS, KEEPING, MESHES, SUBJECTS, Cell, ModelCell, OperationCell
from benchmarks.exactness.spatial_ops import OPERATIONS
from benchmarks.results import markdown_table

Row = dict[str, Any]
ERRORS = ("output", "image", "parameters", "statistics", "loss", *(kind for kind in KINDS if kind == "gradients"))
FINISHED = ("passed", "inexact")


def largest(row: Row) -> float:
    """Return the largest error of a row; infinite where nothing was computed."""
    if row["status"] not in FINISHED:
        return math.inf
    return max((row[error] for error in ERRORS if error in row), default=math.inf)


def summary(rows: Mapping[Cell, Row], wanted: int) -> str:
    """Return the tables.

    Args:
        wanted: cells that were to be computed; there may be fewer rows.
    """
    ours = {cell: row for cell, row in rows.items() if isinstance(cell, OperationCell) and cell.by == "teams"}
    models = {cell: row for cell, row in rows.items() if isinstance(cell, ModelCell)}
    peers = {cell: row for cell, row in rows.items() if isinstance(cell, OperationCell) and cell.by != "teams"}
    parts = []
    if ours:
        parts += ["Operations on threads, sides 64, 61, 67 x 53 and 97, by grid:\n", _operations(ours)]
    if models:
        parts += ["Models, float64, one step of four microbatches:\n", _models(models)]
    if peers:
        parts += ["The same operations by peers, float64, largest error of what they compute:\n", _peers(ours, peers)]
    counted = {**ours, **models}
    states = ("passed", "refused", "inexact", "failed")
    counts = ", ".join(f"{sum(row['status'] == state for row in counted.values())} {state}" for state in states)
    missing = "" if len(rows) == wanted else f" ({len(rows)} of {wanted} computed)"
    parts.append(f"{len(counted)} cells of ours{missing}: {counts}; {len(peers)} of peers.\n")
    others = [
        (str(cell), row["status"], row.get("note", "")) for cell, row in counted.items() if row["status"] != "passed"
    ]
    if others:
        parts += [
            "Cells of ours that did not pass:\n",
            markdown_table(("cell", "status", "why"), others),
        ]
    alone = sorted({str(row["note"]) for row in ours.values() if row["status"] == "passed" and row.get("note")})
    parts += [f"Passed, not divided to the end: {note}.\n" for note in alone]
    return "\n".join(parts)


def _operations(rows: Mapping[OperationCell, Row]) -> str:
    lines = []
    for name in OPERATIONS:
        of_name = {cell: row for cell, row in rows.items() if cell.operation == name}
        if of_name:
            double = [(cell, row) for cell, row in of_name.items() if cell.dtype == "float64"]
            grids = [_entry(row for cell, row in double if cell.grid == grid) for grid in GRIDS]
            lines.append((name, *grids, _entry(row for cell, row in of_name.items() if cell.dtype == "float32")))
    return markdown_table(("operation", *GRIDS, "float32, 35 x 27"), lines)


def _models(rows: Mapping[ModelCell, Row]) -> str:
    lines = []
    for name in SUBJECTS:
        for communicator in COMMUNICATORS:
            here = {c: row for c, row in rows.items() if (c.model, c.communicator) == (name, communicator)}
            if here:
                columns = [_entry(row for cell, row in here.items() if cell.mesh == mesh) for mesh in MESHES]
                lines.append((name, communicator, *columns))
    header = ("model", "over", *MESHES)
    return (
        markdown_table(header, lines) + f"\nIn brackets: cells passed of all; ways of keeping: {', '.join(KEEPING)}.\n"
    )


def _peers(ours: Mapping[OperationCell, Row], peers: Mapping[OperationCell, Row]) -> str:
    names = list(dict.fromkeys(cell.by for cell in peers))
    lines = []
    for operation in PEER_OPERATIONS:
        mine = _entry(row for c, row in ours.items() if c.operation == operation and c.dtype == "float64")
        columns = []
        for name in names:
            here = [row for cell, row in peers.items() if (cell.operation, cell.by) == (operation, name)]
            columns.append(_peer_entry(here))
        lines.append((operation, mine, *columns))
    return markdown_table(("operation", "teams", *names), lines)


def _peer_entry(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    finished = [row for row in rows if row["status"] in FINISHED]
    refused = len(rows) - len(finished)
    if not finished:
        return f"none of {len(rows)} computed"
    kinds = ("output", "image", "parameters")
    errors = ", ".join(f"{kind} {max(row[kind] for row in finished):.0e}" for kind in kinds)
    return f"{errors}; {refused} of {len(rows)} refused" if refused else errors


def _entry(rows: Iterable[Row]) -> str:
    every = list(rows)
    if not every:
        return ""
    passed = sum(row["status"] == "passed" for row in every)
    error = max((largest(row) for row in every if row["status"] in FINISHED), default=math.inf)
    return f"{error:.1e} ({passed} of {len(every)})"
