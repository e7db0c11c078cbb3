"""Costs that teams, recomputation and offload add to the layers and stages of a model.

Teams exchange halos and sums of a layer. On a GPU copies to the host overlap the computation, so that only longer
copies count; on a CPU they are computed by the same cores and hide behind nothing. What goes out and what comes back at
the same time shares the link. Of branches, the graph has the layers of the fullest member, with exchanges at forks and
joins, so that bytes and simulation follow as of whole models. Shared layers are of the samples of one member, a branch
is of all. Not counted: parts of samples on their way, besides all samples of what enters a region. No torch here.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from parallel import remembered
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.branches import Branches, BranchRegion, find_branches
from parallel.graph.layers import Layer, LayerGraph
from parallel.graph.partition import Partition
from parallel.graph.scale import with_tiles
from parallel.memory.liveness import Storage
from parallel.memory.policy import ActivationPolicy, Segment, segments_of
from parallel.memory.stage_bytes import StageMemory
from parallel.schedule.shares import even_parts
from parallel.schedule.timeline import StageCost
from parallel.space.team import Exchange, small_sum_bytes


@dataclass(frozen=True)
class Halo:
    """A piece of a map on its way, for one tile.

    Attributes:
        bytes: that the member which fetches most is sent; ``all_bytes``: all members together.
        messages: that the member is sent.
        back: gradients return.
        overlapped: the member computes its own part of what needs it while it travels.
    """

    bytes: int
    all_bytes: int
    messages: int
    back: bool
    overlapped: bool = False

    @classmethod
    def of(cls, exchange: Exchange, px_bytes: int, back: bool, overlapped: bool = False) -> Halo:
        return cls(exchange.received_px * px_bytes, exchange.px * px_bytes, exchange.messages, back, overlapped)


@dataclass(frozen=True)
class Sum:
    """A sum over the members of a team.

    Attributes:
        bytes: that each member gives.
        gathered: members learn what each has given.
    """

    bytes: int
    gathered: bool = False


MOMENTS, COUNT_BYTES = 3, 8
"""Numbers of each channel that a member gives of a norm in a forward pass, and bytes of each; two come back."""


def norm_sums(channels: int) -> tuple[Sum, Sum]:
    """Return the sums of a norm, in a forward and in a backward pass."""
    return Sum(MOMENTS * channels * COUNT_BYTES, gathered=True), Sum((MOMENTS - 1) * channels * COUNT_BYTES)


@dataclass
class HaloTraffic:
    """Exchanges of a layer within a team, for one tile.

    Attributes:
        forward_sums, backward_sums: over the members.
        forward_copied, backward_copied: bytes that are read or written to put boxes together and to take them apart.
    """

    halos: list[Halo] = field(default_factory=list)
    forward_sums: list[Sum] = field(default_factory=list)
    backward_sums: list[Sum] = field(default_factory=list)
    forward_copied: int = 0
    backward_copied: int = 0


NO_TRAFFIC = HaloTraffic()


def with_traffic(cost: LayerCost, traffic: HaloTraffic, tiles: int, members: int, cluster: Cluster) -> LayerCost:
    """Return ``cost`` with what its layer exchanges in a team of the cluster's first ``members`` ranks."""
    if traffic == NO_TRAFFIC:
        return cost
    link = cluster.team_link(members)
    forward = tiles * traffic.forward_copied / cluster.update_bandwidth
    backward = tiles * traffic.backward_copied / cluster.update_bandwidth
    for halo in traffic.halos:
        seconds = tiles * halo.bytes / link.bandwidth + cluster.exchange_s(halo.messages, members)
        hides = halo.overlapped and cluster.hides(members)
        forward += max(0.0, seconds - cost.forward_s * hides)
        backward += max(0.0, seconds - cost.backward_s * hides) * halo.back
    forward += sum(sum_in_team_s(each, members, cluster) for each in traffic.forward_sums)
    backward += sum(sum_in_team_s(each, members, cluster) for each in traffic.backward_sums)
    return LayerCost(cost.forward_s + forward, cost.backward_s + backward, cost.backward_input_s + backward)


def sum_in_team_s(summed: Sum, members: int, cluster: Cluster) -> float:
    """Return the seconds of a sum over the cluster's first ``members`` ranks."""
    if cluster.kind == "cpu" and summed.bytes <= small_sum_bytes(members):
        messages = members - 1
        return cluster.exchange_s(messages, members) + messages * summed.bytes / cluster.team_link(members).bandwidth
    return cluster.sum_s(summed.bytes * (members if summed.gathered else 1), range(members))


NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
FREE = 1_000_000
"""Numbers of storages from which on those of regions are numbered, so many for each."""


def traffic_of(branches: Branches, region: BranchRegion, samples: int) -> tuple[int, int]:
    """Return the bytes of a region in a forward pass on ``samples``: what the member with most sends or is sent, at the
    fork and at the join, and what all members send. In the backward pass they are sent what they send here."""
    members, graph = len(region.seconds), branches.graph
    rows = [len(own) for own in even_parts(samples, members)]
    forks, joins = [[0, 0] for _ in rows], [[0, 0] for _ in rows]
    for name in region.entering:
        layers = (graph.layers[k] for branch in region.branches for k in branch)
        takers = {branches.member_of[layer.name] for layer in layers if name in layer.inputs}
        for source in range(members):
            for taker in takers - {source}:
                forks[source][0] += rows[source] * graph.by_name[name].output_bytes
                forks[taker][1] += rows[source] * graph.by_name[name].output_bytes
    for name in region.live_out:
        maker = branches.member_of[name]
        for target in set(range(members)) - {maker}:
            joins[maker][0] += rows[target] * graph.by_name[name].output_bytes
            joins[target][1] += rows[target] * graph.by_name[name].output_bytes
    return max(map(max, forks)) + max(map(max, joins)), sum(sent for sent, _ in (*forks, *joins))


class BranchedParts:
    """Parts of a model by the number of members that share its branches.

    Args:
        graph: of the whole model and its loss, for one tile.
        estimate: returns what its layers cost with a microbatch of so many tiles.
        cluster: where.
    """

    def __init__(self, graph: LayerGraph, estimate: Callable[[int], Costs], cluster: Cluster) -> None:
        self._graph, self._estimate, self._cluster = graph, estimate, cluster

    @remembered
    def branches(self, members: int) -> Branches:
        """Return the branches of the model.

        Raises:
            ValueError: it has none.
        """
        return find_branches(self._graph, members)

    def own_bytes(self, members: int) -> int:
        """Return the bytes of the parameters that the fullest member alone holds."""
        return max(self._held(members))

    def microbatch(self, members: int, tiles: int) -> tuple[LayerGraph, Costs]:
        """Return the graph of the member that holds most parameters, for microbatches of ``tiles``, and what its layers
        cost, in regions those of the slowest member."""
        branches, held = self.branches(members), self._held(members)
        fullest = held.index(max(held))
        shared = -(-tiles // members)
        few, many = with_tiles(self._graph, shared), with_tiles(self._graph, tiles)
        costs, of_all = self._estimate(shared), self._estimate(tiles)
        layers, seconds = list(few.layers), list(costs.layers)
        for position, layer in enumerate(self._graph.layers):
            if layer.kind in NORMS and layer.name not in branches.member_of:
                ahead, back = norm_sums(layer.param_bytes // (2 * 4))  # scale and shift, in float32
                sums = HaloTraffic(forward_sums=[ahead], backward_sums=[back])
                seconds[position] = with_traffic(seconds[position], sums, shared, members, self._cluster)
        for number, region in enumerate(branches.regions):
            slowest = region.seconds.index(max(region.seconds))
            for branch, member in zip(region.branches, region.members, strict=True):
                for k in branch:
                    layers[k] = _renumbered(many.layers[k], number) if member == fullest else _without(many.layers[k])
                    seconds[k] = of_all.layers[k] if member == slowest else LayerCost(0.0, 0.0, 0.0)
            entering = sum(many.by_name[name].output_bytes for name in region.entering)
            first, cost = layers[region.start], seconds[region.start]
            layers[region.start] = dataclasses.replace(
                first, forward_work=first.forward_work + entering, backward_work=first.backward_work + entering
            )
            exchange_s = self._exchange_s(branches, region, tiles)
            seconds[region.start] = LayerCost(
                cost.forward_s + exchange_s, cost.backward_s + exchange_s, cost.backward_input_s + exchange_s
            )
        graph = dataclasses.replace(self._graph, layers=tuple(layers))
        return graph, dataclasses.replace(costs, layers=tuple(seconds))

    def _held(self, members: int) -> list[int]:
        """Return the bytes of parameters of each member's branches."""
        branches, held = self.branches(members), [0] * members
        for name, member in branches.member_of.items():
            held[member] += self._graph.owned_bytes[self._graph.position[name]]
        return held

    def _exchange_s(self, branches: Branches, region: BranchRegion, tiles: int) -> float:
        """Return the seconds of the exchanges at the fork and at the join, in one pass."""
        members = len(region.seconds)
        sent, _ = traffic_of(branches, region, tiles)
        bandwidth = self._cluster.team_link(members).bandwidth
        return 2 * self._cluster.exchange_s(members - 1, members) + sent / bandwidth


def _renumbered(layer: Layer, region: int) -> Layer:
    """Return a layer of a branch, whose storages hold all samples: others than those of the same values elsewhere."""
    offset = FREE * (region + 1)
    saved, storages = (
        tuple((offset + number, size) for number, size in pairs) for pairs in (layer.saved, layer.output_storages)
    )
    return dataclasses.replace(layer, saved=saved, output_storages=storages)


def _without(layer: Layer) -> Layer:
    """Return a layer that another member computes."""
    return Layer(
        layer.name, layer.kind, layer.inputs, layer.module, differentiable=layer.differentiable, scope=layer.scope
    )


def policy_costs(
    partition: Partition,
    stages: Sequence[StageCost],
    costs: Costs,
    policy: ActivationPolicy,
    *,
    copy_bandwidth: float,
    overlapped: bool,
    memory: StageMemory,
) -> list[StageCost]:
    """Return ``stages`` with what ``policy`` adds. A stage that is recomputed as a whole has an action for that, as
    long as its forward pass.

    Args:
        costs: of the layers.
        copy_bandwidth: bytes per second, each way.
        overlapped: copies overlap the computation.
        memory: of the partition's graph.
    """
    if not policy.moves and not policy.segmented:
        return list(stages)
    result = []
    for number, stage in enumerate(stages):
        segments = segments_of(partition, number, policy)
        recomputed = [cost for each in segments if each.recompute for cost in costs.layers[each.start : each.stop]]
        again_s = sum(cost.forward_s for cost in recomputed)
        forward_s, backward_s = stage.forward_s, stage.backward_s + again_s
        if policy.moves:
            kept, again = moved_bytes(memory.touched((segments[0].start, segments[-1].stop)), segments, policy)
            # The action that recomputes a whole stage counts as a forward pass, copies and all: instead of those
            # out it makes those back.
            back = 0 if policy.stagewise else kept
            out_s, back_s = kept / copy_bandwidth, (back + 2 * again) / copy_bandwidth
            forward_s = max(forward_s, out_s) if overlapped else forward_s + out_s
            backward_s = max(backward_s, back_s) if overlapped else backward_s + back_s
        input_s = stage.backward_input_s + (backward_s - stage.backward_s)
        result.append(dataclasses.replace(stage, forward_s=forward_s, backward_s=backward_s, backward_input_s=input_s))
    return result


def moved_bytes(storages: Iterable[Storage], segments: Sequence[Segment], policy: ActivationPolicy) -> tuple[int, int]:
    """Return what offloading moves of a stage, whose layers ``segments`` cover: bytes that go out in a forward pass and
    come back before its backward pass, and bytes that do so within the backward pass, of layers that are recomputed.

    Args:
        storages: of memory of the model's graph; those that the stage does not touch change nothing.
    """
    start, stop = segments[0].start, segments[-1].stop
    if policy.stagewise:
        segments = (Segment(start, stop, True),)
    begins = [segment.start for segment in segments]
    kept = again = 0
    for storage in storages:
        if storage.bytes < policy.smallest:
            continue
        saved = {bisect.bisect(begins, layer) - 1 for layer in storage.saved if start <= layer < stop}
        entered = {
            number
            for made, use in storage.used
            if start <= use < stop and made < segments[number := bisect.bisect(begins, use) - 1].start
        }
        if any(not segments[number].recompute for number in saved) or any(segments[n].recompute for n in entered):
            kept += storage.bytes
        elif saved:
            again += storage.bytes
    return kept, again
