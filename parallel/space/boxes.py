"""A region planned in boxes, on paper: phases, their parts, and what they take of the device and of the host.

Takes the steps of a region at one size of tile; gives ``Boxes``. What runs them, and what predicts them, have the same.
No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallel.space.box_bytes import BoxBytes
from parallel.space.grid import tile_cuts
from parallel.space.parts import Part, Tile, box_bytes, divide, wanted_from
from parallel.space.shares import Cuts, shares_of
from parallel.space.step import Step, in_phases

STORED_PER_PX = 32
"""Bytes of maps for each px of the tile that may lie between parts, where nobody says: 8 GiB for 16,384 px."""


@dataclass(frozen=True)
class StreamedModel:
    """The region of a model that can be computed box by box, for tiles of one size.

    Attributes:
        steps: in the order of the model.
        sides: rows and columns of every map.
        inputs: bytes of the maps that enter, by name; the first is the tile.
        leaving: names that are used after the region.
        whole: names of values that cannot be stored.
        images: names of what enters without a gradient.
        tiles: of the microbatch.
        ends_at: (layer, reason) that ended it; None where everything that has rows is in it.
    """

    steps: tuple[Step, ...]
    sides: Mapping[str, tuple[int, int]]
    inputs: Mapping[str, int]
    leaving: tuple[str, ...]
    whole: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    tiles: int = 1
    ends_at: tuple[str, str] | None = None

    @property
    def side(self) -> tuple[int, int]:
        """Rows and columns of the tile."""
        return max(self.sides[name] for name in self.inputs)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every map."""
        return {**self.inputs, **{step.name: step.value_bytes for step in self.steps}}

    @property
    def box_bytes(self) -> float:
        """Bytes that one box takes which is the whole tile: of smaller boxes without rims, their share of it."""
        walk = BoxBytes(self.sizes, {name: self.sizes[name] for name in self.leaving}, self.images)
        for step in reversed(self.steps):
            if not step.plain:
                walk.begin_with(step, 1.0, padded=False)
        return walk.bytes


@dataclass(frozen=True)
class PhaseParts:
    """What can be computed once all sums before it are known: ``plain`` once, ``steps`` box by box in ``parts``."""

    plain: tuple[Step, ...]
    steps: tuple[Step, ...]
    leaving: frozenset[str]
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Boxes:
    """A region in boxes.

    Attributes:
        phases: in order.
    """

    model: StreamedModel
    phases: tuple[PhaseParts, ...]

    def parts(self) -> Iterator[tuple[PhaseParts, Part]]:
        """Yield every part with its phase, in order."""
        for phase in self.phases:
            for part in phase.parts:
                yield phase, part

    @property
    def host_bytes(self) -> int:
        """Of the maps between parts, all of which are there when the forward pass ends; their gradients come as parts
        go back, and take no more than what has gone by then."""
        stored = {
            step.name: step.value_bytes
            for phase, part in self.parts()
            for step in wanted_from(phase.steps, part.stop, phase.leaving, part.start)
            if not step.sums and step.name not in self.model.leaving
        }
        return sum(stored.values())

    @property
    def device_bytes(self) -> int:
        """That a step takes at most beside parameters, optimizer and what follows the region: of the fullest box, with
        the gradients of parameters that there are by then."""
        most = summed = 0.0
        for phase, part in reversed(list(self.parts())):
            own = sum(step.param_bytes for step in phase.steps[part.start : part.stop])
            cuts = self.cuts(part)
            several = len(cuts[0]) > 2 or len(cuts[1]) > 2
            most = max(most, summed + own * several + self.part_bytes(phase, part))
            summed += own
        return round(most)

    def part_bytes(self, phase: PhaseParts, part: Part) -> float:
        """Return the bytes of the fullest box of a part."""
        cuts, sizes = self.cuts(part), self.model.sizes
        across = wanted_from(phase.steps, part.stop, phase.leaving, part.start)
        steps = phase.steps[part.start : part.stop]
        most = 0.0
        for row in _kinds(cuts[0]):
            for column in _kinds(cuts[1]):
                shares = shares_of(steps, across, self.model.sides, cuts, (row, column))
                walk = box_bytes(shares, sizes, self.model.images)
                for step in reversed(steps):
                    if step.name in shares.computed:
                        walk.begin_with(step, shares.computed[step.name], step.name in shares.padded)
                most = max(most, walk.bytes)
        return most

    def cuts(self, part: Part) -> Cuts:
        """Return where the boxes of a part begin and end."""
        rows, columns = self.model.side
        return tile_cuts(rows, part.box), tile_cuts(columns, part.box)


def _kinds(cuts: Sequence[int]) -> list[int]:
    """First, last, and the largest between them."""
    sizes = [last - first for first, last in pairwise(cuts)]
    inner = range(1, len(sizes) - 1)
    return sorted({0, len(sizes) - 1, *([max(inner, key=lambda k: sizes[k])] if inner else [])})


def plan_boxes(model: StreamedModel, box: int, stored_bytes: int | None = None) -> Boxes:
    """Return the region in boxes of ``box`` px, larger where maps are small.

    Args:
        stored_bytes: that maps between parts may take on the host; None: 32 for each px of the tile.

    Raises:
        ValueError: a value that is several maps would have to be stored.
    """
    rows, columns = model.side
    if stored_bytes is None:
        stored_bytes = STORED_PER_PX * rows * columns * model.tiles
    share = math.prod(min(1.0, box / side) for side in model.side)
    tile = Tile(model.side, box, share * model.box_bytes, stored_bytes, model.inputs, model.images)
    phases = in_phases(model.steps)
    planned = []
    for k, (plain, steps) in enumerate(phases):
        later = {name for _, more in phases[k + 1 :] for step in more for name in step.maps}
        leaving = frozenset(later.union(model.leaving) | {step.name for step in steps if step.sums})
        if later & model.whole:
            raise ValueError(f"--stream: {min(later & model.whole)} is several maps, which are used on both sides of a sum")
        parts = divide(steps, leaving, model.sides, tile, model.whole, model.steps) if steps else []
        planned.append(PhaseParts(tuple(plain), tuple(steps), leaving, tuple(parts)))
    return Boxes(model, tuple(planned))
