"""Estimate the time of a step of a candidate.

Takes a candidate, the costs of its stages and the cluster; gives ``StepTime``. A group of ranks is simulated for all,
with ranks that share a device sharing it; sums of gradients overlap the remaining backward passes, as the engine
does. A model that each rank computes whole is one stage.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.cost.cluster import Cluster, LinkSpec
from parallel.cost.stage_cost import link_costs
from parallel.graph.partition import Partition
from parallel.memory.rank_bytes import BUCKET_BYTES
from parallel.schedule.action import Kind, Schedule
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import add_recompute
from parallel.schedule.registry import build_schedule, mesh_for
from parallel.schedule.shares import Shares, best_counts, consecutive, split_batch
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import LinkCost, StageCost, Timeline
from parallel.strategy import Strategy

LONG = 4
"""Times the depth of a pipeline: microbatches of a step that is simulated whole."""
UPDATE_PASSES = (6, 11, 20, 25)
"""By values that the optimizer keeps for each parameter, how many times the bytes of the parameters it reads or writes:
torch's SGD, SGD with momentum, and AdamW, with weight decay, operation by operation (``torch/optim``), and AdamW with a
running average. SGD with momentum and an average takes 16, and is counted as AdamW."""

ADDING_PASSES = 3
"""Times the bytes of the parameters that adding a microbatch's gradients to those before reads or writes."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of one step.

    Attributes:
        bubble: part of the ranks' time until the last backward pass in which they do not compute.
        exchange_s: that summing gradients adds after the last backward pass.
        timeline: of a group.
    """

    step_s: float
    bubble: float
    exchange_s: float
    update_s: float
    timeline: Timeline


def schedule_of(candidate: Strategy) -> tuple[Schedule, Mesh]:
    """Return what the ranks of the group with most microbatches compute, and where.

    Raises:
        ValueError: the schedule does not run with these numbers.
    """
    return _schedule_of_group(candidate, _most_microbatches(candidate))


def largest_weights(candidate: Strategy, batch: int) -> tuple[float, ...]:
    """Return the weights of the first microbatches of the batch, the number that ``schedule_of`` has: no group has
    larger ones."""
    return _weights(batch, candidate.m, tuple(range(_most_microbatches(candidate))))


def _most_microbatches(candidate: Strategy) -> int:
    """Return the microbatches of the group with most of them."""
    groups = range(candidate.groups) if candidate.shares else (0,)
    return max(len(candidate.share_of(group)) for group in groups)


def _schedule_of_group(candidate: Strategy, microbatches: int) -> tuple[Schedule, Mesh]:
    """Return what the ranks of a group with so many microbatches compute, and where."""
    return _schedule(candidate.name, candidate.depth, candidate.chunks, microbatches, candidate.policy.stagewise)


@functools.lru_cache(maxsize=128)  # the same few are asked for by turns: for memory, for time, for a shorter step
def _schedule(name: str, depth: int, chunks: int, microbatches: int, recompute: bool) -> tuple[Schedule, Mesh]:
    mesh = mesh_for(name, groups=1, depth=depth, chunks=chunks)
    schedule = build_schedule(name, mesh, microbatches)
    return (add_recompute(schedule) if recompute else schedule), mesh


def weights_of(candidate: Strategy, batch: int, group: int = 0) -> tuple[float, ...]:
    """Return the weights of a group's microbatches, 1 for the largest."""
    return _weights(batch, candidate.m, tuple(candidate.share_of(group)))


@functools.lru_cache(maxsize=64)
def _weights(batch: int, m: int, share: tuple[int, ...]) -> tuple[float, ...]:
    sizes = list(map(len, split_batch(batch, m)))
    return tuple(sizes[i] / max(sizes) for i in share)


def step_time(
    candidate: Strategy,
    batch: int,
    costs: Sequence[StageCost],
    links: dict[tuple[int, int], LinkCost],
    gradient_bytes: Sequence[int],
    slots: int,
    cluster: Cluster,
    own_bytes: int = 0,
) -> StepTime:
    """Return the time of a step; bubble and timeline are of the group that is last to be done.

    Args:
        costs: of the stages, for the largest microbatch.
        gradient_bytes: by stage, the same number as of its parameters.
        own_bytes: of them, those of branches that no other member of a team has.
        slots: values that the optimizer keeps for each parameter.
    """
    added = _adding(candidate, costs, gradient_bytes, slots, cluster)
    steps = {group: _step(candidate, batch, added, links, cluster, group) for group in _unlike(candidate, cluster)}
    group = max(steps, key=lambda each: steps[each][0].makespan_s + steps[each][3])
    timeline, mesh, units, left_out_s = steps[group]
    computed = max(spans[-1].end_s for rank in timeline.spans if (spans := timeline.compute(rank)))
    if candidate.splits and candidate.ways == 1:
        exchange_s = max(computed, _summed_s(candidate, timeline, mesh, gradient_bytes, cluster)) - computed
    else:
        exchange_s = _whole_exchange_s(candidate, batch, costs[0], gradient_bytes[0], cluster, own_bytes)
    held = [{stage for stage, _ in mesh.held_by(rank)} for rank in range(mesh.teams)]
    most = max(sum(gradient_bytes[stage] for stage in stages) for stages in held)
    sharing = candidate.ranks if candidate.name == "fsdp" else candidate.holders if candidate.zero else 1
    update_s = 0.0 if candidate.stashes else _update_s(most / sharing, slots, cluster, candidate.ranks)
    if candidate.zero:  # what each rank has updated is gathered, half of a ring sum
        sums_s = [_sum_s(candidate, mesh, stage, size, cluster) for stage, size in enumerate(gradient_bytes)]
        update_s += max(sum(sums_s[stage] for stage in stages) for stages in held) / 2
    work = sum(span.duration_s for rank in timeline.spans for span in timeline.compute(rank)) / mesh.teams
    slowness = statistics.mean(1 / speed for speed in _speeds(candidate, cluster, group))
    more = units * slowness * sum(cost.forward_s + cost.backward_s + cost.update_s for cost in added) / mesh.depth
    total_s, end = computed + left_out_s, computed + exchange_s
    bubble = 1 - (work + more) / total_s if units and total_s else timeline.bubble
    return StepTime(end + left_out_s + update_s, bubble * candidate.splits, exchange_s, update_s, timeline)


def links_between(candidate: Strategy, partition: Partition, cluster: Cluster) -> dict[tuple[int, int], LinkCost]:
    """Return (source stage, target stage) -> the cost of the link between them, the slowest of all replicas and groups.
    Between teams, of what their members exchange."""
    # Groups lie on nodes alike again after as many groups as a node has ranks.
    firsts = [group * candidate.group_ranks for group in range(min(candidate.groups, cluster.per_node))]

    def link(source: int, target: int) -> LinkSpec | None:
        ends = [stage % candidate.depth for stage in (source, target)]
        ways = [ends] + [[candidate.depth - 1 - end for end in ends]] * candidate.paired
        known = [
            spec
            for first in firsts
            for way in ways
            if (spec := cluster.link(*(first + seat * candidate.members for seat in way))) is not None
        ]
        slower = min(known, key=lambda spec: spec.bandwidth, default=None)
        inside = candidate.members > 1 and slower == cluster.inside
        return (cluster.inside_team or slower) if inside else slower

    return link_costs(partition, link)


def _unlike(candidate: Strategy, cluster: Cluster) -> list[int]:
    """Return a group of each kind: those of a kind have devices of the same speeds, and as much to compute."""
    if not cluster.speeds and not candidate.shares:
        return [0]
    kinds: dict[object, int] = {}
    for group in range(candidate.groups):
        kinds.setdefault((_speeds(candidate, cluster, group), len(candidate.share_of(group))), group)
    return list(kinds.values())


def _speeds(candidate: Strategy, cluster: Cluster, group: int) -> tuple[float, ...]:
    """Return the speeds of a group's teams."""
    return cluster.speeds_of(range(group * candidate.depth, (group + 1) * candidate.depth))


def by_speed(
    candidate: Strategy, costs: Sequence[StageCost], links: dict[tuple[int, int], LinkCost], cluster: Cluster
) -> Shares:
    """Return the shares that end soonest, by what one more microbatch takes each group, and what its
    step takes besides all of its microbatches: the pipeline fills and empties."""
    known: dict[tuple[float, ...], tuple[float, float]] = {}
    for group in range(candidate.groups):
        speeds = _speeds(candidate, cluster, group)
        if speeds not in known:
            ends = []
            for count in (2 * candidate.depth, 3 * candidate.depth):
                schedule, mesh = _schedule_of_group(candidate, count)
                ends.append(simulate(schedule, mesh, costs, links, speeds=speeds).makespan_s)
            each = (ends[1] - ends[0]) / candidate.depth
            known[speeds] = each, ends[0] - 2 * candidate.depth * each
    more, fixed = zip(*(known[_speeds(candidate, cluster, group)] for group in range(candidate.groups)), strict=True)
    return consecutive(best_counts(candidate.m, more, fixed))


def _adding(
    candidate: Strategy, costs: Sequence[StageCost], gradient_bytes: Sequence[int], slots: int, cluster: Cluster
) -> list[StageCost]:
    """Return ``costs`` with the mean seconds of adding gradients up, or of the update after each microbatch."""
    if candidate.stashes:  # nothing is added up, and every microbatch updates
        seconds = [_update_s(size, slots, cluster, candidate.ranks) for size in gradient_bytes]
        return [dataclasses.replace(cost, update_s=update_s) for cost, update_s in zip(costs, seconds, strict=True)]
    share = _most_microbatches(candidate) / (2 if candidate.paired else 1)
    adding = [max(0.0, 1 - 1 / share) * ADDING_PASSES * size / cluster.update_bandwidth for size in gradient_bytes]
    return [
        dataclasses.replace(cost, backward_s=cost.backward_s + s, backward_weight_s=cost.backward_weight_s + s)
        for cost, s in zip(costs, adding, strict=True)
    ]


def _step(
    candidate: Strategy,
    batch: int,
    costs: Sequence[StageCost],
    links: dict[tuple[int, int], LinkCost],
    cluster: Cluster,
    group: int,
) -> tuple[Timeline, Mesh, float, float]:
    """Return the compute actions of a group's step, and what is left out of a long one: the sum of the weights of its
    microbatches, and their seconds. Beyond those that fill the pipeline each takes as long for its weight as the one
    before it, so only the first are simulated."""
    share, weights = len(candidate.share_of(group)), weights_of(candidate, batch, group)
    speeds = _speeds(candidate, cluster, group)
    devices = cluster.devices(candidate.depth, candidate.groups, candidate.members)
    assert not (devices and cluster.speeds), "ranks that share a device have its speed"

    def run(microbatches: int) -> tuple[Timeline, Mesh]:
        schedule, mesh = _schedule_of_group(candidate, microbatches)
        own = weights[:microbatches]
        timeline = simulate(schedule, mesh, costs, links, weights=own, speeds=speeds, devices=devices)
        return timeline, mesh

    enough = LONG * candidate.depth
    if share <= enough:
        return *run(share), 0.0, 0.0
    timeline, mesh = run(enough)
    shorter, _ = run(enough - candidate.depth)
    each = (timeline.makespan_s - shorter.makespan_s) / candidate.depth
    units = sum(weights[enough:])
    return timeline, mesh, units, each * units / statistics.mean(weights[enough - candidate.depth : enough])


def _summed_s(
    candidate: Strategy, timeline: Timeline, mesh: Mesh, gradient_bytes: Sequence[int], cluster: Cluster
) -> float:
    """Return when the last sum of gradients is done; a rank does its sums one after the other."""
    last: dict[tuple[int, int], float] = defaultdict(float)  # 0 of a replica without microbatches
    for rank in timeline.spans:
        for span in timeline.compute(rank):
            if span.action.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                held = (rank, span.action.stage)
                last[held] = max(last[held], span.end_s)
    free = dict.fromkeys(timeline.spans, 0.0)
    stages = sorted(range(mesh.stages), key=lambda s: max(last[rank, s] for rank in mesh.teams_with(s)))
    for stage in stages:
        own = mesh.teams_with(stage)
        begin = max(*(last[rank, stage] for rank in own), *(free[rank] for rank in own))
        end = begin + _sum_s(candidate, mesh, stage, gradient_bytes[stage], cluster) * _rounds(candidate, cluster)
        for rank in own:
            free[rank] = end
    return max(free.values())


def _sum_s(candidate: Strategy, mesh: Mesh, stage: int, param_bytes: int, cluster: Cluster) -> float:
    """Return the seconds of a ring sum of a stage's gradients over all ranks that hold it."""
    members = candidate.members
    teams = [group * candidate.depth + team for group in range(candidate.groups) for team in mesh.teams_with(stage)]
    everybody = [team * members + member for team in teams for member in range(members)]
    at_once = min(max(1, cluster.per_node // members), candidate.depth)
    return cluster.sum_s(param_bytes, everybody, at_once=at_once)


def _rounds(candidate: Strategy, cluster: Cluster) -> float:
    """Return how many ring sums of gradients a step takes, of which nothing hides the seconds: with ZeRO half of one,
    with its stage 2 for every microbatch, which on a GPU are hidden but for the last; inverted replicas sum once."""
    if not candidate.zero:
        return 1.0
    if candidate.zero == 1 or candidate.paired or cluster.kind != "cpu":
        return 0.5
    return 0.5 * _most_microbatches(candidate)


def _whole_exchange_s(
    candidate: Strategy, batch: int, stage: StageCost, param_bytes: int, cluster: Cluster, own_bytes: int
) -> float:
    """Return the seconds that sums of gradients add where each rank, or team that shares branches, computes the whole
    model.

    A GPU's backward pass hides the sums of ddp but for the last bucket, which has nothing to hide behind. With fsdp
    every microbatch gathers parameters for forward and for backward and scatters gradients, half of a ring sum each.
    """
    ranks, ways, hides = candidate.ranks, candidate.ways, cluster.slowdown(candidate.ranks)
    sum_s = cluster.sum_s(param_bytes - own_bytes, range(ranks))
    if ways > 1:
        sum_s += cluster.sum_s(own_bytes, range(0, ranks, ways), at_once=min(ways, cluster.per_node))
    hides *= cluster.kind != "cpu"
    if candidate.name == "fsdp":
        gather_s = sum_s / 2 * cluster.gathering
        twice = sum(max(0.0, gather_s - seconds * hides) for seconds in (stage.forward_s, stage.backward_s))
        passes = sum(weights_of(candidate, batch))
        return passes * twice + gather_s * (passes if cluster.kind == "cpu" else 1)
    sum_s *= cluster.beside_backward * _rounds(candidate, cluster)
    return max(sum_s - hides * stage.backward_s, sum_s * min(1.0, BUCKET_BYTES / max(1, param_bytes)))


def _update_s(param_bytes: float, slots: int, cluster: Cluster, ranks: int) -> float:
    """Return the time of an optimizer's update of so many bytes of parameters on each of ``ranks``."""
    return UPDATE_PASSES[slots] * param_bytes / cluster.update_bandwidth * cluster.slowdown(ranks)
