"""Search the layers to recompute: the segments of one stage, and the runs of layers of all ranks.

A stage has to fit a number of bytes and take the fewest more seconds. A dynamic programme over places and bytes held,
as in Chen et al. 2016 and Beaumont et al. 2019 (rotor), finds plans by the bytes of ``SegmentWindows``, which are near;
``StageMemory`` says what each really takes, and its answer moves the budget of the next. Bytes are rounded up to one of
``LEVELS``. For all ranks (``ActivationPolicy.chosen``), each stage is searched under its part of the bytes; what a rank
then takes says how much more or less a part may be. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel import remembered
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions
from parallel.memory.policy import ActivationPolicy, Segment
from parallel.memory.rank_bytes import in_flight, rank_bytes
from parallel.memory.stage_bytes import StageMemory
from parallel.memory.windows import SegmentWindows, thinned
from parallel.schedule.action import Schedule
from parallel.schedule.mesh import Mesh

LEVELS = 256
PLACES = 130
"""Where segments may begin, at most; of more those with few bytes across."""
CAPS = 8
"""Numbers of bytes held by a microbatch that are tried, where several are in flight."""
SMALLER, LARGER = (0.94, 0.88, 0.78, 0.6), (1.07, 1.15, 1.3, 1.6)
"""Times the budget that a plan is made for where that for the budget itself really takes more, or less."""
UNKNOWN = 1 << 60
"""Bytes that no rank has."""

Plan = tuple[Segment, ...]


class RecomputeSearch:
    """Searches for one stage and any budgets; what plans take is remembered.

    Args:
        graph: traced with the largest microbatch and the loss.
        start, stop: positions of the stage's first layer, and after its last.
        forward_s: of each layer of the graph, positive.
        in_flight: microbatches of the stage between their forward and backward pass, at most.
        memory: of the graph.
    """

    def __init__(
        self, graph: LayerGraph, start: int, stop: int, forward_s: Sequence[float], in_flight: int, memory: StageMemory
    ) -> None:
        self._memory, self._in_flight, self._end = memory, in_flight, len(graph.layers)
        inner = [place for place in cut_positions(graph) if start < place < stop]
        self._places = thinned(graph, [start, *inner, stop], PLACES)
        self._upto = np.concatenate([[0.0], np.cumsum(forward_s)])
        self._windows = SegmentWindows(graph, memory.touched((start, stop)), self._places, forward_s)

    @remembered
    def best(self, budget: float) -> Plan | None:
        """Return, within ``budget``, the plan that takes the fewest seconds."""
        start, stop = self._places[0], self._places[-1]
        nothing = (Segment(start, stop, False),)
        if self._bytes(nothing) <= budget:
            return nothing
        plans = {*self._evenly(), *self._planned(budget)}
        fitting = [plan for plan in plans if self._bytes(plan) <= budget]
        return min((self._trimmed(plan, budget) for plan in fitting), key=self.seconds, default=None)

    @property
    def least(self) -> Plan:
        """Return the plan of segments of equally many places that takes the fewest bytes."""
        return min(self._evenly(), key=self._bytes)

    def _planned(self, budget: float) -> Iterator[Plan]:
        """Yield plans of the dynamic programme for budgets around the one asked for."""
        shares = [1.0] if self._in_flight == 1 else [k / CAPS / self._in_flight for k in range(1, CAPS + 1)]
        plans = {share: plan for share in shares if (plan := self._solved(budget, share))}
        yield from plans.values()
        if plans:
            shares = [min(plans, key=lambda share: (self._bytes(plans[share]) > budget, self.seconds(plans[share])))]
        for share in shares:
            fits = share in plans and self._bytes(plans[share]) <= budget
            for scale in LARGER if fits else SMALLER:
                if plan := self._solved(scale * budget, share):
                    yield plan
                if (plan is not None and self._bytes(plan) <= budget) != fits:
                    break

    def _solved(self, budget: float, share: float) -> Plan | None:
        """Return the plan that holds at most ``share`` of the budget per microbatch."""
        room = budget - self._in_flight * self._windows.inputs
        cap = room * share
        return _solve(self._windows, room - (self._in_flight - 1) * cap, cap) if room > 0 else None

    def _evenly(self) -> Iterator[Plan]:
        """Yield plans of segments of equally many places, all recomputed, the last of them or not."""
        count = len(self._places) - 1
        for step in sorted({1, 2, 3, 5, 8, round(count**0.5), count}):
            bounds = list(pairwise([*self._places[:-1:step], self._places[-1]]))
            yield tuple(Segment(*bound, True) for bound in bounds)
            yield tuple(Segment(*bound, bound != bounds[-1]) for bound in bounds)

    def _trimmed(self, plan: Plan, budget: float) -> Plan:
        """Return ``plan`` with every segment kept that fits, the one of the most seconds first."""
        peaks = self._peaks(plan)
        for segment in sorted((s for s in plan if s.recompute), key=lambda s: -self.seconds((s,))):
            # Held from its forward pass on, what it keeps is there while later segments go backward.
            more, held = self._kept_alone(segment), self._memory.of_segments(plan).activations
            most = max((peak for start, peak in peaks.items() if start > segment.start), default=0)
            if (self._in_flight - 1) * (held + more) + most + more > budget:
                continue
            other = _joined(each._replace(recompute=False) if each == segment else each for each in plan)
            if self._bytes(other) <= budget:
                plan = other
                peaks = {start: peak + more * (start > segment.start) for start, peak in peaks.items()}
                del peaks[segment.start]
        return plan

    def _peaks(self, plan: Plan) -> dict[int, int]:
        """Return start of a segment -> most bytes that live while it goes backward, after it is recomputed."""
        timeline = self._memory.arrays((plan[0].start, plan[-1].stop)).timeline(plan)
        starts = [segment.start for segment in reversed(plan)]
        begins = timeline.moments.recompute_at[np.array(starts) - plan[0].start]
        return dict(zip(starts, np.maximum.reduceat(timeline.live, begins).tolist(), strict=True))

    @remembered
    def _kept_alone(self, segment: Segment) -> int:
        """Return bytes that are held more, at least, where a segment is kept; nothing is known of the one with the
        loss, of which a part is kept in any case."""
        return self._memory.table.kept_alone(segment.start, segment.stop) if segment.stop < self._end else -UNKNOWN

    def seconds(self, plan: Plan) -> float:
        """Return the seconds that recomputing it takes."""
        return float(sum(self._upto[s.stop] - self._upto[s.start] for s in plan if s.recompute))

    @remembered
    def _bytes(self, plan: Plan) -> int:
        """Return the bytes that the stage takes at most."""
        stage = self._memory.of_segments(plan)
        return (self._in_flight - 1) * stage.activations + max(stage.forward, stage.backward)


def _joined(plan: Iterable[Segment]) -> Plan:
    """Return the plan with neighbours that are kept as one segment."""
    joined: list[Segment] = []
    for segment in plan:
        if joined and not segment.recompute and not joined[-1].recompute:
            joined[-1] = Segment(joined[-1].start, segment.stop, False)
        else:
            joined.append(segment)
    return tuple(joined)


def _solve(windows: SegmentWindows, limit: float, cap: float) -> Plan | None:
    """Return the plan with the fewest seconds in which every segment's work and what is held before it take at most
    ``limit``, and all that is held at most ``cap``.

    ``least[j, LEVELS + l]`` is the fewest seconds of the segments up to place j that hold l units, so far.
    """
    count, unit = len(windows.places), cap / LEVELS
    levels = np.arange(LEVELS + 1)
    held = np.ceil(np.stack([windows.held_kept, windows.held_again]) / unit - 1e-9).astype(np.int64)
    seconds = np.stack([np.zeros_like(windows.seconds), windows.seconds])
    room = np.floor((limit - windows.work) / unit + 1e-9)
    least = np.full((count, 2 * LEVELS + 1), np.inf)  # columns before ``LEVELS``, of fewer units than none, stay so
    least[0, LEVELS] = 0.0
    shifted = np.lib.stride_tricks.sliding_window_view(least, LEVELS + 1, axis=1)
    choice: npt.NDArray[np.int64] = np.zeros((count, LEVELS + 1), dtype=np.int64)
    for j in range(1, count):
        kind, begin = np.nonzero((held[:, :j, j] <= LEVELS) & (room[:j, j] >= 0))
        if not len(begin):
            continue
        units = held[kind, begin, j]
        costs = shifted[begin, LEVELS - units]  # (segment, level): of the segments before it, by units held with it
        costs += seconds[kind, begin, j, None]
        costs[levels > (units + room[begin, j])[:, None]] = np.inf
        best = costs.argmin(axis=0)
        choice[j] = (kind * j + begin)[best]
        least[j, LEVELS:] = costs[best, levels]
    level = int(least[-1, LEVELS:].argmin())
    if not np.isfinite(least[-1, LEVELS + level]):
        return None
    plan, j = [], count - 1
    while j:
        again, first = divmod(int(choice[j, level]), j)
        plan.append(Segment(windows.places[first], windows.places[j], bool(again)))
        level -= int(held[again, first, j])
        j = first
    return _joined(reversed(plan))


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
