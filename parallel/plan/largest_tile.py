"""The largest tile each strategy can train within the memory, by bisection over tile sides.

Takes what can tell whether a strategy fits at a tile side, and which ways of needing less memory are open; gives the
largest side, and what stands in the way of the next. Bytes grow with the side, so what fits at one side fits at every
smaller one; and about as its px do, so that two sides tell where to look for the third. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from parallel.plan.candidates import BOXES, ON_DEVICE, PLAIN, MemoryOptions
from parallel.plan.plan import PlanRow
from parallel.strategy import STREAMED

STEP = 64
"""Tile sides are multiples of this many px, which every model's strides divide."""
FINE = 32
"""Tiles in boxes are found to this part of their side: a plan of them takes a second, and few more px change little."""
FIRST = 16 * STEP
"""Side that is tried first: most strategies can train it, and smaller sides are tried only for those that cannot."""
GUESSES = 4
"""Sides that are tried where bytes in proportion to px say that the last which fits is; then the middle is, or, if
activations may be moved to the host, steps from the last that fitted, each twice the one before."""
LIMIT = 1 << 16
"""Px; slides are seldom wider."""

Least = Callable[[int, str, MemoryOptions], PlanRow | None]
"""(tile side in px, strategy, what is open) -> its candidate with the fewest bytes; None where it cannot run at all."""


@dataclass(frozen=True)
class LargestTile:
    """The largest tile of one strategy.

    Attributes:
        savings: the ways of needing less memory that were open.
        tile: side in px; 0 when not even the smallest fits.
        row: the candidate that fits at it; None when there is none.
        next_row: the best candidate at the next side, which does not fit; None at the limit of the search.
        doubled: the best candidate at twice the side; None beyond the limit of the search.
    """

    name: str
    savings: MemoryOptions
    tile: int
    row: PlanRow | None
    next_row: PlanRow | None
    doubled: PlanRow | None = None


def steps_of(savings: MemoryOptions) -> list[MemoryOptions]:
    """Return, within ``savings``: nothing, computing again, moving to the host besides, and boxes alone.

    Each is for larger tiles than those before it can train, and does not try these again.
    """
    steps: list[MemoryOptions] = []
    for open_to in (PLAIN, ON_DEVICE, MemoryOptions(stream=False)):
        recompute = tuple(how for how in savings.recompute if how in open_to.recompute)
        offload = tuple(moves for moves in savings.offload if moves in open_to.offload)
        step = MemoryOptions(recompute, offload, stream=False, zero=savings.zero, beyond=steps[-1] if steps else None)
        if recompute and offload and step not in steps:
            steps.append(step)
    return [*steps, dataclasses.replace(BOXES, beyond=steps[-1])] if savings.boxes else steps


def largest_tiles(names: Iterable[str], steps: Sequence[MemoryOptions], least: Least) -> list[LargestTile]:
    """Return those of each strategy under each of ``steps``, from the one that allows least on, as far as it gains
    anything."""
    tiles = []
    for name in names:
        best = 0
        for savings in steps if name in STREAMED else [step for step in steps if step != BOXES]:
            largest = largest_tile(name, savings, least, best)
            if largest is not None and (savings == steps[0] or largest.tile > best):
                tiles.append(largest)
                best = max(best, largest.tile)
    return tiles


def largest_tile(name: str, savings: MemoryOptions, least: Least, known_to_fit: int = 0) -> LargestTile | None:
    """Return that of one strategy and one set of ways to need less memory; None where it cannot run.

    Args:
        known_to_fit: px of a side that does.
    """
    known: dict[int, PlanRow | None] = {}

    def fits(tile: int) -> bool:
        if tile not in known:
            known[tile] = least(tile, name, savings)
        row = known[tile]
        return row is not None and row.fits

    low = known_to_fit or FIRST
    while not fits(low) and low > STEP and not known_to_fit:
        low //= 2
    if known[low] is None:
        return None
    if not fits(low):
        return LargestTile(name, savings, 0, None, known[low], known[low])
    while low < LIMIT and fits(min(2 * low, LIMIT)):
        low = min(2 * low, LIMIT)
    high = min(2 * low, LIMIT)
    guesses, stride, moves = GUESSES, 0, True in savings.offload
    while high - low > (max(STEP, low // FINE) if savings == BOXES else STEP):
        middle = (low + high) // 2 // STEP * STEP
        if guesses:
            likely = _likely(low, high, known[low], known[high])
            guesses, stride, middle = guesses - 1, STEP if likely and moves else 0, likely or middle
        elif stride:  # the last guess is near, and what is to be moved takes long to find for sides that do not fit
            middle = min(middle, low + stride)
        if fits(middle):
            low, stride = middle, 2 * stride
        else:
            high = middle
    doubled = None if 2 * low > LIMIT else least(2 * low, name, savings)
    return LargestTile(name, savings, low, known[low], known.get(high) if high > low else None, doubled)


def _likely(low: int, high: int, fitting: PlanRow | None, over: PlanRow | None) -> int | None:
    """Return the largest side that fits if bytes grow with the px of the tile; None where bytes do not tell."""
    if not (fitting and over and fitting.peak_bytes and over.peak_bytes):
        return None
    least, most = max(fitting.peak_bytes), max(over.peak_bytes)
    room = most - over.over_bytes - least
    if room < 0 and over.over_bytes < over.host_bytes:  # the host is short
        area = high**2 * (over.host_bytes - over.over_bytes) // over.host_bytes
    elif most <= least or room < 0 or over.strategy.policy.stream is not None:
        return None
    else:
        area = low**2 + (high**2 - low**2) * room // (most - least)
    return min(max(math.isqrt(area) // STEP * STEP, low + STEP), high - STEP)
