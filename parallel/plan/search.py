"""The search: which of all candidates fits the memory and gives most images per second.

Takes a task and a cluster; gives a ``PlanRow`` for every candidate. The model is cut anew for every number of stages,
size of microbatch and kind of replica. What does not fit is tried again with cuts chosen within the memory, then with
the optimizer state of a pair of replicas shared between its ranks, then with parts computed again or moved to the host,
then with both (``savings``); each costs time, so the first that fits is taken. No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import link_costs, stage_costs
from parallel.graph.partition import Partition
from parallel.memory.policy import ActivationPolicy
from parallel.plan.candidate import Candidate, candidates, leanest
from parallel.plan.limit import Limit, limit_of
from parallel.plan.plan import PlanRow, best_of
from parallel.plan.savings import ANY, Savings
from parallel.plan.stages import StageCache, slower_link
from parallel.plan.step_time import LONG, StepTime, forecast_split, forecast_whole, schedule_of, weights_of
from parallel.plan.task import Task
from parallel.schedule.timeline import Timeline

GAIN = 4 / 3
"""Times as fast, at most, as with all of it computed again: a forward pass is about a third of both."""
FEW = 150
"""Candidates: of more, those are left out that cannot be faster than one of their strategy that fits."""


class Planner:
    """Forecasts for one task on one cluster.

    Args:
        task: what is to be trained.
        cluster: where.
    """

    def __init__(self, task: Task, cluster: Cluster) -> None:
        self.task, self.cluster = task, cluster
        self.cutting = StageCache(task, cluster)
        self._known: dict[Candidate, _Fitting | None] = {}

    def rows(
        self,
        names: Iterable[str],
        *,
        ranks: int,
        depth: int | None = None,
        m: int | None = None,
        savings: Savings = ANY,
    ) -> Iterator[PlanRow]:
        """Of every candidate among the strategies ``names``; ``depth`` and ``m`` as the user fixed them."""
        free = []
        for name in names:
            if reason := self.task.refused.get(name):
                yield PlanRow(Candidate(name, ranks, 1, 1), refused=reason)
            else:
                free.append(name)
        most = self.cutting.most_stages
        found = list(candidates(ranks, self.task.batch, names=free, most_stages=most, depth=depth, m=m))
        if self.task.one_copy:
            several = [candidate for candidate in found if candidate.copies > 1]
            found = [candidate for candidate in found if candidate.copies == 1]
            for name in {one.name: None for one in several if one.name not in {other.name for other in found}}:
                yield PlanRow(Candidate(name, ranks, 1, 1), refused=self.task.one_copy)
        if len(found) <= FEW:
            yield from (self.row(candidate, savings) for candidate in found)
            return
        for name in free:
            yield from self._promising([candidate for candidate in found if candidate.name == name], savings)

    def _promising(self, found: Iterable[Candidate], savings: Savings) -> Iterator[PlanRow]:
        """Rows of one strategy, those with the highest bound of images/s first, as long as it is above the best."""
        best = 0.0
        for bound, candidate in sorted(((self._bound(one), one) for one in found), key=lambda pair: -pair[0]):
            if bound <= best:
                return
            row = self.row(candidate, savings)
            if row.fits:
                best = max(best, row.images_per_second or 0.0)
            yield row

    def _bound(self, candidate: Candidate) -> float:
        """Images per second that no partition and no memory could raise: nobody waits but for the slowest rank."""
        _, costs = self.cutting.microbatch(self.cutting.tiles(candidate))
        microbatches = sum(weights_of(candidate, self.task.batch))
        slowest = sum(costs.seconds)
        if candidate.splits:
            partition = self.cutting.partition(candidate, within=False)
            assert partition is not None
            loads = [cost.forward_s + cost.backward_s for cost in stage_costs(partition, costs)]
            held = [loads[k :: candidate.depth] for k in range(candidate.depth)]
            slowest = max(map(sum, held)) if not candidate.paired else sum(loads) / candidate.depth
        return self.task.batch / (microbatches * slowest) if slowest else math.inf

    def row(self, candidate: Candidate, savings: Savings = ANY) -> PlanRow:
        """Of ``candidate``, with whatever of cuts and ``savings`` makes it fit, the fastest of those that cost about as
        much; the variant that misses by least where none does."""
        tried: list[_Fitting] = []
        for tier in savings.tiers(candidate):
            own, found = [], None
            for variant in tier:
                if (found and not self._may_beat(variant, found)) or (fitting := self._least(variant)) is None:
                    continue
                own.append(fitting)
                if fitting.fits:
                    found = best_of([row for row in (found, self._timed(fitting)) if row])
            if found is not None:
                return found
            tried = own + tried
        if not tried:
            return PlanRow(candidate, refused=savings.refusal(candidate))
        return self._timed(min(tried, key=lambda fitting: fitting.over_bytes))

    def _may_beat(self, candidate: Candidate, row: PlanRow) -> bool:
        """False where moving what is kept takes ``candidate`` longer than ``row``, however the model is cut."""
        share = candidate.m // candidate.groups
        if candidate.recompute != "none" or not row.images_per_second or share >= LONG * candidate.depth:
            return True
        costs, moved_s = self.cutting.microbatch(self.cutting.tiles(candidate))[1], self.cutting.moved_s(candidate)
        join = max if self.cluster.kind == "cuda" else sum
        passes_s = (sum(cost.forward_s for cost in costs.layers), sum(cost.backward_s for cost in costs.layers))
        least_s = sum(weights_of(candidate, self.task.batch)) * sum(join((s, moved_s)) for s in passes_s)
        return self.task.batch * candidate.depth > row.images_per_second * least_s

    def refined(self, rows: Sequence[PlanRow], savings: Savings = ANY) -> list[PlanRow]:
        """``rows``; the best of each strategy that may come to be the best of all with the best choice of what it
        computes again."""
        found, best = list(rows), best_of(rows)
        for name in dict.fromkeys(row.candidate.name for row in rows):
            own = best_of(row for row in rows if row.candidate.name == name)
            if own and best and GAIN * (own.images_per_second or 0) >= (best.images_per_second or 0):
                found[found.index(own)] = self._refined(own, savings)
        return found

    def _refined(self, row: PlanRow, savings: Savings) -> PlanRow:
        candidate = savings.refined(row.candidate)
        fitting = None if candidate is None else self._least(candidate)
        if fitting is None or not fitting.fits:
            return row
        return best_of([row, self._timed(fitting)]) or row

    def _least(self, candidate: Candidate) -> _Fitting | None:
        """Of the cuts that balance the ranks and those chosen within the memory, the first that fit, or that miss by
        less; None where it cannot run."""
        if candidate not in self._known:
            found = self._fitting(candidate, within=False)
            if candidate.splits and (found is None or not found.fits):
                within = self._fitting(candidate, within=True)
                if within and (found is None or within.fits or within.over_bytes < found.over_bytes):
                    found = within
            self._known[candidate] = found
        return self._known[candidate]

    def least(self, name: str, ranks: int, savings: Savings = ANY) -> PlanRow | None:
        """Of strategy ``name``: the first candidate that fits, from microbatches of one tile on, or the one that misses
        by least; None where the strategy cannot run."""
        found: PlanRow | None = None
        given = candidates(ranks, self.task.batch, names=[name], most_stages=self.cutting.most_stages)
        if name in self.task.refused:
            return None
        for candidate in leanest(one for one in given if one.copies == 1 or not self.task.one_copy):
            row = self.row(candidate, savings)
            if row.fits:
                return row
            if not row.refused and (found is None or row.over_bytes < found.over_bytes):
                found = row
        return found

    def forecast(self, candidate: Candidate, *, within: bool = False) -> PlanRow | None:
        """Of ``candidate`` as it is.

        Args:
            within: choose cuts that keep every rank within the memory; None where there are none.
        """
        fitting = self._fitting(candidate, within)
        return None if fitting is None else self._timed(fitting)

    def at(self, candidate: Candidate, partition: Partition) -> PlanRow | None:
        """Of ``candidate`` with stages that are given; None where no choice of what is computed again fits."""
        fitting = self._fitting_at(candidate, partition)
        return None if fitting is None else self._timed(fitting)

    def _fitting(self, candidate: Candidate, within: bool) -> _Fitting | None:
        """What ``candidate`` takes; None where no cuts fit as asked."""
        partition = self.cutting.partition(candidate, within=within)
        return None if partition is None else self._fitting_at(candidate, partition)

    def _fitting_at(self, candidate: Candidate, partition: Partition) -> _Fitting | None:
        """As ``_fitting``, for stages that are given."""
        keeping = self.cutting.keeping(candidate, partition)
        return None if keeping is None else _Fitting(candidate, partition, keeping, self.cutting)

    def _timed(self, fitting: _Fitting) -> PlanRow:
        candidate, partition = fitting.candidate, fitting.partition
        graph, _ = self.cutting.microbatch(self.cutting.tiles(candidate))
        found = self._forecast(candidate, partition, fitting.keeping)
        return PlanRow(
            candidate,
            tuple(graph.layers[start].name for start in partition.starts[1:]),
            self.task.batch / found.step_s if found.step_s else None,
            found.step_s or None,
            found.bubble,
            fitting.peak_bytes,
            fitting.over_bytes,
            chosen=fitting.keeping.chosen,
            ahead_bytes=fitting.keeping.ahead,
        )

    def partition_of(self, row: PlanRow) -> Partition:
        """The stages of a row, for microbatches of the row's size; one where each rank computes the whole model."""
        graph, _ = self.cutting.microbatch(self.cutting.tiles(row.candidate))
        return Partition(graph, (0, *(graph.position[cut] for cut in row.cuts)))

    def limit(self, row: PlanRow) -> Limit:
        """What fills the fullest rank most, or the host where a row misses that by more."""
        candidate, partition = row.candidate, self.partition_of(row)
        keeping = candidate.keeping(row.chosen, row.ahead_bytes)
        held = [self.cutting.rank_bytes(candidate, partition, keeping, rank) for rank in range(candidate.depth)]
        fullest = max(range(len(held)), key=lambda rank: held[rank].total)
        if row.over_bytes > max(0, held[fullest].total - self.cluster.usable_bytes):
            return Limit("host", self.cutting.host_bytes(candidate, partition, keeping))
        stages = {0} if not candidate.splits else {s for s, _ in schedule_of(candidate)[1].held_by(fullest)}
        layers = [layer for stage in sorted(stages) for layer in partition.layers_of(stage)]
        return limit_of(held[fullest], partition.graph, layers)

    def timeline(self, row: PlanRow) -> Timeline | None:
        """The simulated step of the first group; None where each rank computes the whole model."""
        keeping = row.candidate.keeping(row.chosen, row.ahead_bytes)
        return self._forecast(row.candidate, self.partition_of(row), keeping).timeline

    def _forecast(self, candidate: Candidate, partition: Partition, keeping: ActivationPolicy) -> StepTime:
        stages = self.cutting.stage_costs(candidate, partition, keeping)
        params = [sum(layer.param_bytes for layer in partition.layers_of(stage)) for stage in range(partition.depth)]
        batch, slots = self.task.batch, self.task.slots
        if candidate.splits:
            links = link_costs(partition, functools.partial(slower_link, candidate, self.cluster))
            return forecast_split(candidate, batch, stages, links, params, slots, self.cluster)
        (stage,), (size,) = stages, params
        return forecast_whole(candidate, batch, stage.forward_s, stage.backward_s, size, slots, self.cluster)


@dataclass(frozen=True)
class _Fitting:
    """A candidate, its stages, what becomes of what they keep, and what its ranks take, as far as that is asked for."""

    candidate: Candidate
    partition: Partition
    keeping: ActivationPolicy
    cutting: StageCache

    @functools.cached_property
    def fits(self) -> bool:
        """Known before all the rest where one of the first ranks takes too much."""
        limit = self.cutting.cluster.usable_bytes
        return all(self._peak(rank) <= limit for rank in range(self.candidate.depth)) and not self.over_bytes

    @functools.cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        return tuple(map(self._peak, range(self.candidate.depth)))

    @functools.cached_property
    def over_bytes(self) -> int:
        """By how much the fullest rank misses the memory, or the host's."""
        cluster = self.cutting.cluster
        over = max(self.peak_bytes) - cluster.usable_bytes
        if self.candidate.offload and cluster.host_bytes < math.inf:
            on_host = self.cutting.host_bytes(self.candidate, self.partition, self.keeping)
            # The host of a CPU is itself: what its ranks do not fill is free for what is moved.
            left = max(0, -over) if cluster.kind == "cpu" else 0
            over = max(over, on_host - round(cluster.host_bytes) - left)
        return max(0, over)

    @functools.cached_property
    def _peaks(self) -> dict[int, int]:
        return {}

    def _peak(self, rank: int) -> int:
        if rank not in self._peaks:
            self._peaks[rank] = self.cutting.rank_bytes(self.candidate, self.partition, self.keeping, rank).total
        return self._peaks[rank]
