"""Plan of a part of a region: its boxes, and for each shape of box the program that computes it.

Boxes of one shape differ only in where they lie. What a box cuts, splits and frees follows from its shape, so that a
program is compiled once and runs for every box of that shape, in both passes.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from parallel.space.box_bytes import AxisNeeds, Cuts
from parallel.space.cuts import Span, box_spans
from parallel.space.parts import partition_faults, span_faults
from parallel.space.phases import Part, live_steps
from parallel.space.rule import Step
from parallel.space.team import Box
from parallel.streaming.operation import Operation
from parallel.streaming.patch import Cut, cut_of, need_and_have
from parallel.streaming.region import Region

Spans = Mapping[str, Span]
MOST_PROGRAMS = 64
"""Kept of each part. Nine shapes of box are usual: first, inner and last along each axis."""


class Line(NamedTuple):
    """One row, or column, of boxes.

    Attributes:
        needs: (rows needed, those of them that the map has) of each use of a map, in the order of the steps; None where
            the step computes nothing.
        shape: equal for lines whose boxes differ only in where they lie.
    """

    needs: tuple[tuple[Span, Span] | None, ...]
    shape: Hashable


class MapUse(NamedTuple):
    """A map as a step of a box takes it.

    Attributes:
        number: of the use, in ``Line.needs``.
        cut: of the value that the box has; None: all of it.
        piece: position among the pieces of a value that was split; None: it is cut from the value.
        sides, dims: of the map.
    """

    name: str
    number: int
    cut: Cut | None
    piece: int | None
    sides: tuple[int, int]
    dims: tuple[int, int]


class Pieces(NamedTuple):
    """Parts of a value that some of its users need less of, if a gradient comes back for it."""

    dims: tuple[int, int]
    cuts: tuple[Cut, ...]


class StepRun(NamedTuple):
    """A step as a box computes it.

    Attributes:
        finished: names of the values that it is the last to use.
        may_change: no other step uses the memory of the map it takes.
        live_out: its value is used after the part.
        looked_at: a step of the box uses its value, which is no sum.
    """

    name: str
    node: fx.Node
    operation: Operation
    uses: tuple[MapUse, ...]
    finished: tuple[str, ...]
    may_change: bool
    live_out: bool
    looked_at: bool
    pieces: Pieces | None


class Result(NamedTuple):
    """Result of a box; without ``dims``, of a sum."""

    name: str
    dims: tuple[int, int] | None
    cut: Cut | None
    piece: int | None


class BoxProgram(NamedTuple):
    """Program that computes boxes of one shape.

    Attributes:
        entering: (name, pieces) of the maps that a box fetches.
        gives: names of the results.
    """

    entering: tuple[tuple[str, Pieces | None], ...]
    steps: tuple[StepRun, ...]
    results: tuple[Result, ...]
    gives: frozenset[str]


@dataclass(frozen=True)
class PartPlan:
    """One part of a region, ready to be computed.

    Attributes:
        region: that it is of.
        steps: of the part.
        entering: names of the maps that it fetches.
        live_steps: steps whose values are used after it.
        rows: for each row of boxes the rows of every map that it computes or fetches.
        columns: likewise.
        box_spans: (rows, columns) of each box in the value of a live step, by name.
        lines: of the rows, and of the columns, of boxes.
        finished: names of the values that a step is the last to use, by its name.
        used: names of the maps that its steps use.
        alone: names of steps that are the only ones to use what they take.
        places: (row, column) of every box that is computed here and gives something.
    """

    region: Region
    steps: tuple[Step, ...]
    entering: tuple[str, ...]
    live_steps: tuple[Step, ...]
    rows: tuple[Spans, ...]
    columns: tuple[Spans, ...]
    box_spans: Mapping[str, tuple[tuple[Span, ...], tuple[Span, ...]]]
    lines: tuple[tuple[Line, ...], tuple[Line, ...]]
    finished: Mapping[str, tuple[str, ...]]
    used: frozenset[str]
    alone: frozenset[str]
    places: Sequence[tuple[int, int]]
    _programs: dict[Hashable, BoxProgram] = field(default_factory=dict, init=False, repr=False, compare=False)

    def box(self, name: str, row: int, column: int) -> Box:
        """Return the box of the value of a live step."""
        rows, columns = self.box_spans[name]
        return rows[row], columns[column]

    def program(self, row: int, column: int) -> BoxProgram:
        """Return the program of a box."""
        shape = self.lines[0][row].shape, self.lines[1][column].shape
        program = self._programs.get(shape)
        if program is None:
            if len(self._programs) == MOST_PROGRAMS:
                del self._programs[next(iter(self._programs))]
            program = self._programs[shape] = _compiled(self, row, column)
        return program


def plan_part(
    region: Region,
    steps: Sequence[Step],
    part: Part,
    live_out: Collection[str],
    cuts: Cuts,
    mine: tuple[range, range],
) -> PartPlan:
    """Return the part of a phase, whose ``steps`` these are.

    Args:
        cuts: where its boxes begin and end, px of the tile.
        mine: rows and columns of boxes that are computed here.
    """
    own = tuple(steps[part.start : part.stop])
    live = tuple(live_steps(steps, part.stop, live_out, part.start))
    spans_of = {step.name: (box_spans(cuts[0], step.sides[0]), box_spans(cuts[1], step.sides[1])) for step in live}
    by_axis, faults = [], list[str]()
    for axis in (0, 1):
        needs = [AxisNeeds(live, region.sides, cuts[axis], axis, k) for k in range(len(cuts[axis]) - 1)]
        by_axis.append(tuple(need.prepend_all(own) for need in needs))
        for spans in by_axis[axis]:
            faults += span_faults(own, spans, region.sides, axis)
        for step in live:
            faults += partition_faults(step.name, spans_of[step.name][axis], step.sides[axis])
    assert not faults, "; ".join(faults[:3])
    made = {step.name for step in own}
    entering = tuple(dict.fromkeys(name for step in own for name in step.maps if name not in made))
    last = {name: step.name for step in own for name in step.maps}
    kept = {step.name for step in live}
    finished: dict[str, tuple[str, ...]] = {}
    for name, user in last.items():
        if name not in kept:
            finished[user] = (*finished.get(user, ()), name)
    alone = frozenset(step.name for step in own if step.maps[0] in made - kept and region.may_change(step))
    rows, columns = (
        tuple(
            _line(own, entering, spans, {name: places[axis][k] for name, places in spans_of.items()}, region, axis)
            for k, spans in enumerate(by_axis[axis])
        )
        for axis in (0, 1)
    )
    return PartPlan(
        region,
        own,
        entering,
        live,
        by_axis[0],
        by_axis[1],
        spans_of,
        (rows, columns),
        finished,
        frozenset(last),
        alone,
        places_of(spans_of, mine),
    )


def places_of(
    box_spans: Mapping[str, tuple[Sequence[Span], ...]], numbers: tuple[range, range]
) -> list[tuple[int, int]]:
    """Return (row, column) of the boxes in these rows and columns of boxes that give something."""
    return [
        (row, column)
        for row in numbers[0]
        for column in numbers[1]
        if any(rows[row].size and columns[column].size for rows, columns in box_spans.values())
    ]


def _line(
    steps: Sequence[Step], entering: Sequence[str], spans: Spans, gives: Spans, region: Region, axis: int
) -> Line:
    """Return the line of boxes that compute or fetch ``spans`` and give ``gives``."""
    needs: list[tuple[Span, Span] | None] = []
    shape: list[int | None] = [spans[name].size if name in spans else None for name in entering]
    for step in steps:
        made = spans.get(step.name)
        shape.append(None if made is None else made.size)
        if made is not None and step.name in gives:
            shape += (gives[step.name].start - made.start, gives[step.name].size)
        for name in step.maps:
            if made is None:
                needs.append(None)
                continue
            side, has = region.sides[name][axis], spans[name]
            need, have = need_and_have(step.rules[axis].need(made, side), has, side)
            needs.append((need, need if need == have else have))
            shape += (need.start - have.start, need.stop - have.stop, have.start - has.start, have.size)
    return Line(tuple(needs), tuple(shape))


def _compiled(part: PartPlan, row: int, column: int) -> BoxProgram:
    """Return the program of boxes shaped as this one."""
    region, rows, columns = part.region, part.rows[row], part.columns[column]
    boxes: dict[str, Box] = {name: (rows[name], columns[name]) for name in rows if name in columns}
    live = {step.name: part.box(step.name, row, column) for step in part.live_steps}
    live = {name: box for name, box in live.items() if box[0].size and box[1].size}
    lines = part.lines[0][row].needs, part.lines[1][column].needs
    haves: dict[str, dict[str, Box]] = {}  # of each map: by step that takes it
    numbers: dict[str, int] = {}
    count = 0
    for step in part.steps:
        numbers[step.name] = count
        for k, name in enumerate(step.maps, count):
            if step.name in boxes:
                (_, have_rows), (_, have_columns) = lines[0][k], lines[1][k]  # type: ignore[misc]
                haves.setdefault(name, {})[step.name] = have_rows, have_columns
        count += len(step.maps)
    split = {name: _split(region, name, boxes[name], haves.get(name, {}), live.get(name)) for name in boxes}

    def taken(name: str, have: Box) -> tuple[Cut | None, int | None]:
        cut = None if have == boxes[name] else cut_of(have, boxes[name])
        return cut, split[name].index(have) if have in split[name] else None

    def pieces(name: str) -> Pieces | None:
        cuts = tuple(cut_of(have, boxes[name]) for have in split[name])
        return Pieces(region.dims[name], cuts) if cuts else None

    def run(step: Step) -> StepRun:
        uses = tuple(
            MapUse(name, k, *taken(name, haves[name][step.name]), region.sides[name], region.dims[name])
            for k, name in enumerate(step.maps, numbers[step.name])
        )
        return StepRun(
            step.name,
            region.nodes[step.name],
            region.operations[step.name],
            uses,
            part.finished.get(step.name, ()),
            step.name in part.alone and all(use.cut is None for use in uses),
            step.name in live,
            not step.sums and step.name in haves,
            pieces(step.name),
        )

    return BoxProgram(
        tuple((name, pieces(name)) for name in part.entering if name in boxes),
        tuple(run(step) for step in part.steps if step.name in boxes),
        tuple(Result(name, region.dims.get(name), *taken(name, box)) for name, box in live.items()),
        frozenset(live),
    )


def _split(region: Region, name: str, has: Box, haves: Mapping[str, Box], live: Box | None) -> list[Box]:
    """Return the parts that a map is split into; none where all of it is needed or its gradient is shared."""
    if name not in region.dims or live == has:
        return []
    smaller = [*haves.values(), *([] if live is None else [live])]
    if not all(region.operations[step].fresh for step, have in haves.items() if have == has):
        return []
    return [have for have in dict.fromkeys(smaller) if have != has]
