"""Bytes that a box takes on the device while its backward pass runs, which is its fullest moment.

Takes the steps of a part one by one, from the last to the first; gives the rows and columns of each map that the box
needs, and the peak of live bytes: what it fetched, what autograd keeps of each step up to the one that goes
back, the gradients that wait, and the work space of that one. A part that begins earlier only adds to it, so that all
parts that end at one step are known from one walk towards the start. Boxes in one row of boxes need the same rows,
which are looked up once for all of them. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel.space.grid import Span, cell
from parallel.space.rule import SAME, Step
from parallel.space.spatial_plan import PaperRegion

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
        across: steps whose values leave the part.
        sides: rows and columns of every map.
        cuts: of the tile, along the axis.
        axis: 0 of rows, 1 of columns.
        number: of the row of boxes.

    Attributes:
        spans: the rows by name of the map.
        own: rows of what leaves the part that are of these boxes alone, by name.
    """

    def __init__(self, across: Sequence[Step], sides: Sides, cuts: tuple[int, ...], axis: int, number: int) -> None:
        self._sides, self._axis = sides, axis
        self.spans = {step.name: cell(cuts, step.sides[axis], number) for step in across}
        self.own = {name: span.size for name, span in self.spans.items()}

    def begin_with(self, step: Step) -> Needed:
        """Let the part begin with ``step``, before all that it has."""
        own = self.spans.get(step.name)
        if own is None or own.stop <= own.start:
            return NOTHING
        rule, spans, of_maps, lopsided = step.rules[self._axis], self.spans, [], False
        for name in step.maps:
            need = own
            if rule is not SAME:
                side = self._sides[name][self._axis]
                need = rule.need(own, side)
                start, stop = need
                before, after = -start if start < 0 else 0, stop - side if stop > side else 0
                lopsided |= before != after
                if before or after or start >= stop:
                    need = need.touching(side)
            earlier = spans.get(name)
            spans[name] = need = need if earlier is None else need.hull(earlier)
            of_maps.append(need[1] - need[0])
        return Needed(own.stop - own.start, tuple(of_maps), lopsided)

    def begin_with_all(self, steps: Sequence[Step]) -> dict[str, Span]:
        """Let the part begin with all of ``steps``; return the rows, by name, of the maps that have any."""
        for step in reversed(steps):
            self.begin_with(step)
        return {name: span for name, span in self.spans.items() if span.stop > span.start}


class BoxBytes:
    """Peak bytes of one box, of a part that ends at some step and grows towards the start.

    Args:
        across: steps whose values leave the part.
        needs: (rows, columns) of the box, before any step.

    Attributes:
        fetched: bytes of the maps that the part fetches, by name; ``fetched_bytes``: of all of them.
    """

    def __init__(self, across: Sequence[Step], region: PaperRegion, needs: tuple[AxisNeeds, AxisNeeds]) -> None:
        self._sides, self._sizes, self._images = region.sides, region.sizes, region.images
        sizes = region.sizes
        own = {step.name: needs[0].own[step.name] * needs[1].own[step.name] for step in across}
        self._given = {
            step.name: sizes[step.name] * own[step.name] / math.prod(step.sides) for step in across if own[step.name]
        }
        self._pulled = sum(self._given.values())
        self.fetched: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._saved: set[str] = set()
        self._resident = self._peak = self._params = 0.0
        self.fetched_bytes = self._all_waiting = 0.0

    def begin_with(self, step: Step, rows: Needed, columns: Needed) -> float:
        """Let the part begin with ``step``, before all that it has; return the share of the step's whole value, or of
        what it sums, that the box computes."""
        if not rows.size or not columns.size:
            return 0.0
        name, sizes, saved, waiting, fetched = step.name, self._sizes, self._saved, self._waiting, self.fetched
        copies = step.pads_by_copy and (rows.lopsided or columns.lopsided)
        share = rows.size * columns.size / (step.sides[0] * step.sides[1])
        size = 0.0 if step.sums else sizes[name] * share
        # The value, as far as backward passes of the part need it.
        for each in step.saves:
            if each == name or not copies:
                saved.add(each)
        held = 0.0
        if name in saved:
            if step.aliases:
                saved.add(step.aliases)
            else:
                held = size
        elif name in self._given:
            self._resident += size
        # The gradient of the value, those that wait meanwhile, and those that it makes.
        used_here = name in waiting
        arrives = waited = waiting.pop(name, 0.0)
        if name in self._given and not step.sums and (used_here or self._given[name] < size):
            arrives += size  # gradients of both add up; where the box gives less than it computes, the rest is zeros
        self._all_waiting -= waited
        crossing = self._all_waiting
        self.fetched_bytes -= fetched.pop(name, 0.0)
        makes = taken_bytes = 0.0
        handed_on = arrives or size
        for source, high, wide in zip(step.maps, rows.of_maps, columns.of_maps, strict=True):
            side = self._sides[source]
            taken = sizes[source] * high * wide / (side[0] * side[1])
            taken_bytes += taken
            self.fetched_bytes += taken - fetched.get(source, 0.0)
            fetched[source] = taken
            if source in self._images:
                continue
            if step.passes_grad_through:
                taken, handed_on = handed_on, 0.0
            else:
                makes += taken
            before = waiting.get(source, 0.0)
            waiting[source] = max(taken, before)  # sums are as large as what adds up
            self._all_waiting += waiting[source] - before
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


class PartNeeds:
    """Needs and bytes of several boxes of a part.

    Args:
        places: (row, column) of each box.
        square: rows and columns are alike, in the tile and in every step.
    """

    def __init__(
        self,
        across: Sequence[Step],
        region: PaperRegion,
        cuts: Cuts,
        places: Sequence[tuple[int, int]],
        square: bool = False,
    ) -> None:
        keys = [((0, row), (0 if square else 1, column)) for row, column in places]
        axes = dict.fromkeys(key for pair in keys for key in pair)
        self._axes = {(axis, k): AxisNeeds(across, region.sides, cuts[axis], axis, k) for axis, k in axes}
        self._keys = keys
        self.boxes = [BoxBytes(across, region, (self._axes[r], self._axes[c])) for r, c in keys]

    def begin_with(self, step: Step) -> list[float]:
        """Let the part begin with ``step``; return the share of it that each box computes."""
        needed = {key: axis.begin_with(step) for key, axis in self._axes.items()}
        pairs = zip(self.boxes, self._keys, strict=True)
        return [box.begin_with(step, needed[row], needed[column]) for box, (row, column) in pairs]

    @property
    def bytes(self) -> float:
        """Bytes of the fullest box."""
        return max(box.bytes for box in self.boxes)

    @property
    def least_bytes(self) -> float:
        """Bytes below which no part that begins earlier comes, of the first box."""
        return self.boxes[0].least_bytes
