"""Place the parts of a model, the wires between them and its stages, in px.

Each part stands in a row below all that it uses, as in layered drawings (Sugiyama, Tagawa and Toda 1981). Each stage
has rows of its own, so that a cut is a straight line. Chains of parts stand below each other. Every other value runs
down in a lane on the right, one for all its users. A tall drawing continues in a next column, as text does.
"""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parallel.draw.outline import ModelView

UNIT = 16.0
"""Width of a lane."""
BOX_HEIGHT, GAP, EDGE, TRACK, CUT = 42.0, 25.0, 9.0, 7.0, 26.0
"""Heights: a box, the least gap between rows, its edges without wires, a wire across, the room for a cut."""
INTO, OUT_OF, PORT = 0.3, 0.7, 11.0
"""Where wires of lanes meet a box: on its right, as parts of its height; above it, in px right of its middle."""
BEYOND = 9.0
"""How far a wire that goes on in the next column is drawn beyond the fold, in both columns."""

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Box:
    """Part ``number`` in ``column``; x and y of the top left corner."""

    number: int
    column: int
    x: float
    y: float
    width: float


@dataclass(frozen=True, slots=True)
class Wire:
    """The value of part ``source``, along ``points``.

    Attributes:
        arrow, dot: the wire ends at a part, and begins on another wire of the same source.
        kind: "trunk" straight from box to box, "lane" down next to the boxes, "stub" from a lane to a box.
    """

    source: int
    points: tuple[Point, ...]
    arrow: bool = True
    dot: bool = False
    kind: str = "trunk"


@dataclass(frozen=True, slots=True)
class Band:
    """Rows of one stage in one column; the stage begins here or continues."""

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


def lay_out(view: ModelView, *, box_width: float, margin: float, top: float, column_rows: int) -> Layout:
    """Return the places of all parts, wires and stages.

    Args:
        margin: left of each column, for words about stages and repeats.
        top: y of the columns' upper end.
        column_rows: in a column, about.
    """
    users: dict[int, list[int]] = {}
    for link in view.links:
        users.setdefault(link.source, []).append(link.target)
    strip = _Strip(_rows(view, users), view.stage_of, users, box_width)
    return _folded(strip, view.stage_of, margin, top, column_rows)


def _rows(view: ModelView, users: Mapping[int, Sequence[int]]) -> list[int]:
    """Row of each part: the longest way from the first part of its stage; layers of a block have rows of their own."""
    begins = {end for group in view.groups for end in (group.first, group.last + 1)}
    if view.level in ("block", "module"):
        begins = set()
    sources: dict[int, list[int]] = {}
    for link in view.links:
        sources.setdefault(link.target, []).append(link.source)
    rows: list[int] = []
    base = 0
    for number, stage in enumerate(view.stage_of):
        if number and (stage != view.stage_of[number - 1] or number in begins):
            base = max(rows) + 1
        rows.append(max([base, *(rows[source] + 1 for source in sources.get(number, ()))]))
    for number in reversed(range(1, len(rows))):
        # A part without inputs, such as a parameter, stands right above its first user.
        if number not in sources and number in users:
            rows[number] = max(rows[number], min(rows[user] for user in users[number]) - 1)
    return rows


class _Strip:
    """The whole drawing in one column whose top left corner is at 0, 0."""

    def __init__(
        self, rows: Sequence[int], stages: Sequence[int], users: Mapping[int, Sequence[int]], box_width: float
    ) -> None:
        self.rows, self.box_width = rows, box_width
        self.first_row = {stage: min(r for r, s in zip(rows, stages, strict=True) if s == stage) for stage in stages}
        self.in_row: dict[int, list[int]] = defaultdict(list)
        for number, row in enumerate(rows):
            self.in_row[row].append(number)
        self._taken: dict[int, int] = defaultdict(int)
        box_units = int(-(-box_width // UNIT)) + 1
        chains = self._chains(users)
        self.x: dict[int, float] = {}  # part -> left edge of its box
        for chain in chains:
            # Nothing begins right under a chain whose value is used elsewhere: its wires would seem to lead there.
            end = rows[chain[-1]] + (chain[-1] in users)
            self.x |= dict.fromkeys(chain, self._place(rows[chain[0]], end, box_units))
        straight = {pair for chain in chains for pair in pairwise(chain)}
        self.lanes = self._lanes(users, straight)
        self.width = {row: bits.bit_length() * UNIT for row, bits in self._taken.items()}
        self._heights()
        self.wires = [
            Wire(a, ((self.middle(a), self.below(a)), (self.middle(b), self.above(b)))) for a, b in sorted(straight)
        ]
        for source, (x, targets) in self.lanes.items():
            *others, last = sorted(targets, key=lambda target: (rows[target], target))
            self.wires.append(Wire(source, (*self._leave(source, x), *self._enter(last, x)), kind="lane"))
            self.wires += [Wire(source, self._enter(target, x), dot=True, kind="stub") for target in others]

    def _chains(self, users: Mapping[int, Sequence[int]]) -> list[list[int]]:
        """Ways through the parts that do not meet, the trunk first."""
        chains: list[list[int]] = []
        for number in sorted(range(len(self.rows)), key=lambda number: (self.rows[number], number)):
            chain = next((chain for chain in chains if number in users.get(chain[-1], ())), None)
            if chain is None:
                chains.append(chain := [])
            chain.append(number)
        return chains

    def _place(self, first: int, last: int, units: int, least: float = 0.0) -> float:
        """Take the leftmost ``units`` that are free in all rows, right of ``least``, and return their x."""
        union, unit = 0, int(-(-least // UNIT))
        for row in range(first, last + 1):
            union |= self._taken[row]
        while union >> unit & ((1 << units) - 1):
            unit += 1
        for row in range(first, last + 1):
            self._taken[row] |= ((1 << units) - 1) << unit
        return unit * UNIT

    def _lanes(
        self, users: Mapping[int, Sequence[int]], straight: set[tuple[int, int]]
    ) -> dict[int, tuple[float, list[int]]]:
        """Source -> x of its lane and the parts that the lane leads to; short lanes are further left."""
        wanted = []
        for source, targets in users.items():
            if beside := [target for target in targets if (source, target) not in straight]:
                wanted.append((max(self.rows[target] for target in beside), source, beside))
        lanes = {}
        for end, source, beside in sorted(wanted, key=lambda lane: (lane[0] - self.rows[lane[1]], *lane[:2])):
            least = max(self.x[number] for number in (source, *beside)) + self.box_width
            lanes[source] = (self._place(self.rows[source], end, 1, least) + UNIT / 2, beside)
        return lanes

    def _heights(self) -> None:
        """Place rows, with gaps for wires across: first those that leave the row above, then those to the row below."""
        out: dict[int, dict[int, Point]] = defaultdict(dict)
        into: dict[int, dict[int, Point]] = defaultdict(dict)
        for source, (x, targets) in self.lanes.items():
            if not self._free(source, x):
                out[self.rows[source]][source] = (self.middle(source), x)
            for target in targets:
                if not self._free(target, x):
                    begin, end = into[self.rows[target] - 1].get(target, (self.middle(target), x))
                    into[self.rows[target] - 1][target] = (begin, max(end, x))
        # Row -> y of its boxes, of the fold of a column that begins with it, and of the line above a stage.
        self.row_y, self.fold_y, self.cut_y = {}, {}, {}
        self.out_y: dict[int, float] = {}
        self.into_y: dict[int, float] = {}
        y = 0.0
        for row in range(-1, max(self.rows) + 1):
            start = y
            y = _tracks(out[row], y + EDGE, self.out_y)
            self.fold_y[row + 1] = y - EDGE / 2
            if row + 1 in self.first_row.values() and row >= 0:
                self.cut_y[row + 1] = y + CUT - EDGE
                y += CUT
            y = max(_tracks(into[row], y, self.into_y) + EDGE, start + GAP)
            self.row_y[row + 1] = y
            y += BOX_HEIGHT

    def _free(self, part: int, x: float) -> bool:
        """Return whether no box stands between the part and a lane."""
        return not any(self.x[part] < self.x[other] < x for other in self.in_row[self.rows[part]])

    def _leave(self, source: int, x: float) -> list[Point]:
        if self._free(source, x):
            y = self.above(source) + OUT_OF * BOX_HEIGHT
            return [(self.x[source] + self.box_width, y), (x, y)]
        y = self.out_y[source]
        return [(self.middle(source), self.below(source)), (self.middle(source), y), (x, y)]

    def _enter(self, target: int, x: float) -> tuple[Point, ...]:
        if self._free(target, x):
            y = self.above(target) + INTO * BOX_HEIGHT
            return ((x, y), (self.x[target] + self.box_width, y))
        y, port = self.into_y[target], self.middle(target) + PORT
        return ((x, y), (port, y), (port, self.above(target)))

    def middle(self, part: int) -> float:
        return self.x[part] + self.box_width / 2

    def above(self, part: int) -> float:
        return self.row_y[self.rows[part]]

    def below(self, part: int) -> float:
        return self.above(part) + BOX_HEIGHT


def _tracks(spans: Mapping[int, Point], y: float, y_of: dict[int, float]) -> float:
    """Give wires across, from x to x, a y of their own where they overlap; return y below them."""
    ends: list[float] = []
    for part, (low, high) in sorted(spans.items(), key=lambda item: (item[1], item[0])):
        track = next((k for k, end in enumerate(ends) if end < low - 8), len(ends))
        ends[track : track + 1] = [high]
        y_of[part] = y + track * TRACK
    return y + len(ends) * TRACK


def _folded(strip: _Strip, stages: Sequence[int], margin: float, top: float, column_rows: int) -> Layout:
    """Cut the strip into columns of about ``column_rows`` rows, where few wires cross."""
    count = max(strip.rows) + 1
    ideal = -(-count // -(-count // column_rows))
    crossing = [
        sum(a <= strip.fold_y[row] <= b for wire in strip.wires for (_, a), (_, b) in pairwise(wire.points))
        for row in range(count)
    ]
    starts = [0]
    while count - starts[-1] > ideal * 3 // 2:
        near = range(starts[-1] + (ideal + 1) // 2, starts[-1] + ideal * 3 // 2 + 1)
        starts.append(min(near, key=lambda row: (crossing[row], abs(row - starts[-1] - ideal))))
    ends = [*starts[1:], count]
    folds = [strip.fold_y[row] for row in starts[1:]]
    layout, shifts = Layout(), []
    for column, (start, end) in enumerate(zip(starts, ends, strict=True)):
        left, up = layout.width + margin, (strip.fold_y[start] - BEYOND if column else 0.0) - top
        shifts.append((left, up))
        layout.width = left + max(strip.width[row] for row in range(start, end)) + UNIT
        bottom = (strip.fold_y[end] + BEYOND if end < count else strip.row_y[count - 1] + BOX_HEIGHT + EDGE) - up
        layout.height = max(layout.height, bottom)
        for row in range(start, end):
            layout.boxes += [
                Box(part, column, left + strip.x[part], strip.row_y[row] - up, strip.box_width)
                for part in strip.in_row[row]
            ]
        inside = sorted({stages[part] for row in range(start, end) for part in strip.in_row[row]})
        tops = [strip.cut_y.get(row, 0.0) - up if (row := strip.first_row[s]) >= start else top for s in inside]
        tops = [max(y, top) for y in tops]
        for stage, low, high in zip(inside, tops, [*tops[1:], bottom], strict=True):
            begins = strip.first_row[stage] >= start
            layout.bands.append(Band(stage, column, left - margin, layout.width - UNIT, low, high, begins))
    for wire in strip.wires:
        layout.wires += _pieces(wire, folds, shifts)
    return layout


def _pieces(wire: Wire, folds: Sequence[float], shifts: Sequence[Point]) -> Iterator[Wire]:
    """The wire in each column that it runs through."""
    column = bisect(folds, wire.points[0][1])
    points = [wire.points[0]]
    dot = wire.dot

    def piece(*, arrow: bool) -> Wire:
        left, up = shifts[column]
        return Wire(wire.source, tuple((x + left, y - up) for x, y in points), arrow, dot, wire.kind)

    for (x, _), end in pairwise(wire.points):
        while column < len(folds) and folds[column] < end[1]:
            points.append((x, folds[column] + BEYOND))
            yield piece(arrow=False)
            points, dot, column = [(x, folds[column] - BEYOND)], False, column + 1
        points.append(end)
    yield piece(arrow=wire.arrow)
