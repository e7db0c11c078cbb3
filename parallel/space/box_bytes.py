"""Bytes that a box takes on the device while its backward pass runs, which is its fullest moment.

Takes the steps of a part one by one, from the last to the first; gives the rows and columns of each map that the box
needs, and the peak of live bytes: what it fetched, what autograd keeps of each step up to the one that goes
back, the gradients that wait, and the work space of that one. A part that begins earlier only adds to it, so that all
parts that end at one step are known from one walk towards the start. Boxes in one row of boxes need the same rows,
which are looked up once for all of them. No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from parallel.space.cuts import Span, box_span
from parallel.space.rule import SAME, Step
from parallel.space.spatial_plan import RegionSpec

Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""Of rows and of columns, in px of the tile, ends included."""
Sides = Mapping[str, tuple[int, int]]


class Needed(NamedTuple):
    """Rows that a box needs along one axis to compute a step.

    Attributes:
        size: rows of its value, or of what it sums; 0 where the box computes none.
        of_maps: rows of each map that it takes, those included which later steps of the part need.
        lopsided: they are padded on one side more than on the other.
    """

    size: int
    of_maps: tuple[int, ...] = ()
    lopsided: bool = False


NOTHING = Needed(0)


class AxisNeeds:
    """Rows of every map that boxes in one row need, of a part that ends at some step and grows towards the start.

    Args:
        live_out: steps whose values leave the part.
        sides: rows and columns of every map.
        cuts: of the tile, along the axis.
        axis: 0 of rows, 1 of columns.
        number: of the row of boxes; ``last``: of the last of several that lie side by side.

    Attributes:
        spans: the rows by name of the map.
        own: rows of what leaves the part that are of these boxes alone, in the order of ``live_out``.
    """

    def __init__(
        self,
        live_out: Sequence[Step],
        sides: Sides,
        cuts: tuple[int, ...],
        axis: int,
        number: int,
        last: int | None = None,
    ) -> None:
        self._sides, self._axis = sides, axis
        self.spans = {step.name: box_span(cuts, step.sides[axis], number, last) for step in live_out}
        self.own = tuple(span.size for span in self.spans.values())

    def prepend(self, step: Step) -> Needed:
        """Let the part begin with ``step``, before all that it has."""
        axis, spans = self._axis, self.spans
        own = spans.get(step.name)
        if own is None or own[1] <= own[0]:
            return NOTHING
        rule, of_maps, lopsided = step.rules[axis], [], False
        for name in step.maps:
            need = own
            if rule is not SAME:
                side = self._sides[name][axis]
                need = rule.need(own, side)
                start, stop = need
                before, after = -start if start < 0 else 0, stop - side if stop > side else 0
                if before or after or start >= stop:
                    lopsided |= before != after
                    need = need.touching(side)
            earlier = spans.get(name)
            if earlier is not None:
                need = need.hull(earlier)
            spans[name] = need
            of_maps.append(need[1] - need[0])
        return Needed(own[1] - own[0], tuple(of_maps), lopsided)

    def prepend_all(self, steps: Sequence[Step]) -> dict[str, Span]:
        """Let the part begin with all of ``steps``; return the rows, by name, of the maps that have any."""
        for step in reversed(steps):
            self.prepend(step)
        return {name: span for name, span in self.spans.items() if span.stop > span.start}


class BoxBytes:
    """Peak bytes of one box, of a part that ends at some step and grows towards the start.

    Args:
        live_out: steps whose values leave the part.
        own: (rows, columns) of what leaves the part that are of the box alone, in the order of ``live_out``.

    Attributes:
        fetched: bytes of the maps that the part fetches, by name; ``fetched_bytes``: of all of them.
    """

    def __init__(
        self, live_out: Sequence[Step], region: RegionSpec, own: tuple[tuple[int, ...], tuple[int, ...]]
    ) -> None:
        self._sides, self._sizes, self._images = region.sides, region.sizes, region.images
        self._given = {
            step.name: region.sizes[step.name] * rows * columns / math.prod(step.sides)
            for step, rows, columns in zip(live_out, *own, strict=True)
            if rows and columns
        }
        self._pulled = sum(self._given.values())
        self.fetched: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._saved: set[str] = set()
        self._resident = self._peak = self._params = 0.0
        self.fetched_bytes = self._all_waiting = 0.0

    def prepend(self, step: Step, rows: Needed, columns: Needed) -> float:
        """Let the part begin with ``step``, before all that it has; return the share of the step's whole value, or of
        what it sums, that the box computes."""
        own_high, highs, uneven = rows
        own_wide, wides, askew = columns
        if not own_high or not own_wide:
            return 0.0
        name, sizes, saved, waiting, fetched = step.name, self._sizes, self._saved, self._waiting, self.fetched
        copies = step.pads_by_copy and (uneven or askew)
        share = own_high * own_wide / (step.sides[0] * step.sides[1])
        size = 0.0 if step.sums else sizes[name] * share
        # The value, as far as backward passes of the part need it.
        for each in step.saves:
            if each == name or not copies:
                saved.add(each)
        held, given = 0.0, self._given.get(name)
        if name in saved:
            if step.aliases:
                saved.add(step.aliases)
            else:
                held = size
        elif given is not None:
            self._resident += size
        # The gradient of the value, those that wait meanwhile, and those that it makes.
        used_here = name in waiting
        arrives = waited = waiting.pop(name, 0.0)
        if given is not None and not step.sums and (used_here or given < size):
            arrives += size  # gradients of both add up; where the box gives less than it computes, the rest is zeros
        all_waiting = crossing = self._all_waiting - waited
        all_fetched = self.fetched_bytes - fetched.pop(name, 0.0)
        makes = taken_bytes = 0.0
        handed_on = arrives or size
        for source, high, wide in zip(step.maps, highs, wides, strict=True):
            map_high, map_wide = self._sides[source]
            taken = sizes[source] * high * wide / (map_high * map_wide)
            taken_bytes += taken
            all_fetched += taken - fetched.get(source, 0.0)
            fetched[source] = taken
            if source in self._images:
                continue
            if step.passes_grad_through:
                taken, handed_on = handed_on, 0.0
            else:
                makes += taken
            before = waiting.get(source, 0.0)
            if taken > before or source not in waiting:  # sums are as large as what adds up
                waiting[source] = taken
                all_waiting += taken - before
        self._all_waiting, self.fetched_bytes = all_waiting, all_fetched
        self._params += step.param_bytes
        # The gradient of a padded copy is cut, which makes it anew.
        at_work = arrives + crossing + makes * (1 + copies) + step.work_bytes * share + self._params
        kept = step.kept_bytes * share + taken_bytes * copies
        self._peak = kept + max(self._peak + held, at_work + held * (name in step.saves))
        return share

    @property
    def bytes(self) -> float:
        """The peak of live bytes, gradients of the part's own parameters included."""
        return self.least_bytes + self.fetched_bytes

    @property
    def least_bytes(self) -> float:
        """Bytes below which no part that begins earlier comes: all but what is fetched, which it may compute."""
        return self._peak + self._pulled + self._resident


def fullest_box_bytes(
    steps: Sequence[Step],
    live_out: Sequence[Step],
    region: RegionSpec,
    cuts: Cuts,
    places: Iterable[tuple[int, int]],
    square: bool = False,
) -> float:
    """Return the bytes of the fullest of several boxes of a part; of boxes that need the same, one is looked at.

    Args:
        steps: of the part, from the last to the first.
        live_out, places, square: as ``PartNeeds`` takes them.
    """

    @functools.cache
    def along(axis: int, number: int) -> tuple[tuple[int, ...], tuple[Needed, ...]]:
        needs = AxisNeeds(live_out, region.sides, cuts[axis], axis, number)
        return needs.own, tuple(map(needs.prepend, steps))

    most = 0.0
    for rows, columns in {(along(0, row), along(0 if square else 1, column)) for row, column in places}:
        box = BoxBytes(live_out, region, (rows[0], columns[0]))
        for step, high, wide in zip(steps, rows[1], columns[1], strict=True):
            box.prepend(step, high, wide)
        most = max(most, box.bytes)
    return most


class PartNeeds:
    """Needs and bytes of several boxes of a part.

    Args:
        places: (row, column) of each box.
        square: rows and columns are alike, in the tile and in every step.
    """

    def __init__(
        self,
        live_out: Sequence[Step],
        region: RegionSpec,
        cuts: Cuts,
        places: Sequence[tuple[int, int]],
        square: bool = False,
    ) -> None:
        pairs = [((0, row), (0 if square else 1, column)) for row, column in places]
        keys = list(dict.fromkeys(key for pair in pairs for key in pair))
        self._lines = [AxisNeeds(live_out, region.sides, cuts[axis], axis, k) for axis, k in keys]
        self._numbers = [(keys.index(row), keys.index(column)) for row, column in pairs]
        self.boxes = [BoxBytes(live_out, region, (self._lines[r].own, self._lines[c].own)) for r, c in self._numbers]

    def prepend(self, step: Step) -> list[float]:
        """Let the part begin with ``step``; return the share of it that each box computes."""
        needed = [line.prepend(step) for line in self._lines]
        pairs = zip(self.boxes, self._numbers, strict=True)
        return [box.prepend(step, needed[row], needed[column]) for box, (row, column) in pairs]

    @property
    def bytes(self) -> float:
        """Bytes of the fullest box."""
        return max(box.bytes for box in self.boxes)

    @property
    def least_bytes(self) -> float:
        """Bytes below which no part that begins earlier comes, of the first box."""
        return self.boxes[0].least_bytes
