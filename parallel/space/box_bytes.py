"""Bytes that a box takes on the device while its backward pass runs, which is its fullest moment.

Takes the steps of a part one by one, from the last to the first; gives the rows and columns of each map that the box
needs, and the most that lives at a time: what it fetched, what autograd keeps of each step up to the one that goes
back, the gradients that wait, and the work space of that one. A part that begins earlier only adds to it, so that all
parts that end at one step are known from one walk towards the start. Boxes in one row of boxes need the same rows,
which are looked up once for all of them. No torch here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from parallel.space.grid import Span, cell
from parallel.space.region import PaperRegion
from parallel.space.rule import SAME, Step

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

    def __init__(
        self,
        across: Sequence[Step],
        region: PaperRegion,
        needs: tuple[AxisNeeds, AxisNeeds],
    ) -> None:
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
        copies = step.pads_by_copy and (rows.lopsided or columns.lopsided)
        share = rows.size * columns.size / (step.sides[0] * step.sides[1])
        taken: dict[str, float] = {}
        for name, high, wide in zip(step.maps, rows.of_maps, columns.of_maps, strict=True):
            side = self._sides[name]
            taken[name] = self._sizes[name] * high * wide / (side[0] * side[1])
        size = 0.0 if step.sums else self._sizes[step.name] * share
        held = self._hold(step, size, copies)
        arrives, crossing, makes = self._gradients(step, size, taken)
        self._params += step.param_bytes
        # The gradient of a padded copy is cut, which makes it anew.
        at_work = arrives + crossing + makes * (1 + copies) + step.work_bytes * share + self._params
        kept = step.kept_bytes * share + sum(taken.values()) * copies
        self._peak = kept + max(self._peak + held, at_work + held * (step.name in step.saves))
        self.fetched_bytes -= self.fetched.pop(step.name, 0.0)
        for name, size in taken.items():
            self.fetched_bytes += size - self.fetched.get(name, 0.0)
            self.fetched[name] = size
        return share

    @property
    def bytes(self) -> float:
        """The most that lives at a time, gradients of the part's own parameters included."""
        return self._peak + self._pulled + self._resident + self.fetched_bytes

    def _hold(self, step: Step, size: float, copies: bool) -> float:
        """Return the bytes of the step's value that are kept for backward passes of the part."""
        name = step.name
        self._saved.update(saved for saved in step.saves if saved == name or not copies)
        if name in self._saved and step.aliases:
            self._saved.add(step.aliases)
        elif name in self._saved:
            return size
        elif name in self._given:
            self._resident += size
        return 0.0

    def _gradients(self, step: Step, size: float, taken: Mapping[str, float]) -> tuple[float, float, float]:
        """Return the bytes of the gradient of the step's value, of those that wait meanwhile, and of those it makes."""
        name = step.name
        used_here = name in self._waiting
        arrives = waited = self._waiting.pop(name, 0.0)
        if name in self._given and not step.sums and (used_here or self._given[name] < size):
            arrives += size  # gradients of both add up; where the box gives less than it computes, the rest is zeros
        self._all_waiting -= waited
        crossing, makes = self._all_waiting, 0.0
        for k, source in enumerate(source for source in step.maps if source not in self._images):
            new = taken[source] if not step.passes_grad_through else (arrives or size) * (k == 0)
            makes += 0.0 if step.passes_grad_through else new
            before = self._waiting.get(source, 0.0)
            self._waiting[source] = max(new, before)  # sums are as large as what adds up
            self._all_waiting += self._waiting[source] - before
        return arrives, crossing, makes


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
