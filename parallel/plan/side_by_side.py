"""Costs of a model whose tiles are divided among teams: the part of a member, and the seconds of its exchanges.

Takes the region of a model (``StreamedModel``), the graph that costs are estimated of, and a cluster; gives by grid the
graph of the largest member, and what its layers cost with all that they exchange, so that balancing, bytes and
simulation follow as of whole tiles. No torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import LayerGraph
from parallel.graph.scale import with_tiles
from parallel.plan.part_graph import NO_TRAFFIC, HaloTraffic, PartGraph, Sum, part_graph
from parallel.space.boxes import StreamedModel
from parallel.space.side_by_side import SideBySide, divide_among
from parallel.space.team import Grid, is_small_all_reduce


@dataclass(frozen=True)
class Divisible:
    """A model as teams see it.

    Attributes:
        model: the region that has rows, for one tile.
        timed: the whole model with its loss, for one tile, as costs are estimated of it.
        estimate: gives what the layers of a graph cost, by tiles of a microbatch.
    """

    model: StreamedModel
    timed: LayerGraph
    estimate: Callable[[LayerGraph], Callable[[int], Costs]]


class TeamParts:
    """Parts of a model by the grid of its teams.

    Args:
        divisible: the model.
        graph: of the whole model and its loss, for one tile, as bytes are counted of it.
        cluster: where.
    """

    def __init__(self, divisible: Divisible, graph: LayerGraph, cluster: Cluster) -> None:
        self._divisible, self._graph, self._cluster = divisible, graph, cluster
        self._sides: dict[Grid, SideBySide] = {}
        self._parts: dict[Grid, PartGraph] = {}
        self._estimates: dict[Grid, Callable[[int], Costs]] = {}

    def side(self, grid: Grid) -> SideBySide:
        """Return the region that a team computes side by side."""
        if grid not in self._sides:
            self._sides[grid] = divide_among(self._divisible.model, grid)
        return self._sides[grid]

    def part(self, grid: Grid) -> PartGraph:
        """Return the part of the largest member, for one tile."""
        if grid not in self._parts:
            self._parts[grid] = part_graph(self._graph, self.side(grid))
        return self._parts[grid]

    def microbatch(self, grid: Grid, tiles: int) -> tuple[LayerGraph, Costs]:
        """Return the graph of the largest member for microbatches of ``tiles``, and what its layers cost."""
        part = self.part(grid)
        if grid not in self._estimates:
            same = self._divisible.timed is self._graph
            timed = part.graph if same else part_graph(self._divisible.timed, self.side(grid)).graph
            self._estimates[grid] = self._divisible.estimate(timed)
        costs = self._estimates[grid](tiles)
        pairs = zip(costs.layers, part.traffic, strict=True)
        costed = tuple(with_traffic(cost, traffic, tiles, grid.members, self._cluster) for cost, traffic in pairs)
        return with_tiles(part.graph, tiles), dataclasses.replace(costs, layers=costed)


def with_traffic(cost: LayerCost, traffic: HaloTraffic, tiles: int, members: int, cluster: Cluster) -> LayerCost:
    """Return ``cost`` with what its layer exchanges in a team of the cluster's first ``members`` ranks."""
    if traffic == NO_TRAFFIC:
        return cost
    link = cluster.told_link(members)
    forward = tiles * traffic.forward_copied / cluster.update_bandwidth
    backward = tiles * traffic.backward_copied / cluster.update_bandwidth
    for halo in traffic.halos:
        seconds = tiles * halo.bytes / link.bandwidth + cluster.exchange_s(halo.messages, members)
        hides = halo.behind and cluster.hides(members)
        forward += max(0.0, seconds - cost.forward_s * hides)
        backward += max(0.0, seconds - cost.backward_s * hides) * halo.back
    forward += sum(sum_in_team_s(each, members, cluster) for each in traffic.forward_sums)
    backward += sum(sum_in_team_s(each, members, cluster) for each in traffic.backward_sums)
    return LayerCost(cost.forward_s + forward, cost.backward_s + backward, cost.backward_input_s + backward)


def sum_in_team_s(summed: Sum, members: int, cluster: Cluster) -> float:
    """Return the seconds of a sum over the cluster's first ``members`` ranks."""
    if cluster.kind == "cpu" and is_small_all_reduce(summed.bytes, members):
        messages = members - 1
        return cluster.exchange_s(messages, members) + messages * summed.bytes / cluster.told_link(members).bandwidth
    return cluster.sum_s(summed.bytes * (members if summed.gathered else 1), range(members))
