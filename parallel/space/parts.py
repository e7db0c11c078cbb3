"""Where a region is cut into parts, between which maps are stored, and how large the boxes of each part are.

A part's boxes compute a rim of rows that their neighbours compute, too, the wider the more operations it has; a cut
ends the rim, and stores a map. Deeper maps are smaller, so that their boxes may be larger in the same memory. Which
cuts and boxes cost the least is found by dynamic programming over the places where little crosses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from parallel.space.box_bytes import Cuts, PartNeeds
from parallel.space.grid import Span, cells, tile_cuts
from parallel.space.rule import Step

MULTIPLES = (1, 2, 4, 8, 16)
"""Sides of boxes, in those that are asked for."""
FLOPS_PER_BYTE = 40.0
"""What storing a byte of a map costs, in multiply-adds times two: written, and its gradient made."""
FETCHED_FLOPS_PER_BYTE = 20.0
"""What a byte costs that a box fetches: read in both passes, and a gradient added."""
PLACES = 24
"""Places to cut at that are looked at, at most."""
MAX_EXCESS = 4.0
"""Times the bytes that a box may take, beyond which no longer part is looked at."""
STORE_PENALTIES = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 1e6)
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
        box_bytes: that a box may take on the device (``BoxBytes``); boxes of the asked side may take more.
        stored_bytes: that the maps between parts may take.
        entering: bytes of the maps that enter the region, by name.
        images: names of those of them that have no gradient.
        square: rows and columns are alike, in the tile and in every step.
    """

    side: tuple[int, int]
    box: int
    box_bytes: float
    stored_bytes: float
    entering: Mapping[str, int]
    images: frozenset[str] = frozenset()
    square: bool = False

    def sizes(self, steps: Sequence[Step]) -> dict[str, int]:
        """Return the bytes of every map that ``steps`` make, or that enters."""
        return {**self.entering, **{step.name: step.value_bytes for step in steps}}


def divide(
    steps: Sequence[Step],
    leaving: Collection[str],
    sides: Mapping[str, tuple[int, int]],
    tile: Tile,
    whole: Collection[str] = (),
    known: Sequence[Step] = (),
) -> list[Part]:
    """Return the parts of the steps of one phase.

    Args:
        leaving: names that later phases, or what follows the region, use.
        sides: of every map.
        whole: names of values that cannot be stored.
        known: steps of all phases, where there are others.
    """
    ends = [0, *_places(steps, leaving, whole), len(steps)]
    sizes = tile.sizes(known or steps)
    columns = {stop: _costs(steps, stop, ends, leaving, sides, tile, sizes) for stop in ends[1:]}
    parts: list[Part] = []
    each = sum(step.flops for step in steps) / max(1, sum(step.value_bytes for step in steps))
    for pressure in STORE_PENALTIES:
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
    sizes: Mapping[str, int],
) -> dict[int, tuple[float, float, int]]:
    """By start of the part that ends at ``stop``: (flops of all boxes, bytes that it stores, side of its boxes)."""
    across = wanted_from(steps, stop, leaving)
    stored_names = {step.name for step in across if not step.sums}
    best: dict[int, tuple[float, float, int]] = {}
    for multiple in MULTIPLES:
        box = multiple * tile.box
        if multiple > 1 and multiple // 2 * tile.box >= max(tile.side):
            break
        cuts = (tile_cuts(tile.side[0], box), tile_cuts(tile.side[1], box))
        count = math.prod(len(axis) - 1 for axis in cuts)
        boxes = PartNeeds(across, sides, sizes, cuts, worst_case_boxes(cuts), tile.images, tile.square)
        flops = stored = 0.0
        for position in range(stop - 1, -1, -1):
            step = steps[position]
            share, *_ = boxes.begin_with(step)
            flops += step.flops * share * count
            stored += step.value_bytes if step.name in stored_names else 0
            if position not in ends:
                continue
            excess = boxes.bytes / tile.box_bytes
            if excess <= 1 or multiple == 1:
                rims = boxes.boxes[0].fetched_bytes * count
                cost = flops * max(1.0, excess) + FETCHED_FLOPS_PER_BYTE * rims
                if position not in best or cost < best[position][0]:
                    best[position] = cost, stored, box
            if excess > MAX_EXCESS:
                break
    return best


@functools.cache
def worst_case_boxes(cuts: Cuts) -> list[tuple[int, int]]:
    """Return (row, column) of the boxes that take most: one in the middle, and one at an edge, where padding copies
    what it pads."""
    rows, columns = (max(range(len(axis) - 1), key=lambda k, axis=axis: _inner(axis, k)) for axis in cuts)  # type: ignore[misc]
    return list(dict.fromkeys([(rows, columns), (0, columns)]))


def _inner(axis: Sequence[int], k: int) -> tuple[int, int]:
    """(px of box ``k``, how far from the ends it lies), to compare."""
    return axis[k + 1] - axis[k], min(k, len(axis) - 2 - k)


def rule_faults(steps: Sequence[Step], sides: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the steps whose rules give other sides than they have, or whose maps differ in size."""
    found = []
    for step in steps:
        if step.global_op:
            continue
        for axis, word in ((0, "rows"), (1, "columns")):
            given = {step.rules[axis].out(sides[name][axis]) for name in step.maps}
            if given != {step.sides[axis]}:
                found.append(f"{step.name} has {step.sides[axis]} {word}; its rule gives {sorted(given)}")
    return found


def span_faults(
    steps: Sequence[Step], spans: Mapping[str, Span], sides: Mapping[str, tuple[int, int]], axis: int
) -> list[str]:
    """Return the rows that a box lacks along one axis.

    Args:
        spans: what it computes or fetches of each map.
    """
    found = []
    for step in steps:
        if step.name not in spans:
            continue
        for name in step.maps:
            need = step.rules[axis].need(spans[step.name], sides[name][axis]).within(sides[name][axis])
            if name not in spans or not spans[name].holds(need):
                found.append(f"{step.name} needs {tuple(need)} of {name}; there is {tuple(spans.get(name, ()))}")
    return found


def partition_faults(name: str, parts: Sequence[Span], side: int) -> list[str]:
    """Return the rows of a map that boxes give twice, or not at all."""
    faults, end = [], 0
    for start, stop in [*sorted(part for part in parts if part.size), (side, side)]:
        if start != end:
            rows = f"rows {min(start, end)} to {max(start, end) - 1}"
            faults.append(f"{rows} of {name} are given {'twice' if start < end else 'by no box'}")
        end = max(end, stop)
    return faults
