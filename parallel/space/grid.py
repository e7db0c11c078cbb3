"""How a tile is cut into boxes: the same relative cuts for every map, so that maps that are added or joined agree.

Cut j of a map of H rows is c_j H / T, rounded, where c_j is the cut of the tile of T rows. By its size alone, whatever
strides led to it; where c_j is a multiple of the model's total stride, that is where the tile's cut falls in the map.
"""

from __future__ import annotations

import functools

from parallel.space.span import Span

ALIGNED = 32
"""px that cuts of the tile are multiples of, where boxes are larger: the total stride of most networks."""


@functools.lru_cache(1024)
def tile_cuts(side: int, box: int) -> tuple[int, ...]:
    """Return where a tile of ``side`` rows is cut, both ends included, into equal boxes of ``box`` rows or a little
    more, where rounding asks for it."""
    count = -(-side // box)
    step = ALIGNED if box >= 2 * ALIGNED else 1
    inner = {round(j * side / count / step) * step for j in range(1, count)}
    return (0, *sorted(cut for cut in inner if 0 < cut < side), side)


def cell(cuts: tuple[int, ...], side: int, number: int) -> Span:
    """Return the rows of box ``number`` in a map of ``side`` rows; none in some maps of fewer rows than boxes."""
    tile = cuts[-1]
    first, last = ((2 * cut * side + tile) // (2 * tile) for cut in cuts[number : number + 2])
    return Span(first, last)


@functools.lru_cache(8192)
def cells(cuts: tuple[int, ...], side: int) -> tuple[Span, ...]:
    """Return the rows of each box in a map of ``side`` rows."""
    return tuple(cell(cuts, side, number) for number in range(len(cuts) - 1))
