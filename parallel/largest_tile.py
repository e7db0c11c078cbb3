"""The largest tile each strategy can train within the memory, by bisection over tile sides.

Takes what can tell whether a strategy fits at a tile side; gives the largest side, and what stands in the way of the
next. Bytes grow with the side, so what fits at one side fits at every smaller one. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from parallel.plan import Row

STEP = 64
"""Tile sides are multiples of this many px, which every model's strides divide."""
LIMIT = 1 << 16
"""Px; slides are seldom wider."""


@dataclass(frozen=True)
class LargestTile:
    """Of one strategy.

    Attributes:
        tile: side in px; 0 when not even the smallest fits.
        row: the candidate that fits at it; None when there is none.
        next_row: the best candidate at the next side, which does not fit; None at the limit of the search.
    """

    name: str
    tile: int
    row: Row | None
    next_row: Row | None


def largest_tiles(names: Iterable[str], least: Callable[[int, str], Row | None]) -> list[LargestTile]:
    """For each strategy.

    Args:
        least: (tile side in px, strategy) -> its candidate with the fewest bytes; None where it cannot run at all.
    """
    return [found for name in names if (found := _largest(name, least)) is not None]


def _largest(name: str, least: Callable[[int, str], Row | None]) -> LargestTile | None:
    known: dict[int, Row | None] = {}

    def fits(tile: int) -> bool:
        if tile not in known:
            known[tile] = least(tile, name)
        row = known[tile]
        return row is not None and row.fits

    smallest = fits(STEP)
    if known[STEP] is None:
        return None
    if not smallest:
        return LargestTile(name, 0, None, known[STEP])
    low = STEP
    while low < LIMIT and fits(2 * low):
        low *= 2
    high = min(2 * low, LIMIT)
    while high - low > STEP:
        middle = (low + high) // 2 // STEP * STEP
        if fits(middle):
            low = middle
        else:
            high = middle
    return LargestTile(name, low, known[low], known.get(high) if high > low else None)
