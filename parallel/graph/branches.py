"""Branches of a model: parts of a block that compute side by side between its fork and its join, and who computes them.

Takes the layers of a model and a number of members; gives a region of each block that has branches, with a member for
each of its layers. A branch is a connected part of the region without what enters it and what joins it (Jain et al.,
SUPER: SUb-Graph Parallelism for TransformERs, IPDPS 2021; there of transformers, here of any block). In Inception
modules the fork is one value, in cells of AmoebaNet two, and in DeepLab's ASPP the last map of the encoder.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from parallel.graph.blocks import Block, find_blocks, heavy_positions
from parallel.graph.layers import INPUT, OUTPUT, LayerGraph
from parallel.graph.partition import carries_data, equal_cost

LEAST = 0.1
"""Part of a model's seconds that has to be computed in parallel to the busiest member, at least."""


@dataclass(frozen=True)
class BranchRegion:
    """Layers ``start`` to ``stop`` (not included) of a block, each in one branch.

    Attributes:
        branches: positions of the layers of each branch.
        members: of each branch, the member that computes it.
        entering: names of the values made before the region that its layers use, parameters not counted.
        live_out: names of the values made in the region that later layers use.
        seconds: of each member's branches, on a nominal device.
    """

    start: int
    stop: int
    branches: tuple[tuple[int, ...], ...]
    members: tuple[int, ...]
    entering: tuple[str, ...]
    live_out: tuple[str, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True)
class Branches:
    """Regions of a model with branches, in order, and where each of their layers is computed.

    Attributes:
        member_of: layer in a branch -> the member that computes it.
        region_of: layer in a branch -> number of its region.
    """

    graph: LayerGraph
    regions: tuple[BranchRegion, ...]
    member_of: Mapping[str, int]
    region_of: Mapping[str, int]


def find_branches(graph: LayerGraph, members: int) -> Branches:
    """Return the branches of every block, assigned to ``members`` by cost: of each block the region in which most
    seconds are computed in parallel to the busiest member, assigned by longest processing time first.

    Of two blocks alike, members take other branches, so that each holds about the same number of parameters.

    Raises:
        ValueError: the model has no branches, or too little in them.
    """
    seconds, held = equal_cost(graph), [0] * members
    member_of, region_of, regions = dict[str, int](), dict[str, int](), list[BranchRegion]()
    heavy = heavy_positions(graph)
    for block in find_blocks(graph):
        best = max(_regions(graph, block, heavy, seconds, members), key=_beside, default=None)
        if best is None:
            continue
        region = _exchanged(graph, best, held)
        for branch, member in zip(region.branches, region.members, strict=True):
            for position in branch:
                member_of[graph.layers[position].name] = member
                region_of[graph.layers[position].name] = len(regions)
                held[member] += graph.owned_bytes[position]
        regions.append(region)
    beside = sum(_beside(region)[0] for region in regions) / max(sum(seconds), 1e-30)
    if beside < LEAST:
        found = (
            f"{len(regions)} blocks with branches, {beside:.0%} of its time beside the others" if regions else "none"
        )
        raise ValueError(
            f"the model has too little that ranks could compute side by side: {found}, and at least {LEAST:.0%} is "
            "asked for. Looked for in its blocks: Inception modules, cells of NAS networks, ASPP, projections beside "
            "residual blocks. Use --parallel ddp, or one with stages"
        )
    return Branches(graph, tuple(regions), member_of, region_of)


def _beside(region: BranchRegion) -> tuple[float, int]:
    """Return the seconds computed in parallel to the busiest member; of equal ones the shorter region goes first."""
    return sum(region.seconds) - max(region.seconds), region.start - region.stop


def _regions(
    graph: LayerGraph, block: Block, heavy: frozenset[int], seconds: Sequence[float], members: int
) -> Iterator[BranchRegion]:
    """Yield the regions of a block in which at least two branches multiply matrices, the ``heavy`` layers."""
    first = max(1, block.start)
    for stop in range(first + 2, min(block.stop, len(graph.layers) - 1) + 1):
        if len(graph.layers[stop].inputs) < 2 or not graph.can_cut(stop):  # nothing is joined there
            continue
        parts: list[list[int]] = []  # connected layers of the region, which grows towards the beginning
        for start in range(stop - 1, first - 1, -1):
            if graph.layers[start].random or graph.layers[start].kind in (INPUT, OUTPUT):
                break  # random numbers are drawn in the order of layers, by all members alike
            near = _connected(graph, start, stop)
            joined = [part for part in parts if not near.isdisjoint(part)]
            parts = [part for part in parts if near.isdisjoint(part)] + [[start, *chain(*joined)]]
            if len(parts) < 2 or not graph.can_cut(start):
                continue
            branches = tuple(sorted(tuple(sorted(part)) for part in parts))
            if sum(not heavy.isdisjoint(branch) for branch in branches) < 2:
                continue
            entering, live_out = _crossing(graph, start, stop)
            if all(carries_data(graph.by_name[name]) for name in (*entering, *live_out)):
                loads, owners = _longest_first([sum(seconds[k] for k in branch) for branch in branches], members)
                yield BranchRegion(start, stop, branches, owners, entering, live_out, loads)


def _connected(graph: LayerGraph, start: int, stop: int) -> set[int]:
    """Return the positions up to ``stop`` that use the value at ``start``, or that no cut may separate from it."""
    name = graph.layers[start].name
    users = (k for k in range(start + 1, min(graph.last_uses[start] + 1, stop)) if name in graph.layers[k].inputs)
    at = bisect.bisect(graph.inseparable, (start, len(graph.layers)))
    held = max([start, *(last for _, last in graph.inseparable[at - 1 : at])])  # pairs are sorted and do not overlap
    return {*users, *range(start + 1, min(held + 1, stop))}


def _crossing(graph: LayerGraph, start: int, stop: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the values that enter and that leave layers ``start`` to ``stop``."""
    layers = graph.layers[start:stop]
    used = dict.fromkeys(name for layer in layers for name in layer.inputs if graph.position[name] < start)
    entering = tuple(name for name in used if graph.by_name[name].kind != "get_attr")
    return entering, tuple(graph.layers[k].name for k in range(start, stop) if graph.last_uses[k] >= stop)


def _longest_first(costs: Sequence[float], members: int) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the load of each member and the member of each cost: the largest first, to the member with least (Graham,
    Bounds on multiprocessing timing anomalies, 1969)."""
    loads, owners = [0.0] * members, [0] * len(costs)
    for number in sorted(range(len(costs)), key=lambda k: -costs[k]):
        owners[number] = min(range(members), key=loads.__getitem__)
        loads[owners[number]] += costs[number]
    return tuple(loads), tuple(owners)


def _exchanged(graph: LayerGraph, region: BranchRegion, held: Sequence[int]) -> BranchRegion:
    """Return ``region`` with members exchanged, so that who holds fewest bytes of parameters takes most."""
    sizes = [0] * len(held)
    for branch, member in zip(region.branches, region.members, strict=True):
        sizes[member] += sum(graph.owned_bytes[position] for position in branch)
    largest_first = sorted(range(len(held)), key=lambda member: -sizes[member])
    fewest_first = sorted(range(len(held)), key=held.__getitem__)
    new = dict(zip(largest_first, fewest_first, strict=True))
    seconds = [0.0] * len(held)
    for member, load in enumerate(region.seconds):
        seconds[new[member]] = load
    members = tuple(new[member] for member in region.members)
    return dataclasses.replace(region, members=members, seconds=tuple(seconds))
