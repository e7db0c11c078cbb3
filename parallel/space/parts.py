"""Where a region is cut into parts, between which maps are stored, and how large the boxes of each part are.

A part's boxes compute a rim of rows that their neighbours compute, too, the wider the more operations it has; a cut
ends the rim, and stores a map. Deeper maps are smaller, so that their boxes may be larger in the same memory. Which
cuts and boxes cost the least is found by dynamic programming over the places where little crosses.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parallel.space.grid import cells, tile_cuts
from parallel.space.span import Span
from parallel.space.spans import needed_spans
from parallel.space.step import Step

MULTIPLES = (1, 2, 4, 8, 16)
"""Sides of boxes, in those that are asked for."""
FLOPS_PER_BYTE = 40.0
"""What storing a byte of a map costs, in multiply-adds times two: written, and its gradient made."""
FETCHED_FLOPS_PER_BYTE = 20.0
"""What a byte costs that a box fetches: read in both passes, and a gradient added."""
PLACES = 40
"""Places to cut at that are looked at, at most."""
PRESSURE = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e6)
"""Further costs of a stored byte, in what the steps compute for each byte they give, tried in turn until the maps that
are stored fit."""


@dataclass(frozen=True, slots=True)
class Part:
    """Steps at positions ``start`` to ``stop``, not included, computed in boxes of ``box`` px of the tile."""

    start: int
    stop: int
    box: int


@dataclass(frozen=True)
class Tile:
    """What is to be computed in boxes.

    Attributes:
        side: rows and columns of the tile.
        box: side of the boxes that are asked for, px.
        kept_bytes: of the whole region on the whole tile; a box of the asked side may take its share.
        stored_bytes: that the maps between parts may take.
    """

    side: tuple[int, int]
    box: int
    kept_bytes: float
    stored_bytes: float

    @property
    def budget(self) -> float:
        """Bytes of a box."""
        return self.kept_bytes * math.prod(min(1.0, self.box / side) for side in self.side)


def divide(
    steps: Sequence[Step],
    leaving: Collection[str],
    sides: Mapping[str, tuple[int, int]],
    tile: Tile,
    whole: Collection[str] = (),
) -> list[Part]:
    """Return the parts of the steps of one phase.

    Args:
        leaving: names that later phases, or what follows the region, use.
        sides: of every map.
        whole: names of values that cannot be stored.
    """
    ends = [0, *_places(steps, leaving, whole), len(steps)]
    columns = {stop: _costs(steps, stop, ends, leaving, sides, tile) for stop in ends[1:]}
    parts: list[Part] = []
    each = sum(step.flops for step in steps) / max(1, sum(step.value_bytes for step in steps))
    for pressure in PRESSURE:
        best: dict[int, tuple[float, list[Part], float]] = {0: (0.0, [], 0.0)}
        for stop in ends[1:]:
            choices = []
            for start, (cost, stored, box) in columns[stop].items():
                before, earlier, kept = best[start]
                price = before + cost + (FLOPS_PER_BYTE + pressure * each) * stored
                choices.append((price, [*earlier, Part(start, stop, box)], kept + stored))
            best[stop] = min(choices, key=lambda choice: choice[0])
        _, parts, stored = best[len(steps)]
        if stored <= tile.stored_bytes:
            break
    return parts


def wanted_from(steps: Sequence[Step], stop: int, leaving: Collection[str], start: int = 0) -> list[Step]:
    """Return those of ``steps[start:stop]`` whose values are used at ``stop`` or after it."""
    later = {name for step in steps[stop:] for name in step.maps}.union(leaving)
    return [step for step in steps[start:stop] if step.name in later]


def owned(step: Step, cuts: tuple[tuple[int, ...], tuple[int, ...]], axis: int) -> tuple[Span, ...]:
    """Return the rows of each box in the value of ``step``, or in what it sums."""
    return cells(cuts[axis], step.sides[axis])


def _places(steps: Sequence[Step], leaving: Collection[str], whole: Collection[str]) -> list[int]:
    """Positions between steps where little crosses."""
    crossing = []
    for position in range(1, len(steps)):
        across = wanted_from(steps, position, leaving)
        barred = any(step.name in whole for step in across)
        crossing.append(math.inf if barred else sum(step.value_bytes for step in across))
    dips = [
        k + 1
        for k, size in enumerate(crossing)
        if size < math.inf
        and (k == 0 or size <= crossing[k - 1])
        and (k + 1 == len(crossing) or size <= crossing[k + 1])
    ]
    if len(dips) > PLACES:
        dips = sorted(sorted(dips, key=lambda place: crossing[place - 1])[:PLACES])
    return dips


def _costs(
    steps: Sequence[Step],
    stop: int,
    ends: Sequence[int],
    leaving: Collection[str],
    sides: Mapping[str, tuple[int, int]],
    tile: Tile,
) -> dict[int, tuple[float, float, int]]:
    """By start of the part that ends at ``stop``: (flops of all boxes, bytes that it stores, side of its boxes)."""
    across = wanted_from(steps, stop, leaving)
    sizes = dict.fromkeys(sides, 0) | {step.name: step.value_bytes for step in steps}
    stored_names = {step.name for step in across if not step.sums}
    found: dict[int, tuple[float, float, int]] = {}
    for multiple in MULTIPLES:
        box = multiple * tile.box
        if multiple > 1 and multiple // 2 * tile.box >= max(tile.side):
            break
        shares = _shares(steps[:stop], across, sides, tile, box)
        flops = kept = stored = 0.0
        fetched: set[str] = set()
        for position in range(stop - 1, -1, -1):
            step = steps[position]
            if step.name in shares:
                share, count = shares[step.name]
                flops += step.flops * share * count
                kept += step.kept_bytes * share
                fetched |= set(step.maps)
            fetched.discard(step.name)
            stored += step.value_bytes if step.name in stored_names else 0
            if position not in ends:
                continue
            # What is fetched is there twice, the second time as its gradient.
            excess = (kept + 2 * sum(sizes[name] * shares[name][0] for name in fetched)) / tile.budget
            if excess > 1 and multiple > 1:
                continue
            rims = sum(sizes[name] * share * count for name in fetched for share, count in [shares[name]])
            cost = flops * max(1.0, excess) + FETCHED_FLOPS_PER_BYTE * rims
            if position not in found or cost < found[position][0]:
                found[position] = cost, stored, box
    return found


def _shares(
    steps: Sequence[Step], across: Sequence[Step], sides: Mapping[str, tuple[int, int]], tile: Tile, box: int
) -> dict[str, tuple[float, int]]:
    """By name: the share of the whole map that a box in the middle computes, and the number of boxes."""
    cuts = (tile_cuts(tile.side[0], box), tile_cuts(tile.side[1], box))
    count = math.prod(len(axis) - 1 for axis in cuts)
    by_axis = []
    for axis in (0, 1):
        middle = (len(cuts[axis]) - 1) // 2
        wanted = {step.name: owned(step, cuts, axis)[middle] for step in across}
        wanted = {name: rows for name, rows in wanted.items() if rows.size}
        by_axis.append(needed_spans(steps, wanted, sides, axis))
    rows, columns = by_axis
    whole = {**sides, **{step.name: step.sides for step in across}}
    return {
        name: (rows[name].size * columns[name].size / math.prod(whole[name]), count) for name in rows if name in columns
    }
