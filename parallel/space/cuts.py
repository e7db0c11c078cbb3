"""Spans of rows, and how a tile is cut into boxes: the same relative cuts for all maps, so that sums of maps agree.

Cut j of a map of H rows is c_j H / T, rounded, where c_j is the cut of the tile of T rows. By its size alone, whatever
strides led to it; where c_j is a multiple of the model's total stride, that is where the tile's cut falls in the map.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

ALIGNED = 32
"""px that cuts of the tile are multiples of, where boxes are larger: the total stride of most networks."""


class Span(NamedTuple):
    """Rows [start, stop) of a map, or columns; they may leave it, where an operation pads."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows; 0 of what is empty."""
        return max(0, self.stop - self.start)

    def hull(self, other: Span) -> Span:
        """Return the smallest span that holds both; this one where the other is empty."""
        if other.stop <= other.start:
            return self
        start, stop = self
        if start <= other.start and stop >= other.stop:
            return self
        return other if stop <= start else Span(min(start, other.start), max(stop, other.stop))

    def within(self, side: int) -> Span:
        """Return the rows that a map of ``side`` rows has; where it has none of them, an empty span inside the map."""
        start = min(max(self.start, 0), side)
        return Span(start, max(start, min(self.stop, side)))

    def touching(self, side: int) -> Span:
        """Return the rows that a map of ``side`` rows has, or the one nearest to them: never an empty span."""
        start = min(max(self.start, 0), side - 1)
        return Span(start, max(start + 1, min(self.stop, side)))

    def holds(self, other: Span) -> bool:
        return not other.size or (self.start <= other.start and other.stop <= self.stop)


@functools.lru_cache(1024)
def tile_cuts(side: int, box: int) -> tuple[int, ...]:
    """Return where a tile of ``side`` rows is cut, both ends included, into equal boxes of ``box`` rows or a little
    more, where rounding asks for it."""
    count = -(-side // box)
    step = ALIGNED if box >= 2 * ALIGNED else 1
    inner = {round(j * side / count / step) * step for j in range(1, count)}
    return (0, *sorted(cut for cut in inner if 0 < cut < side), side)


@functools.lru_cache(8192)
def box_span(cuts: tuple[int, ...], side: int, number: int, last: int | None = None) -> Span:
    """Return the rows of box ``number``, or of those from it to ``last``, in a map of ``side`` rows; none in some maps
    of fewer rows than boxes."""
    tile, ends = cuts[-1], (cuts[number], cuts[(number if last is None else last) + 1])
    start, stop = ((2 * cut * side + tile) // (2 * tile) for cut in ends)
    return Span(start, stop)


@functools.lru_cache(8192)
def box_spans(cuts: tuple[int, ...], side: int) -> tuple[Span, ...]:
    """Return the rows of each box in a map of ``side`` rows."""
    return tuple(box_span(cuts, side, number) for number in range(len(cuts) - 1))
