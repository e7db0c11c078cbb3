"""Cut a phase into parts, between which maps are stored, and choose how large the boxes of each part are.

A part's boxes compute a halo of rows that their neighbours compute, too, the wider the more operations it has; a cut
ends the halo, and stores a map. Deeper maps are smaller, so that their boxes may be larger in the same memory. Which
cuts and boxes cost the least is found by dynamic programming over the places where little crosses.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from itertools import accumulate

from parallel.space.box_bytes import Cuts, PartNeeds
from parallel.space.cuts import Span, tile_cuts
from parallel.space.phases import Part, Phase, live_steps
from parallel.space.rule import Step
from parallel.space.spatial_plan import RegionSpec

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


def divide(
    region: RegionSpec, phase: Phase, box: int, box_bytes: float, stored_bytes: float, barred: Collection[str] = ()
) -> list[Part]:
    """Return the parts of a phase.

    Args:
        box: requested box size, px.
        box_bytes: that a box may take on the device (``BoxBytes``); boxes of the asked side may take more.
        stored_bytes: that the maps between parts may take.
        barred: names of values that cannot be stored.
    """
    steps = phase.steps
    ends = [0, *_places(phase, barred), len(steps)]
    columns = {stop: _costs(region, phase, stop, ends, box, box_bytes) for stop in ends[1:]}
    parts: list[Part] = []
    each = sum(step.flops for step in steps) / max(1, sum(step.value_bytes for step in steps))
    for pressure in STORE_PENALTIES:
        best: dict[int, tuple[float, list[Part], float]] = {0: (0.0, [], 0.0)}
        for stop in ends[1:]:
            choices = []
            for start, (cost, stored, side) in columns[stop].items():
                before, earlier, kept = best[start]
                price = before + cost + (FLOPS_PER_BYTE + pressure * each) * stored
                choices.append((price, [*earlier, Part(start, stop, side)], kept + stored))
            best[stop] = min(choices, key=lambda choice: choice[0])
        _, parts, stored = best[len(steps)]
        if stored <= stored_bytes:
            break
    return parts


def _places(phase: Phase, barred: Collection[str]) -> list[int]:
    """Positions between steps where little crosses."""
    count, last = len(phase.steps), {name: k for k, step in enumerate(phase.steps) for name in step.maps}
    sizes, bars = [0] * (count + 2), [0] * (count + 2)  # more, or fewer, than at the position before
    for k, step in enumerate(phase.steps):
        until = count if step.name in phase.live_out else last.get(step.name, k)
        for at, sign in ((k + 1, 1), (until + 1, -1)):
            sizes[at] += sign * step.value_bytes
            bars[at] += sign * (step.name in barred)
    sums = zip(accumulate(sizes), accumulate(bars), strict=True)
    crossing = [math.inf if barring else size for size, barring in sums][1:count]
    dips = [
        k + 1
        for k, size in enumerate(crossing)
        if size < math.inf
        and (k == 0 or size <= crossing[k - 1])
        and (k + 1 == len(crossing) or size <= crossing[k + 1])
    ]
    return sorted(sorted(dips, key=lambda place: crossing[place - 1])[:PLACES])


def _costs(
    region: RegionSpec, phase: Phase, stop: int, ends: Sequence[int], asked: int, box_bytes: float
) -> dict[int, tuple[float, float, int]]:
    """Return by start of the part that ends at ``stop``: (flops of all boxes, bytes that it stores, box side)."""
    steps, side = phase.steps, region.side
    live = live_steps(steps, stop, phase.live_out)
    stored_names = {step.name for step in live if not step.sums}
    best: dict[int, tuple[float, float, int]] = {}
    for multiple in MULTIPLES:
        box = multiple * asked
        if multiple > 1 and multiple // 2 * asked >= max(side):
            break
        cuts = (tile_cuts(side[0], box), tile_cuts(side[1], box))
        count = math.prod(len(axis) - 1 for axis in cuts)
        boxes = PartNeeds(live, region, cuts, worst_case_boxes(cuts), region.square)
        flops = stored = 0.0
        for position in range(stop - 1, -1, -1):
            step = steps[position]
            share, *_ = boxes.prepend(step)
            flops += step.flops * share * count
            stored += step.value_bytes if step.name in stored_names else 0
            if multiple > 1 and boxes.least_bytes > box_bytes:
                break
            if position not in ends:
                continue
            excess = boxes.bytes / box_bytes
            if excess <= 1 or multiple == 1:
                halos = boxes.boxes[0].fetched_bytes * count
                cost = flops * max(1.0, excess) + FETCHED_FLOPS_PER_BYTE * halos
                if position not in best or cost < best[position][0]:
                    best[position] = cost, stored, box
            if excess > MAX_EXCESS:
                break
    return best


@functools.cache
def worst_case_boxes(cuts: Cuts) -> list[tuple[int, int]]:
    """Return (row, column) of the boxes that take most: one in the middle, and one at an edge, where padding copies
    what it pads."""
    rows, columns = (max(range(len(axis) - 1), key=functools.partial(_inner, axis)) for axis in cuts)
    return list(dict.fromkeys([(rows, columns), (0, columns)]))


def _inner(axis: Sequence[int], k: int) -> tuple[int, int]:
    """(px of box ``k``, how far from the ends it lies), to compare."""
    return axis[k + 1] - axis[k], min(k, len(axis) - 2 - k)


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
