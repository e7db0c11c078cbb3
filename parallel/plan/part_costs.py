"""Costs of a team: the part of its largest member, as a graph of the same layers, and the exchanges of each layer.

Takes the specification of a region and the graph that costs are estimated of; gives graph and costs by grid, so that
cuts, bytes and simulation follow as of whole tiles. All exchanges are those of the plan that runs (``SpatialPlan``).
A convolution keeps the halo that it fetched. It needs a padded copy if it is not split into own part and halos; other
windows keep the copy that they are given. Member 0 computes what follows the region. Not counted: halos that wait on a
log for layers that are recomputed. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from parallel import remembered
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs
from parallel.graph.layers import OUTPUT, Convolution, Layer, LayerGraph, Op
from parallel.graph.scale import cast_parameters, on_part, with_tiles
from parallel.plan.added_costs import COUNT_BYTES, Halo, HaloTraffic, Sum, norm_sums, with_traffic
from parallel.space.rule import Step
from parallel.space.spatial_plan import Borders, PaddedBox, RegionSpec, SpatialPlan, divide_among, overlap_pays
from parallel.space.team import Exchange, TeamGrid, box_px

FLOAT_BYTES = 4
"""Of the numbers that are normalised."""
DRAWN_COPIES = 3
"""Of a whole map, while numbers are drawn for each of its px: ones, what is drawn, and their product."""
NORM_PASSES = 3
"""Times that a member's backward pass of a norm moves its part of the map, more than without a team."""


@dataclass(frozen=True)
class PartGraph:
    """Part of a model that the largest member computes.

    Attributes:
        graph: with the layers of the whole model.
        traffic: by position.
    """

    graph: LayerGraph
    traffic: tuple[HaloTraffic, ...]


@dataclass
class _Change:
    """Changes in a layer, besides its size, and its traffic."""

    saved: list[tuple[int, int]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    forward: int = 0
    backward: int = 0
    strips: list[Op] = field(default_factory=list)
    traffic: HaloTraffic = field(default_factory=HaloTraffic)


@dataclass(frozen=True)
class Divisible:
    """Model whose tiles can be divided among teams.

    Attributes:
        region: that has rows, for one tile.
        timed: the whole model with its loss, for one tile, as costs are estimated of it.
        estimate: returns what the layers of a graph cost, by tiles of a microbatch.
    """

    region: RegionSpec
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

    @remembered
    def plan(self, grid: TeamGrid) -> SpatialPlan:
        """Return the region that a team computes side by side."""
        return divide_among(self._divisible.region, grid)

    @remembered
    def part(self, grid: TeamGrid) -> PartGraph:
        """Return the part of the largest member, for one tile."""
        return _Parts(self._graph, self.plan(grid)).divided()

    @remembered
    def _estimate(self, grid: TeamGrid) -> Callable[[int], Costs]:
        same = self._divisible.timed is self._graph
        timed = self.part(grid) if same else _Parts(self._divisible.timed, self.plan(grid)).divided()
        return self._divisible.estimate(timed.graph)

    def microbatch(self, grid: TeamGrid, tiles: int) -> tuple[LayerGraph, Costs]:
        """Return the graph of the largest member for microbatches of ``tiles``, and what its layers cost."""
        part, costs = self.part(grid), self._estimate(grid)(tiles)
        pairs = zip(costs.layers, part.traffic, strict=True)
        costed = tuple(with_traffic(cost, traffic, tiles, grid.members, self._cluster) for cost, traffic in pairs)
        return with_tiles(part.graph, tiles), dataclasses.replace(costs, layers=costed)


class _Parts:
    def __init__(self, graph: LayerGraph, plan: SpatialPlan) -> None:
        self._graph, self._plan = graph, plan
        self._shares: dict[int, float] = {}
        for layer in graph.layers:
            for number, _ in layer.output_storages:
                self._shares.setdefault(number, self._share(layer))
        self._free = 1 + max(
            (n for layer in graph.layers for n, _ in (*layer.saved, *layer.output_storages)), default=0
        )
        self._gathered: set[str] = set()

    def divided(self) -> PartGraph:
        changes = [self._change(layer) for layer in self._graph.layers]
        layers = tuple(map(self._part, self._graph.layers, changes))
        graph = dataclasses.replace(self._graph, layers=layers)
        return PartGraph(graph, tuple(change.traffic for change in changes))

    def _share(self, layer: Layer) -> float:
        source = layer.name if layer.name in self._plan.sharded else self._loss_of(layer)
        return 1.0 if source is None else self._plan.share(source)

    def _loss_of(self, layer: Layer) -> str | None:
        """Return the map whose px each member compares with targets in its own part, if the layer does that."""
        if layer.kind != OUTPUT or len(layer.inputs) != 1:
            return None
        (source,) = layer.inputs
        return source if source in self._plan.sharded and self._plan.sides[source] == self._plan.mesh.side else None

    def _change(self, layer: Layer) -> _Change:
        change, steps = _Change(), self._plan.by_node.get(layer.name)
        if steps is not None:
            for step in steps:
                if step.sums:
                    self._sum(layer, step, change.traffic)
                if step.draws_whole:
                    self._draw(layer, change)
                for source, exchange in self._plan.fetches(step):
                    self._fetch(layer, step, source, exchange, change)
        elif self._loss_of(layer) is not None:
            change.traffic.forward_sums.append(Sum(COUNT_BYTES))
            change.traffic.backward_sums.append(Sum(COUNT_BYTES))
        else:
            for name in layer.inputs:
                if name in self._plan.sharded and name not in self._gathered:
                    self._gathered.add(name)
                    self._gather(layer, name, change)
        return change

    def _sum(self, layer: Layer, step: Step, traffic: HaloTraffic) -> None:
        if step.name == layer.name:
            traffic.forward_sums.append(Sum(step.value_bytes))
            traffic.backward_sums.append(Sum(step.value_bytes))
            return
        channels = self._px_bytes(step.maps[0]) // FLOAT_BYTES
        ahead, back = norm_sums(channels)
        traffic.forward_sums.append(ahead)
        if self._graph.flows_back(layer.name):
            traffic.backward_sums.append(back)
            traffic.backward_copied += round(NORM_PASSES * layer.output_bytes * self._share(layer))

    def _draw(self, layer: Layer, change: _Change) -> None:
        """Every member draws for the whole map, and keeps the numbers of its own part."""
        drawn, own = DRAWN_COPIES * layer.output_bytes, round(layer.output_bytes * self._share(layer))
        kept = sum(size for _, size in layer.saved)
        # Neither the value nor what is kept of it is there yet.
        change.forward = max(change.forward, drawn - own - round(kept * self._share(layer)))
        change.traffic.forward_copied += drawn

    def _px_bytes(self, name: str) -> int:
        return self._graph.by_name[name].output_bytes // math.prod(self._plan.sides[name])

    def _fetch(self, layer: Layer, step: Step, name: str, exchange: Exchange, change: _Change) -> None:
        source, each, traffic = self._graph.by_name[name], self._px_bytes(name), change.traffic
        back = self._graph.flows_back(name)
        shape = next((op.convolution for op in layer.ops if op.convolution is not None), None)
        if shape is None or shape.transposed or not all(hasattr(rule, "before") for rule in step.rules):
            traffic.halos.append(Halo.of(exchange, each, back))
            self._put_together(layer, source, exchange, each, change)
            return
        # Pieces are sent in the type that is convolved.
        each = shape.batch * shape.channels_in
        each *= layer.output_bytes // (shape.batch * shape.channels_out * math.prod(shape.size_out))
        own = round(source.output_bytes * self._share(source))
        parts = self._plan.borders(step, name) if overlap_pays(own, layer.param_bytes) else [None]
        halo = Halo.of(exchange, each, back, overlapped=all(parts))
        traffic.halos.append(halo)
        change.saved.append((self._number(), halo.bytes))
        self._split(layer, [borders for borders in parts if borders], each, back, change)
        if halo.overlapped:
            return
        box, padded = exchange.boxes_px * each, exchange.padded_px * each
        wide, value = padded or box, round(layer.output_bytes * self._share(layer))
        change.forward = max(change.forward, wide, box + padded - value)
        change.backward = max(change.backward, wide * (1 + back))
        traffic.forward_copied += 2 * (box + padded)
        traffic.backward_copied += 2 * own * back + 2 * (box + padded)

    def _put_together(self, layer: Layer, source: Layer, exchange: Exchange, each: int, change: _Change) -> None:
        """Copy what a member needs of a map; a layer that saves its input keeps the copy."""
        box, padded = exchange.boxes_px * each, exchange.padded_px * each
        back, wide = self._graph.flows_back(source.name), padded or box
        if self._saves(layer, source, wide, change):
            change.forward += box if padded else 0
        else:
            change.forward += box + padded
        change.backward += (wide + (box if padded else 0)) * back
        change.traffic.forward_copied += 2 * (box + padded)
        change.traffic.backward_copied += 2 * round(source.output_bytes * self._share(source)) * back

    def _saves(self, layer: Layer, source: Layer, size: int, change: _Change) -> bool:
        """Return whether the layer saves its input, in whose place it then keeps the copy of ``size`` bytes."""
        keeps = {number for number, _ in source.output_storages}.intersection(number for number, _ in layer.saved)
        change.dropped |= keeps
        if keeps:
            change.saved.append((self._number(), size))
        return bool(keeps)

    def _split(self, layer: Layer, split: Sequence[Borders], each: int, back: bool, change: _Change) -> None:
        """Convolve a member's own part, whose boundary strips are computed twice; each halo adds a weight gradient."""
        strips = max((sum(box_px(strip.box) for strip in borders.strips) for borders in split), default=0)
        halos = max((sum(box_px(halo.box) for halo in borders.halos) for borders in split), default=0)
        most_halos = max((len(borders.halos) for borders in split), default=0)
        change.forward = strips * each
        change.backward = halos * each * (1 + back) + most_halos * layer.param_bytes
        change.traffic.forward_copied += 2 * strips * each
        change.traffic.backward_copied += 4 * halos * each
        if split:
            most = max(split, key=lambda borders: sum(box_px(strip.made) for strip in borders.strips))
            change.strips += [_strip_op(layer, strip) for strip in most.strips]

    def _gather(self, layer: Layer, name: str, change: _Change) -> None:
        """Member 0 puts a map together to compute what follows."""
        source, back = self._graph.by_name[name], self._graph.flows_back(name)
        change.traffic.halos.append(Halo.of(self._plan.gathered(name), self._px_bytes(name), back))
        size = source.output_bytes
        change.forward += 0 if self._saves(layer, source, size, change) else size
        change.backward += size * back
        change.traffic.forward_copied += 2 * size
        change.traffic.backward_copied += 2 * size * back

    def _number(self) -> int:
        self._free += 1
        return self._free

    def _part(self, layer: Layer, change: _Change) -> Layer:
        share = self._share(layer)
        casts = cast_parameters(layer)
        kept = [
            (number, size if size in casts else round(size * self._shares.get(number, share)))
            for number, size in layer.saved
            if number not in change.dropped
        ]
        return dataclasses.replace(
            layer,
            output_bytes=round(layer.output_bytes * share),
            flops=round(layer.flops * share),
            saved=(*kept, *change.saved),
            ops=(*(on_part(op, layer, share, self._shape(op.convolution, layer)) for op in layer.ops), *change.strips),
            output_storages=tuple((n, round(size * self._shares[n])) for n, size in layer.output_storages),
            forward_work=change.forward,
            backward_work=change.backward,
        )

    def _shape(self, shape: Convolution | None, layer: Layer) -> Convolution | None:
        if shape is None or layer.name not in self._plan.sharded:
            return shape
        pairs = zip(self._plan.largest(layer.name), self._plan.sides[layer.name], strict=True)
        return convolved(shape, [mine / side for mine, side in pairs])


def convolved(shape: Convolution, shares: Sequence[float]) -> Convolution:
    """Return the shape of a convolution on a part of its maps, which has these shares of their rows and columns."""
    size_in, size_out = (
        tuple(max(1, round(px * share)) for px, share in zip(sides, shares, strict=True))
        for sides in (shape.size_in, shape.size_out)
    )
    return dataclasses.replace(shape, size_in=size_in, size_out=size_out)


def _strip_op(layer: Layer, strip: PaddedBox) -> Op:
    """Return the convolution of ``layer`` for one strip of a part and for its halo."""
    op = next(op for op in layer.ops if op.convolution is not None)
    whole = op.convolution
    assert whole is not None
    size_in, size_out = (tuple(max(1, span.size) for span in box) for box in (strip.box, strip.made))
    shape = dataclasses.replace(whole, size_in=size_in, size_out=size_out)
    return on_part(op, layer, math.prod(size_out) / math.prod(whole.size_out), shape)
