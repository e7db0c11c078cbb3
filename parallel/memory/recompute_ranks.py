"""Choose the runs of layers that all ranks recompute, so that none exceeds its memory (``ActivationPolicy.chosen``).

Takes a partition with its mesh and schedule, seconds of layers and the bytes of a rank; gives the names of the first
and last layer of each run. Each stage has a search of its own (``recompute_search``) under its part of the bytes; what
a rank then takes says how much more or less a part may be. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import in_flight, rank_bytes
from parallel.memory.recompute_search import Plan, RecomputeSearch
from parallel.memory.stage_memory import StageMemory
from parallel.schedule.action import Schedule
from parallel.schedule.mesh import Mesh

Runs = tuple[tuple[str, str], ...]
ROUNDS = 6
"""Times that the stages' parts of the bytes are set anew."""
ALMOST = 0.98
"""Part of the bytes that a plan may take without another round for the rest."""


def chosen_runs(
    partition: Partition,
    mesh: Mesh,
    schedule: Schedule,
    forward_s: Sequence[float],
    limit_bytes: float,
    *,
    slots: int,
    memory: StageMemory | None = None,
    **options: Any,
) -> Runs | None:
    """Return the runs of all stages of a partition; None where no choice was found that fits.

    Args:
        partition: of the graph of the largest microbatch and its loss.
        schedule: without recomputation of whole stages.
        forward_s: of each layer.
        limit_bytes: of each rank, for everything.
        slots, options: as ``rank_bytes`` takes them.
        memory: of the partition's graph, where searches share it.
    """
    memory = StageMemory(partition.graph) if memory is None else memory
    plain = memory.kept(partition)
    flights, rooms = [1] * partition.depth, [limit_bytes] * partition.depth
    for rank, combinations in enumerate(in_flight(schedule, mesh)):
        held = sorted({stage for stage, _ in mesh.held_by(rank)})
        own = (2 + slots) * sum(plain[stage].parameters for stage in held)
        for k, stage in enumerate(held):
            sharing = [each for each in combinations if each[k]]
            if not sharing:
                continue
            flights[stage] = max(flights[stage], *(each[k] for each in sharing))
            flying = max(sum(n * plain[s].activations for n, s in zip(each, held, strict=True)) for each in sharing)
            part = min(1.0, flights[stage] * plain[stage].activations / max(1, flying))
            rooms[stage] = min(rooms[stage], part * (limit_bytes - own))

    def taken(runs: Runs) -> list[int]:
        stages = memory.kept(partition, ActivationPolicy("optimal", runs))
        ranks = rank_bytes(stages, mesh, schedule, slots=slots, **options)
        return [
            max(ranks[rank].total for rank in holders if rank < mesh.depth)
            for holders in map(mesh.teams_with, range(partition.depth))
        ]

    if max(taken(())) <= limit_bytes:
        return ()
    graph, ends = partition.graph, [*partition.starts[1:], len(partition.graph.layers)]
    bounds = zip(partition.starts, ends, flights, strict=True)
    searches = [RecomputeSearch(graph, start, stop, forward_s, flying, memory) for start, stop, flying in bounds]
    fitting: dict[Runs, float] = {}
    for _ in range(ROUNDS):
        plans = [search.best(room) or search.least for search, room in zip(searches, rooms, strict=True)]
        runs = _names(graph, plans)
        most = taken(runs)
        if max(most) <= limit_bytes:
            if runs in fitting:
                break
            fitting[runs] = sum(search.seconds(plan) for search, plan in zip(searches, plans, strict=True))
            if min(most) >= ALMOST * limit_bytes:
                break
        rooms = [_next_room(room, size, limit_bytes) for room, size in zip(rooms, most, strict=True)]
    return min(fitting, key=fitting.__getitem__, default=None)


def _next_room(room: float, taken: int, limit: float) -> float:
    """Bytes of a stage, when its ranks took so many with ``room``."""
    if taken > limit:
        return room - 1.25 * (taken - limit) - (1 - ALMOST) / 4 * limit
    return room + 0.75 * (limit - taken) if taken < ALMOST * limit else room


def _names(graph: LayerGraph, plans: Sequence[Plan]) -> Runs:
    """Return the first and last layer of each run that is recomputed."""
    return tuple(
        (graph.layers[segment.start].name, graph.layers[segment.stop - 1].name)
        for plan in plans
        for segment in plan
        if segment.recompute
    )
