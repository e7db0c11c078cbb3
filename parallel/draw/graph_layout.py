"""From an outline to places on paper: boxes, the wires between them, cuts and folds, in px.

Parts stand in rows from top to bottom, in several columns where there are many; what passes from one column to the
next runs around below, between and above them.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.draw.graph_column import place_column
from parallel.draw.graph_frame import EDGE, Frame
from parallel.draw.graph_grid import Net, folds_of, nets_of, rows_of
from parallel.draw.graph_places import TRACK, UNIT, Band, Layout, Point, Wire
from parallel.draw.graph_routes import route
from parallel.draw.outline import Outline


def lay_out(
    outline: Outline, stages: Sequence[int], *, box_width: float, margin: float, top: float, column_rows: int
) -> Layout:
    """Places of all parts and wires.

    Args:
        stages: stage of each part.
        box_width: of every box.
        margin: left of each column, for words about stages and repeats.
        top: y of the first row's gap.
        column_rows: about as many in a column.
    """
    rows, nets = rows_of(outline, stages), nets_of(outline)
    starts = folds_of(rows, nets, column_rows)
    ends = [*(start - 1 for start in starts[1:]), max(rows)]
    box_units = int(-(-box_width // UNIT)) + 1
    columns = [place_column(*ends_, rows, nets, box_units) for ends_ in zip(starts, ends, strict=True)]
    first_row = {stage: min(row for row, s in zip(rows, stages, strict=True) if s == stage) for stage in set(stages)}
    cut_rows = {row for stage, row in first_row.items() if stage > 0}
    layout, left = Layout(), 0.0
    previous: Frame | None = None
    for number, column in enumerate(columns):
        crossing = [net for net in nets if rows[net.source] < column.first <= max(rows[t] for t in net.targets)]
        gutter = left
        left += len(crossing) * TRACK + (TRACK if crossing else 0) + margin
        frame = Frame(column, left, top, rows, nets, cut_rows, box_width, crossing)
        route(frame, number, layout)
        if previous:
            _connect(layout, previous, frame, crossing, gutter)
        layout.bands += _bands(frame, number, first_row, left - margin)
        previous = frame
        left = frame.right + UNIT
    layout.width = left
    layout.height = max(layout.height, *(band.bottom for band in layout.bands))
    return layout


def _connect(layout: Layout, before: Frame, after: Frame, crossing: Sequence[Net], gutter: float) -> None:
    """Wires from the bottom of a column to the top of the next; the rightmost stays innermost."""
    order = sorted((net.source for net in crossing), key=lambda source: -before.leaves[source])
    count = len(order)
    for k, source in enumerate(order):
        down, up = before.bottom + k * TRACK + 4, after.top - (count - k) * TRACK
        x = gutter + (k + 0.5) * TRACK
        out, into = before.leaves[source], after.enters[source]
        begin = before.below(source) if source in before.column.leaving else before.bottom
        points: list[Point] = [(out, begin), (out, down), (x, down), (x, up), (into, up)]
        straight = source in after.column.entering
        points.append((into, after.above(after.column.entering[source]) if straight else after.top))
        layout.wires.append(Wire(source, tuple(points), straight))
        if source in after.aside:
            layout.wires.append(
                Wire(source, ((into, up), (after.aside[source], up), (after.aside[source], after.top)), False)
            )
        layout.height = max(layout.height, down)


def _bands(frame: Frame, number: int, first_row: dict[int, int], left: float) -> list[Band]:
    """Stages of the column, from cut to cut."""
    column, order = frame.column, sorted(first_row)
    inside = [
        stage
        for k, stage in enumerate(order)
        if first_row[stage] <= column.last and (k + 1 == len(order) or first_row[order[k + 1]] > column.first)
    ]
    bands = []
    for k, stage in enumerate(inside):
        begins = first_row[stage] >= column.first
        top = frame.cut_y[first_row[stage]] if begins and stage > 0 else frame.top
        after = inside[k + 1] if k + 1 < len(inside) else None
        bottom = frame.bottom - EDGE if after is None else frame.cut_y[first_row[after]]
        bands.append(Band(stage, number, left, frame.right, top, bottom, begins))
    return bands
