"""Costs of a team that shares the branches of a model: layers of the fullest member, exchanges at forks and joins.

Takes the layers of a model; gives graph and costs by members, so that bytes and simulation follow as of whole models.
Shared layers are of the samples of one member, a branch is of all. Not counted: parts of samples on their way, beside
all samples of what enters a region. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.branches import Branches, BranchRegion, find_branches
from parallel.graph.layers import Layer, LayerGraph
from parallel.graph.scale import with_tiles
from parallel.plan.halo_traffic import Sum, sum_in_team_s

NORMS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
MOMENTS, COUNT_BYTES = 3, 8
"""Numbers of each channel that a member gives of a norm in a forward pass, and bytes of each; two come back."""
FREE = 1_000_000
"""Numbers of storages from which on those of regions are numbered, so many for each."""


@dataclass(frozen=True)
class ForkTraffic:
    """Bytes that one member sends, and is sent, at the fork and at the join of a region, in a forward pass; in the
    backward pass it is sent what it sends here.

    Attributes:
        fork, join: the larger of both ways, of the member with most.
        sent: by all members together.
    """

    fork: int
    join: int
    sent: int


def traffic_of(branches: Branches, region: BranchRegion, sizes: Callable[[str], int], samples: int) -> ForkTraffic:
    """Return the bytes of a region for microbatches of ``samples``.

    Args:
        sizes: bytes of a sample of a value.
    """
    members = len(region.seconds)
    count, larger = divmod(samples, members)
    rows = [count + (member < larger) for member in range(members)]
    graph, all_sent = branches.graph, 0
    forks, joins = [[0, 0] for _ in rows], [[0, 0] for _ in rows]
    for name in region.entering:
        layers = (graph.layers[k] for branch in region.branches for k in branch)
        takers = {branches.member_of[layer.name] for layer in layers if name in layer.inputs}
        for source in range(members):
            for taker in takers - {source}:
                forks[source][0] += rows[source] * sizes(name)
                forks[taker][1] += rows[source] * sizes(name)
    for name in region.leaving:
        maker = branches.member_of[name]
        for target in set(range(members)) - {maker}:
            joins[maker][0] += rows[target] * sizes(name)
            joins[target][1] += rows[target] * sizes(name)
    all_sent = sum(sent for sent, _ in (*forks, *joins))
    return ForkTraffic(max(map(max, forks)), max(map(max, joins)), all_sent)


class BranchedParts:
    """Parts of a model by the number of members that share its branches.

    Args:
        graph: of the whole model and its loss, for one tile.
        estimate: gives what its layers cost with a microbatch of so many tiles.
        cluster: where.
    """

    def __init__(self, graph: LayerGraph, estimate: Callable[[int], Costs], cluster: Cluster) -> None:
        self._graph, self._estimate, self._cluster = graph, estimate, cluster
        self._found: dict[int, Branches] = {}

    def branches(self, members: int) -> Branches:
        """Return the branches of the model.

        Raises:
            ValueError: it has none.
        """
        if members not in self._found:
            self._found[members] = find_branches(self._graph, members)
        return self._found[members]

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
                seconds[position] = self._with_sums(seconds[position], layer, members)
        for number, region in enumerate(branches.regions):
            slowest = region.seconds.index(max(region.seconds))
            for branch, member in zip(region.branches, region.members, strict=True):
                for k in branch:
                    layers[k] = _renumbered(many.layers[k], number) if member == fullest else _without(many.layers[k])
                    seconds[k] = of_all.layers[k] if member == slowest else LayerCost(0.0, 0.0, 0.0)
            entering = sum(many.by_name[name].output_bytes for name in region.entering)
            first = layers[region.start]
            layers[region.start] = dataclasses.replace(
                first, forward_work=first.forward_work + entering, backward_work=first.backward_work + entering
            )
            exchange_s = self._exchange_s(branches, region, tiles)
            cost = seconds[region.start]
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
        traffic = traffic_of(branches, region, lambda name: self._graph.by_name[name].output_bytes, tiles)
        bandwidth = self._cluster.told_link(members).bandwidth
        return 2 * self._cluster.exchange_s(members - 1, members) + (traffic.fork + traffic.join) / bandwidth

    def _with_sums(self, cost: LayerCost, layer: Layer, members: int) -> LayerCost:
        channels = layer.param_bytes // (2 * 4)  # scale and shift, in float32
        forward = sum_in_team_s(Sum(MOMENTS * channels * COUNT_BYTES, gathered=True), members, self._cluster)
        backward = sum_in_team_s(Sum((MOMENTS - 1) * channels * COUNT_BYTES), members, self._cluster)
        return LayerCost(cost.forward_s + forward, cost.backward_s + backward, cost.backward_input_s + backward)


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
