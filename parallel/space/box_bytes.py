"""Bytes that a box takes on the device while its backward pass runs, which is its fullest moment.

Takes the steps of a part one by one, from the last to the first; gives the rows and columns of each map that the box
needs, and the most that lives at a time: what it fetched, what autograd keeps of each step up to the one that goes
back, the gradients that wait, and the work space of that one. A part that begins earlier only adds to it, so that all
parts that end at one step are known from one walk towards the start.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

from parallel.space.grid import cell
from parallel.space.span import Span
from parallel.space.step import Step

Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""Of rows and of columns, in px of the tile, ends included."""
Sides = Mapping[str, tuple[int, int]]


class BoxBytes:
    """Of a part that ends at some step and grows towards the start.

    Args:
        across: steps whose values leave the part.
        sides: rows and columns of every map.
        sizes: bytes of every whole map.
        cuts: of the tile into boxes.
        box: (row, column) of the box.
        images: names of maps that have no gradient.

    Attributes:
        fetched: bytes of the maps that the part fetches, by name; ``fetched_bytes``: of all of them.
    """

    def __init__(
        self,
        across: Sequence[Step],
        sides: Sides,
        sizes: Mapping[str, int],
        cuts: Cuts,
        box: tuple[int, int],
        images: Collection[str] = (),
    ) -> None:
        self._sides, self._sizes, self._images = sides, sizes, images
        own = [{step.name: cell(cuts[axis], step.sides[axis], box[axis]) for step in across} for axis in (0, 1)]
        there = {step.name: step.sides for step in across if own[0][step.name].size and own[1][step.name].size}
        self._spans = tuple({name: own[axis][name] for name in there} for axis in (0, 1))
        self._given = {name: sizes[name] * self._share(name, side) for name, side in there.items()}
        self._pulled = sum(self._given.values())
        self.fetched: dict[str, float] = {}
        self._waiting: dict[str, float] = {}
        self._saved: set[str] = set()
        self._resident = self._peak = self._params = 0.0
        self.fetched_bytes = self._all_waiting = 0.0

    def begin_with(self, step: Step) -> float:
        """Let the part begin with ``step``, before all that it has; return the share of the step's whole value, or of
        what it sums, that the box computes."""
        if step.name not in self._spans[0]:
            return 0.0
        copies = self._need(step) and step.copies_pads
        share = self._share(step.name, step.sides)
        taken = {name: self._sizes[name] * self._share(name, self._sides[name]) for name in step.maps}
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

    def _share(self, name: str, side: tuple[int, int]) -> float:
        return self._spans[0][name].size * self._spans[1][name].size / math.prod(side)

    def _need(self, step: Step) -> bool:
        """Note the rows and columns that ``step`` needs; return whether they are padded on one side more than on the
        other."""
        lopsided = False
        for axis in (0, 1):
            spans = self._spans[axis]
            for name in step.maps:
                side = self._sides[name][axis]
                need = step.rules[axis].need(spans[step.name], side)
                lopsided |= max(0, -need.start) != max(0, need.stop - side)
                touched: Span = need.touching(side)
                spans[name] = touched.hull(spans.get(name))
        return lopsided

    def _hold(self, step: Step, size: float, copies: bool) -> float:
        """Return the bytes of the step's value that are kept for backward passes of the part."""
        name = step.name
        self._saved.update(saved for saved in step.saves if saved == name or not copies)
        if name in self._saved and step.lies_in:
            self._saved.add(step.lies_in)
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
            new = taken[source] if not step.hands_on else (arrives or size) * (k == 0)
            makes += 0.0 if step.hands_on else new
            before = self._waiting.get(source, 0.0)
            self._waiting[source] = max(new, before)  # sums are as large as what adds up
            self._all_waiting += self._waiting[source] - before
        return arrives, crossing, makes
