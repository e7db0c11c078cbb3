"""The search: which of all candidates fits the memory and gives most images per second.

Takes a task and a cluster; gives a ``PlanRow`` for every candidate. The model is cut anew for every number of stages,
size of microbatch and kind of replica. What does not fit is tried again with cuts chosen within the memory, then with
the optimizer state of a pair of replicas shared between its ranks, then with parts computed again or moved to the host,
then with both (``savings``); each costs time, so the first that fits is taken. No torch here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence

from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import link_costs, stage_costs
from parallel.graph.partition import Partition
from parallel.plan.candidates import candidates, in_teams, leanest
from parallel.plan.fitting import Fitting
from parallel.plan.limit import Limit, limit_of
from parallel.plan.plan import SIMPLER, PlanRow, best_of
from parallel.plan.savings import ANY, BOXES, Savings
from parallel.plan.stages import StageCache, slower_link
from parallel.plan.step_time import (
    LONG,
    StepTime,
    by_speed,
    forecast_split,
    forecast_whole,
    group_seconds,
    schedule_of,
    weights_of,
)
from parallel.plan.streamed import SIDES
from parallel.plan.task import Task
from parallel.schedule.timeline import Timeline
from parallel.strategy import Strategy

GAIN = 4 / 3
"""Times as fast, at most, as with all of it computed again: a forward pass is about a third of both."""
PIPELINES = 16
"""Ranks up to which pipelines of teams are searched, when spatial is among the strategies, and grids of columns: of
more, groups of as many do the same."""
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
        self._known: dict[Strategy, Fitting | None] = {}

    def rows(
        self,
        names: Iterable[str],
        *,
        ranks: int,
        depth: int | None = None,
        m: int | None = None,
        savings: Savings = ANY,
    ) -> Iterator[PlanRow]:
        """Yield the row of every candidate among the strategies ``names``; ``depth`` and ``m`` as the user fixed
        them."""
        free = []
        for name in names:
            if reason := self.task.refused.get(name):
                yield PlanRow(Strategy(name, ranks, 1, 1), refused=reason)
            else:
                free.append(name)
        rows: list[PlanRow] = []
        for row in self._of_ranks(free, ranks, depth, m, savings):
            rows.append(row)
            yield row
        yield from self._of_teams(free, ranks, depth, m, savings, best_of(rows))

    def _of_ranks(
        self, free: Sequence[str], ranks: int, depth: int | None, m: int | None, savings: Savings
    ) -> Iterator[PlanRow]:
        """Yield the rows of candidates whose every rank has a seat of its own."""
        most = self.cutting.most_stages
        allowed = list(candidates(ranks, self.task.batch, names=free, most_stages=most, depth=depth, m=m))
        if self.task.one_copy:
            several = dict.fromkeys(candidate.name for candidate in allowed if candidate.copies > 1)
            allowed = [candidate for candidate in allowed if candidate.copies == 1]
            for name in [name for name in several if name not in {candidate.name for candidate in allowed}]:
                yield PlanRow(Strategy(name, ranks, 1, 1), refused=self.task.one_copy)
        if len(allowed) <= FEW:
            for candidate in allowed:
                row = self.row(candidate, savings)
                yield row
                if row.fits and self.cluster.speeds and candidate.m > candidate.groups > 1:
                    yield from self._by_speed(candidate, row, savings)
            return
        for name in free:
            yield from self._promising([candidate for candidate in allowed if candidate.name == name], savings)

    def _by_speed(self, candidate: Strategy, row: PlanRow, savings: Savings) -> Iterator[PlanRow]:
        """Yield the row of ``candidate`` with shares by the speeds of its groups, where they are not equal ones."""
        if candidate.name in ("mast", "fsdp"):
            return
        costs = self.cutting.stage_costs(row.strategy, self.partition_of(row))
        if candidate.splits:
            links = link_costs(self.partition_of(row), functools.partial(slower_link, candidate, self.cluster))
            shared = by_speed(candidate, *group_seconds(row.strategy, self.task.batch, costs, links, self.cluster))
        else:
            speeds = self.cluster.speeds_of(range(candidate.ranks))
            shared = by_speed(candidate, [(costs[0].forward_s + costs[0].backward_s) / speed for speed in speeds])
        if [len(share) for share in shared.shares] != [len(candidate.share_of(g)) for g in range(candidate.groups)]:
            yield self.row(shared, savings)

    def _of_teams(
        self,
        free: Sequence[str],
        ranks: int,
        depth: int | None,
        m: int | None,
        savings: Savings,
        best: PlanRow | None,
    ) -> Iterator[PlanRow]:
        """Yield the rows of candidates with teams on their seats: of spatial alone always, of pipelines of teams as far
        as one could be faster than ``best``, and than what was found meanwhile."""
        own: dict[str, list[Strategy]] = {name: [] for name in free}
        names = [name for name in free if name == "spatial" or ("spatial" in free and ranks <= PIPELINES)]
        for candidate in self._teams(names, ranks, depth, m):
            own[candidate.name].append(candidate)
        if "spatial" in own and not own["spatial"]:
            yield PlanRow(Strategy("spatial", ranks, 1, 1), refused=self._no_teams(ranks))
        for name in sorted(own, key=lambda name: name != "spatial"):
            speed = 0.0 if name == "spatial" or best is None else best.images_per_second or 0.0
            tried = own[name] if speed or name == "spatial" else leanest(own[name])
            for bound, candidate in sorted(((self._bound(each), each) for each in tried), key=lambda pair: -pair[0]):
                if bound <= (1 + SIMPLER) * speed:
                    break
                row = self.row(candidate, savings)
                if row.fits:
                    speed = max(speed, row.images_per_second or 0.0)
                    best = best_of([each for each in (best, row) if each])
                yield row

    def _teams(
        self,
        names: Sequence[str],
        ranks: int,
        depth: int | None = None,
        m: int | None = None,
        *,
        rows_alone: bool = False,
    ) -> list[Strategy]:
        """Return the candidates with teams that the model's tiles can be divided among.

        Args:
            rows_alone: only those that divide rows.
        """
        parts = self.cutting.teams if not self.task.one_copy and not self.cluster.speeds else None
        if ranks < 2 or parts is None:
            return []
        most, members = self.cutting.most_stages, self.cluster.per_node
        batch = self.task.batch
        made = in_teams(ranks, batch, names=names, most_stages=most, most_members=members, depth=depth, m=m)
        if rows_alone or ranks > PIPELINES:
            made = (each for each in made if each.grid and each.grid.columns == 1)
        return [each for each in made if each.grid and parts.side(each.grid).steps]

    def _no_teams(self, ranks: int) -> str:
        if ranks < 2:
            return "one rank has nobody to divide a tile with"
        if self.cluster.speeds:
            return "members of a team divide tiles evenly, and the devices differ in speed"
        if self.task.one_copy or self.cutting.teams is None:
            return self.task.one_copy or self.task.not_divisible
        return "no team of a node's ranks can divide such tiles, or the batch among its groups"

    def _promising(self, own: Iterable[Strategy], savings: Savings) -> Iterator[PlanRow]:
        """Yield rows of one strategy, those with the highest bound of images/s first, as long as it is above the
        best."""
        best = 0.0
        for bound, candidate in sorted(((self._bound(each), each) for each in own), key=lambda pair: -pair[0]):
            if bound <= best:
                return
            row = self.row(candidate, savings)
            if row.fits:
                best = max(best, row.images_per_second or 0.0)
            yield row

    def _bound(self, candidate: Strategy) -> float:
        """Return images per second that no partition and no memory could raise: nobody waits but for the slowest
        rank."""
        _, costs = self.cutting.of(candidate)
        microbatches = sum(weights_of(candidate, self.task.batch))
        slowest = sum(costs.seconds) / candidate.depth
        if candidate.splits and not candidate.grid:
            partition = self.cutting.partition(candidate, within=False)
            assert partition is not None
            loads = [cost.forward_s + cost.backward_s for cost in stage_costs(partition, costs)]
            held = [loads[k :: candidate.depth] for k in range(candidate.depth)]
            slowest = max(map(sum, held)) if not candidate.paired else sum(loads) / candidate.depth
        fastest = max(self.cluster.speeds, default=1.0)
        return self.task.batch * fastest / (microbatches * slowest) if slowest else math.inf

    def row(self, candidate: Strategy, savings: Savings = ANY, *, seconds: bool = True) -> PlanRow:
        """Return, of ``candidate`` with whatever of cuts and ``savings`` makes it fit, the fastest of those that cost
        about as much; the variant that misses by least where none does.

        Args:
            seconds: tell those of a step, which takes a while, even if nothing is chosen by them.
        """
        if self.task.one_copy:
            if "none" not in savings.recompute:
                return PlanRow(candidate, refused=self.task.one_copy)
            savings = dataclasses.replace(savings, recompute=("none",))
        tried: list[Fitting] = []
        for tier in savings.tiers(candidate):
            own, fastest = [], None
            for variant in tier:
                if (fastest and not self._may_beat(variant, fastest)) or (fitting := self._least(variant)) is None:
                    continue
                own.append(fitting)
                if fitting.fits:
                    row = self._timed(fitting, seconds or len(tier) > 1)
                    fastest = best_of([each for each in (fastest, row) if each])
            if fastest is not None:
                return fastest
            tried = own + tried
        if savings.boxes and (streamed := self._in_boxes(candidate)):
            if streamed.fits:
                return self._timed(streamed, seconds)
            tried = [streamed, *tried]
        if not tried:
            return PlanRow(candidate, refused=savings.refusal(candidate))
        nearest = min(tried, key=lambda fitting: fitting.over_bytes)
        return self._timed(nearest, seconds)

    def in_boxes(self, candidate: Strategy) -> PlanRow | None:
        """Return the row of ``candidate`` in the largest boxes that fit, or in the smallest; None where it cannot be
        computed box by box."""
        fitting = self._in_boxes(candidate)
        return None if fitting is None else self._timed(fitting)

    def _in_boxes(self, candidate: Strategy) -> Fitting | None:
        sides = self.cutting.box_sides(candidate)
        if not sides:
            return None

        def fitting(side: int) -> Fitting:
            found = self._least(self.cutting.within_host(candidate.under(stream=side)))
            assert found is not None
            return found

        def allowed(side: int) -> bool:
            # Smaller boxes store no fewer maps on the host; on a CPU they leave more of the memory for these maps.
            return fitting(side).fits if self.cluster.kind == "cpu" else fitting(side).fits_device

        assert self.task.streamed is not None
        fitted, key = self.task.streamed.fitted, (self.cutting.tiles(candidate), candidate.grid)
        if fitted.get(key) in sides and allowed(fitted[key]):
            return fitting(fitted[key])
        # Often the largest fit, or those next to what fitted before, which do not fit here.
        low, high = -1, sides.index(fitted[key]) if fitted.get(key) in sides else len(sides)
        middle = high - 1
        while high - low > 1:
            low, high = (middle, high) if allowed(sides[middle]) else (low, middle)
            middle = (low + high) // 2
        if low < 0:
            return fitting(sides[0])
        if high < len(sides) or sides[low] == SIDES[-1]:
            fitted[key] = sides[low]
        return fitting(sides[low])

    def _may_beat(self, candidate: Strategy, row: PlanRow) -> bool:
        """Return False where moving what is kept takes ``candidate`` longer than ``row``, however the model is cut."""
        share = candidate.m // candidate.groups
        if candidate.policy.recompute != "none" or not row.images_per_second or share >= LONG * candidate.depth:
            return True
        costs, moved_s = self.cutting.of(candidate)[1], self.cutting.moved_s(candidate)
        join = max if self.cluster.kind == "cuda" else sum
        passes_s = (sum(cost.forward_s for cost in costs.layers), sum(cost.backward_s for cost in costs.layers))
        least_s = sum(weights_of(candidate, self.task.batch)) * sum(join((s, moved_s)) for s in passes_s)
        return self.task.batch * candidate.depth > row.images_per_second * least_s

    def refined(self, rows: Sequence[PlanRow], savings: Savings = ANY) -> list[PlanRow]:
        """Return ``rows``, the best of each strategy that may come to be the best of all with the best choice of what
        it computes again."""
        refined, best = list(rows), best_of(rows)
        for name in dict.fromkeys(row.strategy.name for row in rows):
            own = best_of(row for row in rows if row.strategy.name == name)
            if own and best and GAIN * (own.images_per_second or 0) >= (best.images_per_second or 0):
                refined[refined.index(own)] = self._refined(own, savings)
        return refined

    def _refined(self, row: PlanRow, savings: Savings) -> PlanRow:
        candidate = savings.refined(dataclasses.replace(row.strategy, cuts=()))
        fitting = None if candidate is None else self._least(candidate)
        if fitting is None or not fitting.fits:
            return row
        return best_of([row, self._timed(fitting)]) or row

    def _least(self, candidate: Strategy) -> Fitting | None:
        """Return, of the cuts that balance the ranks and those chosen within the memory, the first that fit, or that
        miss by less; None where it cannot run."""
        if candidate not in self._known:
            fitting = self._fitting(candidate, within=False)
            if candidate.splits and (fitting is None or not fitting.fits):
                within = self._fitting(candidate, within=True)
                if within and (fitting is None or within.fits or within.over_bytes < fitting.over_bytes):
                    fitting = within
            self._known[candidate] = fitting
        return self._known[candidate]

    def least(self, name: str, ranks: int, savings: Savings = ANY) -> PlanRow | None:
        """Return, of strategy ``name``, the first candidate that fits, from microbatches of one tile on, or the one
        that misses by least; None where the strategy cannot run. ``timed`` tells its seconds."""
        nearest: PlanRow | None = None
        if name in self.task.refused:
            return None
        if name == "spatial":
            of_teams = self._teams([name], ranks, rows_alone=True)
            most = max((each.members for each in of_teams), default=0)
            given = [each for each in of_teams if each.members == most]
        else:
            given = list(candidates(ranks, self.task.batch, names=[name], most_stages=self.cutting.most_stages))
        tried = leanest(each for each in given if each.copies == 1 or not self.task.one_copy)
        for candidate in tried[:1] if savings == BOXES else tried:  # the largest microbatches make the largest maps
            row = self.row(candidate, savings, seconds=False)
            if row.fits:
                return row
            if not row.refused and (nearest is None or row.over_bytes < nearest.over_bytes):
                nearest = row
        return nearest

    def timed(self, row: PlanRow) -> PlanRow:
        """Return ``row`` of ``least`` with its seconds."""
        if row.step_s is not None or row.refused:
            return row
        return self._timed(Fitting(row.strategy, self.partition_of(row), self.cutting))

    def forecast(self, candidate: Strategy, *, within: bool = False) -> PlanRow | None:
        """Return the row of ``candidate`` as it is.

        Args:
            within: choose cuts that keep every rank within the memory; None where there are none.
        """
        fitting = self._fitting(candidate, within)
        return None if fitting is None else self._timed(fitting)

    def at(self, candidate: Strategy, partition: Partition) -> PlanRow | None:
        """Return the row of ``candidate`` with stages that are given; None where no choice of what is computed again
        fits."""
        fitting = self._fitting_at(candidate, partition)
        return None if fitting is None else self._timed(fitting)

    def _fitting(self, candidate: Strategy, within: bool) -> Fitting | None:
        """Return what ``candidate`` takes; None where no cuts fit as asked."""
        partition = self.cutting.partition(candidate, within=within)
        return None if partition is None else self._fitting_at(candidate, partition)

    def _fitting_at(self, candidate: Strategy, partition: Partition) -> Fitting | None:
        """Return the same for stages that are given."""
        decided = self.cutting.decided(candidate, partition)
        return None if decided is None else Fitting(decided, partition, self.cutting)

    def _timed(self, fitting: Fitting, seconds: bool = True) -> PlanRow:
        step = self._forecast(fitting.strategy, fitting.partition) if seconds else None
        return PlanRow(
            fitting.strategy,
            self.task.batch / step.step_s if step and step.step_s else None,
            step.step_s or None if step else None,
            step.bubble if step else None,
            fitting.peak_bytes,
            fitting.over_bytes,
            host_bytes=self.cutting.host_bytes(fitting.strategy, fitting.partition),
        )

    def partition_of(self, row: PlanRow) -> Partition:
        """Return the stages of a row, for microbatches of the row's size; one where each rank computes the whole
        model."""
        graph, _ = self.cutting.of(row.strategy)
        return Partition(graph, (0, *(graph.position[cut] for cut in row.strategy.cuts)))

    def limit(self, row: PlanRow) -> Limit:
        """Return what fills the fullest rank most, or the host where a row misses that by more."""
        strategy, partition = row.strategy, self.partition_of(row)
        if strategy.policy.stream is not None:
            return self.cutting.limit_in_boxes(strategy)
        held = [self.cutting.rank_bytes(strategy, partition, rank) for rank in range(strategy.depth)]
        fullest = max(range(len(held)), key=lambda rank: held[rank].total)
        if row.over_bytes > max(0, held[fullest].total - self.cluster.usable_bytes):
            return Limit("host", self.cutting.host_bytes(strategy, partition))
        stages = {0} if not strategy.splits else {s for s, _ in schedule_of(strategy)[1].held_by(fullest)}
        layers = [layer for stage in sorted(stages) for layer in partition.layers_of(stage)]
        return limit_of(held[fullest], partition.graph, layers)

    def timeline(self, row: PlanRow) -> Timeline | None:
        """Return the simulated step of the first group; None where each rank computes the whole model."""
        return self._forecast(row.strategy, self.partition_of(row)).timeline

    def _forecast(self, candidate: Strategy, partition: Partition) -> StepTime:
        stages = self.cutting.stage_costs(candidate, partition)
        params = [sum(layer.param_bytes for layer in partition.layers_of(stage)) for stage in range(partition.depth)]
        batch, slots = self.task.batch, self.task.slots
        if candidate.splits:
            links = link_costs(partition, functools.partial(slower_link, candidate, self.cluster))
            return forecast_split(candidate, batch, stages, links, params, slots, self.cluster)
        (stage,), (size,) = stages, params
        return forecast_whole(candidate, batch, stage.forward_s, stage.backward_s, size, slots, self.cluster)
