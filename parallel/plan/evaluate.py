"""Evaluate a strategy: choose its cuts and how it saves memory, check that it fits, and estimate the time of a step.

Takes a task and a cluster; gives a ``PlanRow`` for a strategy. What does not fit is tried with cuts chosen within the
memory, then with a shared optimizer state of pairs of replicas. Then parts are recomputed or offloaded, then both
(``MemoryOptions``). Each costs time, so the first that fits is taken. ``step_shares`` says what a step's time is spent
on. No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

from parallel import remembered
from parallel.cost.cluster import Cluster
from parallel.graph.partition import Partition
from parallel.memory.policy import KEEP_ALL, NO_BLOCKS, ActivationPolicy
from parallel.plan.candidates import ANY, MemoryOptions
from parallel.plan.plan import Limit, Plan, PlanRow, best_of, limit_of
from parallel.plan.stages import StageCache, Task
from parallel.plan.step_time import LONG, StepTime, links_between, schedule_of, step_time, weights_of
from parallel.schedule.action import Kind
from parallel.schedule.timeline import LinkCost, Timeline
from parallel.strategy import Strategy


@dataclass(frozen=True)
class MemoryCheck:
    """A strategy with everything decided, its stages, and the bytes of its ranks, worked out when asked for."""

    strategy: Strategy
    partition: Partition
    stages: StageCache

    @functools.cached_property
    def fits(self) -> bool:
        return self.fits_device and not self.over_bytes

    @functools.cached_property
    def fits_device(self) -> bool:
        """Known before all the rest where one of the first ranks takes too much."""
        limit = self.stages.cluster.usable_bytes
        return all(self._peak(rank) <= limit for rank in range(self.strategy.depth))

    @functools.cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Peak bytes of every rank of a group; for the ranks of a team those of its largest member."""
        members = self.strategy.members
        return tuple(self._peak(seat) for seat in range(self.strategy.depth) for _ in range(members))

    @functools.cached_property
    def over_bytes(self) -> int:
        """Bytes by which the fullest rank exceeds the memory, or the host's."""
        cluster = self.stages.cluster
        over = max(self.peak_bytes) - cluster.usable_bytes
        policy = self.strategy.policy
        if (policy.moves or policy.stream) and cluster.host_bytes < math.inf:
            on_host = self.stages.host_bytes(self.strategy, self.partition)
            # The host of a CPU is itself: what its ranks do not fill is free for what is moved.
            left = max(0, -over) if cluster.kind == "cpu" else 0
            over = max(over, on_host - round(cluster.host_bytes) - left)
        return max(0, over)

    @remembered
    def _peak(self, rank: int) -> int:
        return self.stages.rank_bytes(self.strategy, self.partition, rank).total


class Evaluator:
    """Bytes and seconds of strategies for one task on one cluster."""

    def __init__(self, task: Task, cluster: Cluster) -> None:
        self.task, self.cluster = task, cluster
        self.stages = StageCache(task, cluster)

    def evaluate(self, candidate: Strategy, savings: MemoryOptions = ANY, *, seconds: bool = True) -> PlanRow:
        """Return, of ``candidate`` with whatever of cuts and ``savings`` makes it fit, the fastest of those that cost
        about as much; the variant that misses by least where none does.

        Args:
            seconds: tell those of a step, which takes a while, even if nothing is chosen by them; and take the largest
                boxes that fit, not the first found.
        """
        has_blocks = candidate.name != "fsdp" or self.task.sharding.blocks
        if only_kept := self.task.one_copy or ("" if has_blocks else NO_BLOCKS):
            if "none" not in savings.recompute:
                return PlanRow(candidate, refused=only_kept)
            savings = dataclasses.replace(savings, recompute=("none",))
        tried: list[MemoryCheck] = []
        for tier in savings.escalation(candidate):
            own, fastest = [], None
            for variant in tier:
                if fastest and not self._may_beat(variant, fastest):
                    continue
                own += (checks := self._cuts(variant))
                if checks and checks[0].fits:
                    row = self.estimate_time(checks[0], seconds or len(tier) > 1)
                    fastest = best_of([each for each in (fastest, row) if each])
            if fastest is not None:
                return fastest
            tried = own + tried
        if savings.boxes and (boxed := self._in_boxes(candidate, largest=seconds)):
            if boxed.fits:
                return self.estimate_time(boxed, seconds)
            tried = [boxed, *tried]
        if not tried:
            return PlanRow(candidate, refused=savings.refusal(candidate))
        nearest = min(tried, key=lambda check: check.over_bytes)
        return self.estimate_time(nearest, seconds)

    def in_boxes(self, candidate: Strategy) -> PlanRow | None:
        """Return the row of ``candidate`` in the largest boxes that fit, or in the smallest; None where it cannot be
        computed box by box."""
        check = self._in_boxes(candidate)
        return None if check is None else self.estimate_time(check)

    def _in_boxes(self, candidate: Strategy, *, largest: bool = True) -> MemoryCheck | None:
        sides = () if candidate.stashes else self.stages.box_sides(candidate)
        if not sides:
            return None

        def fitting(side: int) -> MemoryCheck:
            found = self._best_cuts(self.stages.within_host(candidate.under(stream=side)))
            assert found is not None
            return found

        def allowed(side: int) -> bool:
            # Smaller boxes store no fewer maps on the host; on a CPU they leave more of the memory for these maps.
            return fitting(side).fits if self.cluster.kind == "cpu" else fitting(side).fits_device

        streamed, _ = self.task.in_boxes()
        assert streamed is not None
        hints, key = streamed.hints, (self.stages.tiles(candidate), candidate.grid)
        at = sides.index(hints[key]) if hints.get(key) in sides else len(sides) - 1
        if allowed(sides[at]):
            # Larger boxes store no more maps on the host: where smaller ones fit, they are not needed to tell that.
            while (largest or not fitting(sides[at]).fits) and at + 1 < len(sides) and allowed(sides[at + 1]):
                at += 1
        else:
            low, middle = -1, at - 1  # often the next smaller fits
            while at - low > 1:
                low, at = (middle, at) if allowed(sides[middle]) else (low, middle)
                middle = (low + at) // 2
            at = max(low, 0)
        hints[key] = sides[at]
        check = fitting(sides[at])
        if self.cluster.kind != "cuda":
            return check
        room = max(0, self.cluster.usable_bytes - max(check.peak_bytes))  # for maps between boxes
        return dataclasses.replace(check, strategy=check.strategy.under(map_bytes=room))

    def _may_beat(self, candidate: Strategy, row: PlanRow) -> bool:
        """Return False where moving what is kept takes ``candidate`` longer than ``row``, however the model is cut."""
        share = candidate.m // candidate.groups
        if candidate.policy.recompute != "none" or not row.images_per_second or share >= LONG * candidate.depth:
            return True
        costs, moved_s = self.stages.of(candidate)[1], self.stages.moved_s(candidate)
        join = max if self.cluster.kind == "cuda" else sum
        passes_s = (sum(cost.forward_s for cost in costs.layers), sum(cost.backward_s for cost in costs.layers))
        least_s = sum(weights_of(candidate, self.task.batch)) * sum(join((s, moved_s)) for s in passes_s)
        least_s /= max(self.cluster.speeds, default=1.0)
        return self.task.batch * candidate.depth > row.images_per_second * least_s

    def _best_cuts(self, candidate: Strategy) -> MemoryCheck | None:
        """Return the first cuts that fit, or that miss by less; None where the candidate cannot run."""
        return min(self._cuts(candidate), key=lambda check: check.over_bytes, default=None)

    @remembered
    def _cuts(self, candidate: Strategy) -> list[MemoryCheck]:
        """Return the cuts that balance the ranks if they fit, else those chosen within the memory, else both."""
        checks: list[MemoryCheck] = []
        for within in (False, True):
            check = self.check_memory(candidate, within=within)
            if check is not None and check.fits:
                return [check]
            checks += [check] if check is not None else []
        return checks

    def with_time(self, row: PlanRow) -> PlanRow:
        """Return ``row`` with the time of a step, of the largest boxes that fit."""
        if row.step_s is not None or row.refused:
            return row
        if row.strategy.policy.stream is not None:
            return self.in_boxes(row.strategy.under(stream=None, host_bytes=None, map_bytes=None)) or row
        return self.estimate_time(MemoryCheck(row.strategy, self.partition_of(row), self.stages))

    def forecast(self, strategy: Strategy, *, partition: Partition | None = None) -> PlanRow | None:
        """Return the row of ``strategy`` as it is; ``partition`` and None as of ``check_memory``."""
        check = self.check_memory(strategy, partition=partition)
        return None if check is None else self.estimate_time(check)

    def check_memory(
        self, strategy: Strategy, *, within: bool = False, partition: Partition | None = None
    ) -> MemoryCheck | None:
        """Return the bytes of ``strategy``; None where no cuts, or no choice of what is recomputed, fit as asked.

        Args:
            within: choose cuts that keep every rank within the memory, not those that balance the ranks.
            partition: stages that are given.
        """
        partition = partition or self.stages.partition(strategy, within=within)
        resolved = None if partition is None else self.stages.resolve_policy(strategy, partition)
        return None if resolved is None or partition is None else MemoryCheck(resolved, partition, self.stages)

    def estimate_time(self, check: MemoryCheck, seconds: bool = True) -> PlanRow:
        """Return the row of ``check``, with the time of a step unless ``seconds`` is False."""
        step = self.step_time(check.strategy, check.partition) if seconds else None
        return PlanRow(
            check.strategy,
            self.task.batch / step.step_s if step and step.step_s else None,
            step.step_s or None if step else None,
            step.bubble if step else None,
            check.peak_bytes,
            check.over_bytes,
            host_bytes=self.stages.host_bytes(check.strategy, check.partition),
        )

    def partition_of(self, row: PlanRow) -> Partition:
        """Return the stages of a row, for microbatches of the row's size; one where each rank computes the whole
        model."""
        graph, _ = self.stages.of(row.strategy)
        return Partition(graph, (0, *(graph.position[cut] for cut in row.strategy.cuts)))

    def plan(self, problem: dict[str, Any], row: PlanRow) -> Plan:
        """Return the plan that chooses ``row``.

        Args:
            problem: as ``Plan`` has it.
        """
        source = self.stages.microbatch(1)[1]
        costs = self.stages.stage_costs(row.strategy, self.partition_of(row))
        seconds = tuple(cost.forward_s + cost.backward_s for cost in costs)
        return Plan(problem, row, source.source, source.expected_error, seconds)

    def limit(self, row: PlanRow) -> Limit:
        """Return what fills the fullest rank most, or the host where a row misses that by more."""
        strategy, partition = row.strategy, self.partition_of(row)
        if strategy.policy.stream is not None:
            return self.stages.limit_in_boxes(strategy)
        held = [self.stages.rank_bytes(strategy, partition, rank) for rank in range(strategy.depth)]
        fullest = max(range(len(held)), key=lambda rank: held[rank].total)
        if row.over_bytes > max(0, held[fullest].total - self.cluster.usable_bytes):
            return Limit("host", self.stages.host_bytes(strategy, partition))
        stages = sorted({stage for stage, _ in schedule_of(strategy)[1].held_by(fullest)})
        layers = [layer for stage in stages for layer in partition.layers_of(stage)]
        return limit_of(held[fullest], partition.graph, layers)

    def timeline(self, row: PlanRow) -> Timeline:
        """Return the simulated step of a group."""
        return self.step_time(row.strategy, self.partition_of(row)).timeline

    def step_time(self, candidate: Strategy, partition: Partition, *, messages: bool = True) -> StepTime:
        """Return the time of a step.

        Args:
            messages: take time; False: values and gradients are passed between stages in 0 s.
        """
        stages = self.stages.stage_costs(candidate, partition)
        owned, stops = partition.graph.owned_bytes, [*partition.starts[1:], None]
        params = [sum(owned[start:stop]) for start, stop in zip(partition.starts, stops, strict=True)]
        links = links_between(candidate, partition, self.cluster)
        if not messages:
            links = {ends: LinkCost(0.0, None if link.backward_s is None else 0.0) for ends, link in links.items()}
        own = self.stages.branched.own_bytes(candidate.ways) if candidate.ways > 1 else 0
        return step_time(candidate, self.task.batch, stages, links, params, self.task.slots, self.cluster, own)


COMPUTING = "computing"
"""What a step would be if nothing were lost."""


def step_shares(evaluator: Evaluator, row: PlanRow) -> dict[str, float]:
    """Return what a step is spent on -> its share of the step, of a row that can run; they add up to 1.

    Shares of 0 are left out.
    """
    strategy, partition = row.strategy, evaluator.partition_of(row)
    step = evaluator.step_time(strategy, partition)
    passes_s = step.step_s - step.exchange_s - step.update_s
    waiting_s = step.bubble * passes_s
    messages_s = 0.0
    if strategy.stages > 1:
        without = evaluator.step_time(strategy, partition, messages=False)
        messages_s = min(waiting_s, max(0.0, step.step_s - without.step_s))

    def stage_s(candidate: Strategy) -> float:
        return sum(cost.forward_s + cost.backward_s for cost in evaluator.stages.stage_costs(candidate, partition))

    whole_s, plain_s = stage_s(strategy), stage_s(dataclasses.replace(strategy, policy=KEEP_ALL))
    alone_s = plain_s
    if strategy.members > 1:  # each would take its part of the time that one rank takes for the tile
        _, costs = evaluator.stages.microbatch(evaluator.stages.tiles(strategy))
        alone_s = min(plain_s, sum(costs.seconds) / strategy.members)
    busy = [span for rank in step.timeline.spans for span in step.timeline.compute(rank)]
    again_s = sum(span.duration_s for span in busy if span.action.kind is Kind.RECOMPUTE)
    again_s *= (passes_s - waiting_s) / sum(span.duration_s for span in busy)
    per_s = (passes_s - waiting_s - again_s) / whole_s
    seconds = {
        COMPUTING: alone_s * per_s,
        "halos and uneven parts" if strategy.grid else "uneven branches": (plain_s - alone_s) * per_s,
        _saving(strategy.policy): (whole_s - plain_s) * per_s + again_s,
        "waiting for other stages": waiting_s - messages_s,
        "messages": messages_s,
        "gathering parameters" if strategy.name == "fsdp" else "sums of gradients": step.exchange_s,
        "update": step.update_s,
    }
    return {what: spent_s / step.step_s for what, spent_s in seconds.items() if spent_s > 0}


def _saving(policy: ActivationPolicy) -> str:
    """Return what saves memory and takes time."""
    if policy.stream is not None:
        return "recomputation, copies of boxes"
    again, moves = policy.recompute != "none", "copies to the host"
    return "recomputation, copies" if again and policy.moves else moves if policy.moves else "recomputation"
