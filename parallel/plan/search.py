"""Search the strategy that fits the memory and gives most images per second.

Takes a task and a cluster; gives a ``PlanRow`` for every candidate. The model is cut anew for every number of stages,
size of microbatch and kind of replica. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence

from parallel.plan.candidates import ANY, BOXES, MemoryOptions, candidates, fewest_bytes, in_branches, in_teams
from parallel.plan.evaluate import Evaluator
from parallel.plan.plan import SIMPLER, PlanRow, best_of
from parallel.plan.step_time import by_speed, links_between, weights_of
from parallel.strategy import Strategy

GAIN = 4 / 3
"""Times as fast, at most, as with all of it recomputed: a forward pass is about a third of both."""
PIPELINES = 16
"""Ranks up to which pipelines of teams are searched, when spatial is among the strategies, and grids of columns: of
more, groups of as many do the same."""
FEW = 100
"""Candidates: of more, those are left out that cannot be faster than one of their strategy that fits, unless devices
differ in speed, and shares by speed are tried too."""


class Planner(Evaluator):
    """Search of the best strategy for one task on one cluster."""

    def search(
        self,
        names: Iterable[str],
        *,
        ranks: int,
        depth: int | None = None,
        m: int | None = None,
        savings: MemoryOptions = ANY,
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
        if "subgraph" in free:
            yield from self._of_branches(ranks, depth, m, savings, alone=len(free) == 1)
        yield from self._of_teams([n for n in free if n != "subgraph"], ranks, depth, m, savings, best_of(rows))

    def _of_ranks(
        self, free: Sequence[str], ranks: int, depth: int | None, m: int | None, savings: MemoryOptions
    ) -> Iterator[PlanRow]:
        """Yield the rows of candidates whose every rank has a team of its own."""
        most = self.stages.most_stages
        allowed = list(candidates(ranks, self.task.batch, names=free, most_stages=most, depth=depth, m=m))
        if self.task.one_copy:
            several = dict.fromkeys(candidate.name for candidate in allowed if candidate.copies > 1)
            allowed = [candidate for candidate in allowed if candidate.copies == 1]
            for name in [name for name in several if name not in {candidate.name for candidate in allowed}]:
                yield PlanRow(Strategy(name, ranks, 1, 1), refused=self.task.one_copy)
        if len(allowed) <= FEW or self.cluster.speeds:
            for candidate in allowed:
                row = self.evaluate(candidate, savings)
                yield row
                if row.fits and self.cluster.speeds and candidate.m > candidate.groups > 1:
                    yield from self._by_speed(candidate, row, savings)
            return
        for name in free:
            own = [candidate for candidate in allowed if candidate.name == name]
            # In their usual order, in which the simpler of two comes first; two steps of ``best_of`` below the best.
            rows = self._promising(own, savings, margin=(1 + SIMPLER) ** -2)
            yield from sorted(rows, key=lambda row: (row.strategy.depth, row.strategy.m))

    def _by_speed(self, candidate: Strategy, row: PlanRow, savings: MemoryOptions) -> Iterator[PlanRow]:
        """Yield the row of ``candidate`` with shares by the speeds of its groups, where they are not equal ones."""
        if candidate.name in ("mast", "fsdp"):
            return
        costs = self.stages.stage_costs(row.strategy, self.partition_of(row))
        links = links_between(candidate, self.partition_of(row), self.cluster)
        shared = dataclasses.replace(candidate, shares=by_speed(row.strategy, costs, links, self.cluster))
        if min(map(len, shared.shares)) <= candidate.paired:  # the second replica of a group would compute nothing
            return
        if [len(share) for share in shared.shares] != [len(candidate.share_of(g)) for g in range(candidate.groups)]:
            yield self.evaluate(shared, savings)

    def _of_branches(
        self, ranks: int, depth: int | None, m: int | None, savings: MemoryOptions, alone: bool
    ) -> Iterator[PlanRow]:
        """Yield the rows of candidates whose ranks share the branches of the model; why there is none if ``alone``."""
        tried, reason = self._branched(ranks, depth, m)
        if tried:
            yield from self._promising(tried, savings)
        elif alone:
            yield PlanRow(Strategy("subgraph", ranks, 1, 1), refused=reason)

    def _branched(self, ranks: int, depth: int | None = None, m: int | None = None) -> tuple[list[Strategy], str]:
        """Return the candidates of subgraph, or why there is none."""
        if self.task.one_copy or self.cluster.speeds:
            return [], self.task.one_copy or "members share branches evenly, and the devices differ in speed"
        try:
            self.stages.branched.branches(2)
        except ValueError as fault:
            return [], str(fault)
        most = min(ranks, self.cluster.per_node)
        found = in_branches(ranks, self.task.batch, most_members=most, depth=depth, m=m)
        return list(found), "no team of a node's ranks can share branches, or the batch among its groups"

    def _of_teams(
        self,
        free: Sequence[str],
        ranks: int,
        depth: int | None,
        m: int | None,
        savings: MemoryOptions,
        best: PlanRow | None,
    ) -> Iterator[PlanRow]:
        """Yield the rows of candidates with teams; of pipelines only those that could be faster than ``best``."""
        own: dict[str, list[Strategy]] = {name: [] for name in free}
        names = [name for name in free if name == "spatial" or ("spatial" in free and ranks <= PIPELINES)]
        for candidate in self._teams(names, ranks, depth, m):
            own[candidate.name].append(candidate)
        if "spatial" in own and not own["spatial"] and depth in (None, 1):
            yield PlanRow(Strategy("spatial", ranks, 1, 1), refused=self._no_teams(ranks))
        for name in sorted(own, key=lambda name: name != "spatial"):
            speed = 0.0 if name == "spatial" or best is None else best.images_per_second or 0.0
            tried = own[name] if speed or name == "spatial" else fewest_bytes(own[name])
            if best is not None and best.strategy.policy.stream:  # what is slower may be preferred to boxes
                speed = 0.0
            for row in self._promising(tried, savings, speed, 1 + SIMPLER):
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
        """Return the candidates with teams that tiles can be divided among; ``rows_alone``: that divide rows."""
        parts = self.stages.teams if not self.task.one_copy and not self.cluster.speeds else None
        if ranks < 2 or parts is None:
            return []
        most, members = self.stages.most_stages, min(ranks, self.cluster.per_node)
        batch = self.task.batch
        made = in_teams(ranks, batch, names=names, most_stages=most, most_members=members, depth=depth, m=m)
        if rows_alone or ranks > PIPELINES:
            made = (each for each in made if each.grid and each.grid.columns == 1)
        return [each for each in made if each.grid and parts.plan(each.grid).steps]

    def _no_teams(self, ranks: int) -> str:
        if ranks < 2:
            return "one rank has nobody to divide a tile with"
        if self.cluster.speeds:
            return "members of a team divide tiles evenly, and the devices differ in speed"
        if self.task.one_copy or self.stages.teams is None:
            return self.task.one_copy or self.task.in_teams()[1]
        return "no team of a node's ranks can divide such tiles, or the batch among its groups"

    def _promising(
        self, candidates: Iterable[Strategy], savings: MemoryOptions, speed: float = 0.0, margin: float = 1.0
    ) -> Iterator[PlanRow]:
        """Yield rows of one strategy by their bound of images/s, as long as it is above ``margin`` times the best."""
        for bound, candidate in sorted(((self._bound(each), each) for each in candidates), key=lambda pair: -pair[0]):
            if bound <= margin * speed:
                return
            row = self.evaluate(candidate, savings)
            if row.fits and row.strategy.policy.stream is None:  # one in boxes is not preferred to all that are slower
                speed = max(speed, row.images_per_second or 0.0)
            yield row

    def _bound(self, candidate: Strategy) -> float:
        """Return images per second that no partition and no memory could raise: ranks wait for the slowest; those that
        are no teams also for the first microbatch to arrive and the last to go back."""
        _, costs = self.stages.of(candidate)
        weights, depth, whole_s = weights_of(candidate, self.task.batch), candidate.depth, sum(costs.seconds)
        microbatches, shortest_s = sum(weights), min(weights) * whole_s
        least_s = microbatches * whole_s / depth
        if candidate.members == 1 and candidate.paired:
            least_s = max(least_s, shortest_s)
        elif candidate.members == 1:
            partition = self.stages.partition(candidate, within=False)
            assert partition is not None
            loads = [cost.forward_s + cost.backward_s for cost in self.stages.stage_costs(candidate, partition)]
            least_s = microbatches * max(sum(loads[k::depth]) for k in range(depth))
            if candidate.name == "mp-basic":  # one rank works at a time
                least_s = microbatches * whole_s
            elif candidate.name in ("gpipe", "1f1b"):
                # Rank k waits for the k before it. Least is lost where all are done together: their loads fall from
                # rank to rank by the factor 1 - shortest / all microbatches, and add up to the model.
                least_s = max(least_s, shortest_s / (1 - (1 - min(weights) / microbatches) ** depth))
        fastest = max(self.cluster.speeds, default=1.0)
        return self.task.batch * fastest / least_s if least_s else math.inf

    def tune_recompute(self, rows: Sequence[PlanRow], savings: MemoryOptions = ANY) -> list[PlanRow]:
        """Return ``rows`` with the best choice of what is recomputed, for strategies that may become the best by it."""
        refined, best = list(rows), best_of(rows)
        for name in dict.fromkeys(row.strategy.name for row in rows):
            own = best_of(row for row in rows if row.strategy.name == name)
            if own and best and GAIN * (own.images_per_second or 0) >= (best.images_per_second or 0):
                refined[refined.index(own)] = self._tuned(own, savings)
        return refined

    def _tuned(self, row: PlanRow, savings: MemoryOptions) -> PlanRow:
        candidate = savings.with_optimal(dataclasses.replace(row.strategy, cuts=()))
        check = None if candidate is None else self._best_cuts(candidate)
        if check is None or not check.fits:
            return row
        return best_of([row, self.estimate_time(check)]) or row

    def smallest_memory(
        self, name: str, ranks: int, savings: MemoryOptions = ANY, *, depth: int | None = None, m: int | None = None
    ) -> PlanRow | None:
        """Return, of strategy ``name``, the first candidate that fits, from microbatches of one tile on, or the one
        that misses by least; None where the strategy cannot run. ``with_time`` adds its seconds; ``depth`` and ``m`` as
        of ``search``."""
        nearest: PlanRow | None = None
        if name in self.task.refused:
            return None
        if name == "spatial":
            of_teams = self._teams([name], ranks, depth, m, rows_alone=True)
            most = max((each.members for each in of_teams), default=0)
            given = [each for each in of_teams if each.members == most]
        elif name == "subgraph":
            given, _ = self._branched(ranks, depth, m)
        else:
            most = self.stages.most_stages
            given = list(candidates(ranks, self.task.batch, names=[name], most_stages=most, depth=depth, m=m))
        tried = fewest_bytes(each for each in given if each.copies == 1 or not self.task.one_copy)
        for candidate in tried[:1] if savings == BOXES else tried:  # the largest microbatches make the largest maps
            row = self.evaluate(candidate, savings, seconds=False)
            if row.fits:
                return row
            if not row.refused and (nearest is None or row.over_bytes < nearest.over_bytes):
                nearest = row
        return nearest
