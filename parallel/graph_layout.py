"""From an outline to places on paper: boxes, the wires between them, cuts and folds, in px.

Parts stand in rows from top to bottom, in several columns where there are many. Wires go straight down, beside the
boxes in lanes, or across in the gaps between rows; no wire runs under a box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from parallel.graph_column import Column, Lane, place_column
from parallel.graph_grid import Net, folds_of, nets_of, rows_of
from parallel.outline import Outline

UNIT = 16.0
"""Width of a lane."""
BOX_HEIGHT, GAP, TRACK, CUT = 42.0, 25.0, 7.0, 26.0
"""Heights: of a box, of the least gap between rows, of one more wire across in it, of the room for a cut in it."""
INTO, OUT_OF = 0.3, 0.7
"""Where on the right side of a box wires come in and go out, as parts of its height."""
PORT = 11.0
"""From the middle of a box to where wires from the side come in from above."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """Part ``number`` in ``column``; x and y of the top left corner."""

    number: int
    column: int
    x: float
    y: float
    width: float
    height: float = BOX_HEIGHT


@dataclass(frozen=True, slots=True)
class Wire:
    """What part ``source`` gives, along ``points``.

    Attributes:
        arrow: it ends at a part.
        dot: it begins on another wire of the same source.
        kind: "trunk" straight from box to box, "lane" down beside the boxes, "stub" elsewhere.
    """

    source: int
    points: tuple[Point, ...]
    arrow: bool
    dot: bool = False
    kind: str = "stub"


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of one stage in one column: ``top`` to ``bottom``; the stage begins here or goes on."""

    stage: int
    column: int
    left: float
    right: float
    top: float
    bottom: float
    begins: bool


@dataclass
class Layout:
    """All that is drawn, in px."""

    boxes: list[Box] = field(default_factory=list)
    wires: list[Wire] = field(default_factory=list)
    bands: list[Band] = field(default_factory=list)
    width: float = 0.0
    height: float = 0.0


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
    previous: _Drawn | None = None
    for number, column in enumerate(columns):
        crossing = [net for net in nets if rows[net.source] < column.first <= max(rows[t] for t in net.targets)]
        gutter = left
        left += len(crossing) * TRACK + (TRACK if crossing else 0) + margin
        drawn = _Drawn(column, number, left, top, rows, nets, cut_rows, box_width, crossing, layout)
        drawn.draw()
        if previous:
            _connect(layout, previous, drawn, crossing, gutter)
        layout.bands += _bands(drawn, first_row, left - margin)
        previous = drawn
        left = drawn.right + UNIT
    layout.width = left
    layout.height = max(layout.height, *(band.bottom for band in layout.bands))
    return layout


class _Drawn:
    """One column in px: heights of its gaps first, then boxes and wires."""

    def __init__(
        self,
        column: Column,
        number: int,
        left: float,
        top: float,
        rows: Sequence[int],
        nets: Sequence[Net],
        cut_rows: set[int],
        box_width: float,
        crossing: Sequence[Net],
        layout: Layout,
    ) -> None:
        self.column, self.number, self.left, self.rows, self.layout = column, number, left, rows, layout
        self.box_width, self.cut_rows = box_width, cut_rows
        self.right = left + column.width * UNIT
        self.sources = {net.source: net for net in nets}
        self.members = sorted(column.x)
        self.across: dict[int, dict[tuple[str, int], list[float]]] = {}
        """Row above a gap -> (out of or into, part) -> where its wire across has to reach."""
        self.enters: dict[int, float] = {}
        self.leaves: dict[int, float] = {}
        """Source of a net -> x at which it comes into the column from above, or goes out of it below."""
        self.aside: dict[int, float] = {}
        """Source -> x of its lane, where it also comes in straight above a part."""
        self._plan()
        self.row_y: dict[int, float] = {}
        self.track_y: dict[tuple[int, str, int], float] = {}
        self.cut_y: dict[int, float] = {}
        y = top + len(crossing) * TRACK
        self.top = y
        for row in range(column.first - 1, column.last + 1):
            y = self._gap(row, y)
            if row < column.last:
                self.row_y[row + 1] = y
                y += BOX_HEIGHT
        self.bottom = y

    def middle(self, part: int) -> float:
        return self.x(part) + self.box_width / 2

    def x(self, part: int) -> float:
        return self.left + self.column.x[part] * UNIT

    def lane_x(self, lane: Lane) -> float:
        return self.left + lane.x * UNIT + UNIT / 2

    def beside(self, part: int, lane: Lane) -> bool:
        """No box stands between the part and the lane."""
        between = range(self.column.x[part] + 1, lane.x)
        return not any(
            other != part and self.rows[other] == self.rows[part] and self.column.x[other] in between
            for other in self.members
        )

    def gap_routed(self) -> list[tuple[int, int]]:
        """Neighbouring rows' (source, target) that do not stand under each other, and those dropped."""
        pairs = [(source, target) for source, target in self.column.dropped.items()]
        for source in self.members:
            for target in self.sources[source].targets if source in self.sources else ():
                near = target in self.column.x and self.rows[target] == self.rows[source] + 1
                if near and (source, target) not in self.column.straight:
                    pairs.append((source, target))
        return sorted(pairs)

    def joins(self, target: int) -> bool:
        """A wire comes straight from above."""
        return any(pair[1] == target for pair in self.column.straight) or target in self.column.entering.values()

    def port(self, target: int, x: float) -> float:
        """Where a wire from ``x`` comes into ``target`` from above."""
        middle = self.middle(target)
        return middle + (PORT if x > middle else -PORT)

    def _want(self, row: int, side: str, part: int, *xs: float) -> None:
        self.across.setdefault(row, {}).setdefault((side, part), []).extend(xs)

    def _plan(self) -> None:
        """Which wires go across in which gap, and how far."""
        for source, target in self.gap_routed():
            row = self.rows[target] - 1
            if self.joins(target) or source in self.column.dropped:
                x = self.middle(source)
                self._want(row, "into", target, x, self.port(target, x))
            else:
                self._want(row, "out of", source, self.middle(source), self.middle(target))
        for lane in self.column.lanes:
            source, x = lane.net.source, self.lane_x(lane)
            if source in self.column.x and not self.beside(source, lane):
                self._want(self.rows[source], "out of", source, self.middle(source), x)
            for target in lane.targets:
                if not self.beside(target, lane):
                    self._want(self.rows[target] - 1, "into", target, x, self.port(target, x))

    def _gap(self, row: int, y: float) -> float:
        """Heights of the wires across below ``row``, and of a cut; gives y of the next row."""
        wanted = self.across.get(row, {})
        start = y
        y += 9.0
        for side in ("out of", "into"):
            tracks: list[list[tuple[float, float]]] = []
            for (this, part), xs in sorted(wanted.items(), key=lambda item: (min(item[1]), item[0][1])):
                if this != side:
                    continue
                low, high = min(xs) - 4, max(xs) + 4
                free = [k for k, track in enumerate(tracks) if all(high < a or b < low for a, b in track)]
                if not free:
                    tracks.append([])
                k = free[0] if free else len(tracks) - 1
                tracks[k].append((low, high))
                self.track_y[row, side, part] = y + k * TRACK
            y += len(tracks) * TRACK
            if side == "out of" and row + 1 in self.cut_rows and row < self.column.last:
                self.cut_y[row + 1] = y + CUT - 9.0
                y += CUT
        return max(y + 9.0, start + GAP)

    def draw(self) -> None:
        wires = self.layout.wires
        for part in self.members:
            self.layout.boxes.append(Box(part, self.number, self.x(part), self.row_y[self.rows[part]], self.box_width))
        for source, target in sorted(self.column.straight):
            x = self.middle(source)
            wires.append(Wire(source, ((x, self._below(source)), (x, self._above(target))), True, kind="trunk"))
        for source, target in self.gap_routed():
            self._draw_across(source, target)
        for source, target in sorted(self.column.entering.items()):
            self.enters[source] = self.middle(target)
        for source in sorted(self.column.leaving):
            self.leaves[source] = self.middle(source)
        for lane in self.column.lanes:
            self._draw_lane(lane)

    def _below(self, part: int) -> float:
        return self.row_y[self.rows[part]] + BOX_HEIGHT

    def _above(self, part: int) -> float:
        return self.row_y[self.rows[part]]

    def _draw_across(self, source: int, target: int) -> None:
        x, row = self.middle(source), self.rows[target] - 1
        start = (x, self._below(source))
        if ("into", target) in self.across.get(row, {}) and (self.joins(target) or source in self.column.dropped):
            y, end = self.track_y[row, "into", target], self.port(target, x)
        else:
            y, end = self.track_y[row, "out of", source], self.middle(target)
        points = (start, (x, y), (end, y), (end, self._above(target)))
        self.layout.wires.append(Wire(source, points, True))

    def _draw_lane(self, lane: Lane) -> None:
        """From its source into the lane, down, and out at each target; the last one is where the lane ends."""
        source, x = lane.net.source, self.lane_x(lane)
        if source in self.column.x and self.beside(source, lane):
            y = self._above(source) + OUT_OF * BOX_HEIGHT
            points: list[Point] = [(self.x(source) + self.box_width, y), (x, y)]
        elif source in self.column.x:
            y = self.track_y[self.rows[source], "out of", source]
            points = [(self.middle(source), self._below(source)), (self.middle(source), y), (x, y)]
        else:
            (self.aside if source in self.enters else self.enters)[source] = x
            points = [(x, self.top)]
        targets = sorted(lane.targets, key=lambda target: (self.rows[target], target))
        if lane.last > self.column.last:
            self.leaves[source] = x
            self.layout.wires.append(Wire(source, (*points, (x, self.bottom)), False, kind="lane"))
        else:
            last = targets.pop()
            self.layout.wires.append(Wire(source, (*points, *self._into(last, lane)), True, kind="lane"))
        for target in targets:
            self.layout.wires.append(Wire(source, tuple(self._into(target, lane)), True, dot=True))

    def _into(self, target: int, lane: Lane) -> list[Point]:
        """From the lane to the part."""
        x = self.lane_x(lane)
        if self.beside(target, lane):
            y = self._above(target) + INTO * BOX_HEIGHT
            return [(x, y), (self.x(target) + self.box_width, y)]
        y, port = self.track_y[self.rows[target] - 1, "into", target], self.port(target, x)
        return [(x, y), (port, y), (port, self._above(target))]


def _connect(layout: Layout, before: _Drawn, after: _Drawn, crossing: Sequence[Net], gutter: float) -> None:
    """Wires from the bottom of a column to the top of the next; the rightmost stays innermost."""
    order = sorted((net.source for net in crossing), key=lambda source: -before.leaves[source])
    count = len(order)
    for k, source in enumerate(order):
        down, up = before.bottom + k * TRACK + 4, after.top - (count - k) * TRACK
        x = gutter + (k + 0.5) * TRACK
        out, into = before.leaves[source], after.enters[source]
        begin = before._below(source) if source in before.column.leaving else before.bottom
        points: list[Point] = [(out, begin), (out, down), (x, down), (x, up), (into, up)]
        straight = source in after.column.entering
        points.append((into, after._above(after.column.entering[source]) if straight else after.top))
        layout.wires.append(Wire(source, tuple(points), straight))
        if source in after.aside:
            layout.wires.append(
                Wire(source, ((into, up), (after.aside[source], up), (after.aside[source], after.top)), False)
            )
        layout.height = max(layout.height, down)


def _bands(drawn: _Drawn, first_row: dict[int, int], left: float) -> list[Band]:
    """Stages of the column, from cut to cut."""
    column, order = drawn.column, sorted(first_row)
    inside = [
        stage
        for k, stage in enumerate(order)
        if first_row[stage] <= column.last and (k + 1 == len(order) or first_row[order[k + 1]] > column.first)
    ]
    bands = []
    for k, stage in enumerate(inside):
        begins = first_row[stage] >= column.first
        top = drawn.cut_y[first_row[stage]] if begins and stage > 0 else drawn.top
        after = inside[k + 1] if k + 1 < len(inside) else None
        bottom = drawn.bottom - 9.0 if after is None else drawn.cut_y[first_row[after]]
        bands.append(Band(stage, drawn.number, left, drawn.right, top, bottom, begins))
    return bands
