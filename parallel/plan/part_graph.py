"""The graph of a team's largest member: its part of each layer, and its exchanges with the other members.

Takes a traced graph and its region side by side (``SideBySide``); gives a graph of the same layers, so that cuts,
bytes, lifetimes and costs follow as of any other, and what each layer exchanges. Maps have the bytes of the largest
box, a convolution keeps the rows that it fetched beside its own, and lives with a padded copy where it is not taken
apart into own part and halos; other windows keep the copy that they are given. What follows the region is computed by
member 0, whole. Rows that were fetched for layers which are computed again stay on a tape meanwhile, and are not
counted there. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field

from parallel.graph.layers import OUTPUT, Convolution, Layer, LayerGraph, Op
from parallel.graph.scale import cast_parameters, on_part
from parallel.space.borders import Borders, BoundaryStrip, overlap_pays
from parallel.space.rule import Step
from parallel.space.side_by_side import Fetch, SideBySide, box_px

COUNT_BYTES = 8
"""Of the numbers that statistics are summed in."""
FLOAT_BYTES = 4
"""Of the numbers that are normalised."""
MOMENTS = 3
"""Numbers of each channel that every member gives in one message: count, mean, M2; two come back for the gradient."""
DRAWN_COPIES = 3
"""Of a whole map, while numbers are drawn for each of its px: ones, what is drawn, and their product."""
NORM_PASSES = 3
"""Times that a member's backward pass of a norm moves its part of the map beside what the layer does anywhere."""


@dataclass(frozen=True)
class Halo:
    """A piece of a map on its way, for one tile.

    Attributes:
        bytes: that the member which fetches most is sent; ``all_bytes``: all members together.
        messages: that the member is sent.
        back: gradients return.
        behind: the member computes its own part of what needs it while it travels.
    """

    bytes: int
    all_bytes: int
    messages: int
    back: bool
    behind: bool = False


@dataclass(frozen=True)
class Sum:
    """A sum over the members of a team.

    Attributes:
        bytes: that each member gives.
        gathered: members learn what each has given.
    """

    bytes: int
    gathered: bool = False


@dataclass(frozen=True)
class HaloTraffic:
    """Exchanges of a layer within a team, for one tile.

    Attributes:
        forward_sums, backward_sums: over the members.
        forward_copied, backward_copied: bytes that are read or written to put boxes together and to take them apart.
    """

    halos: tuple[Halo, ...] = ()
    forward_sums: tuple[Sum, ...] = ()
    backward_sums: tuple[Sum, ...] = ()
    forward_copied: int = 0
    backward_copied: int = 0


NO_TRAFFIC = HaloTraffic()


@dataclass(frozen=True)
class PartGraph:
    """The part of a model that the largest member computes.

    Attributes:
        graph: with the layers of the whole model.
        traffic: by position.
    """

    graph: LayerGraph
    traffic: tuple[HaloTraffic, ...]

    @property
    def halo_bytes(self) -> int:
        """Bytes of maps, and of their gradients, that the members of a team send for one tile."""
        return sum(halo.all_bytes * (1 + halo.back) for layer in self.traffic for halo in layer.halos)


def part_graph(graph: LayerGraph, side: SideBySide) -> PartGraph:
    """Return the part of ``graph``, which was traced with one tile and its loss."""
    return _Parts(graph, side).divided()


@dataclass
class _Made:
    """Changes in a layer, besides its size."""

    kept: list[tuple[int, int]] = field(default_factory=list)
    dropped: set[int] = field(default_factory=set)
    forward: int = 0
    backward: int = 0
    halos: list[Halo] = field(default_factory=list)
    sums: tuple[list[Sum], list[Sum]] = field(default_factory=lambda: ([], []))
    copied: list[int] = field(default_factory=lambda: [0, 0])
    again: list[Op] = field(default_factory=list)


class _Parts:
    def __init__(self, graph: LayerGraph, side: SideBySide) -> None:
        self._graph, self._side = graph, side
        self._members = side.mesh.grid.members
        self._shares: dict[int, float] = {}
        for layer in graph.layers:
            for number, _ in layer.output_storages:
                self._shares.setdefault(number, self._share(layer))
        self._free = 1 + max(
            (n for layer in graph.layers for n, _ in (*layer.saved, *layer.output_storages)), default=0
        )
        self._gathered: set[str] = set()

    def divided(self) -> PartGraph:
        layers, traffic = [], []
        for layer in self._graph.layers:
            made = self._exchanges(layer)
            layers.append(self._part(layer, made))
            forward, backward = map(tuple, made.sums)
            traffic.append(HaloTraffic(tuple(made.halos), forward, backward, *made.copied))
        return PartGraph(dataclasses.replace(self._graph, layers=tuple(layers)), tuple(traffic))

    def _share(self, layer: Layer) -> float:
        if layer.name in self._side.in_parts:
            return self._side.share(layer.name)
        source = self._loss_of(layer)
        return 1.0 if source is None else self._side.share(source)

    def _loss_of(self, layer: Layer) -> str | None:
        """The map whose px the members compare with targets each in its own part, where the layer does that."""
        if layer.kind != OUTPUT or len(layer.inputs) != 1:
            return None
        (source,) = layer.inputs
        parted = source in self._side.in_parts and self._side.sides[source] == self._side.mesh.side
        return source if parted else None

    def _exchanges(self, layer: Layer) -> _Made:
        made, steps = _Made(), self._side.by_node.get(layer.name)
        if steps is not None:
            for step in steps:
                self._summed(layer, step, made)
                if step.draws_whole:
                    self._drawn(layer, made)
                for fetch in self._side.fetches(step):
                    self._fetched(layer, step, fetch, made)
        elif self._loss_of(layer) is not None:
            made.sums[0].append(Sum(COUNT_BYTES))
            made.sums[1].append(Sum(COUNT_BYTES))
        else:
            for name in layer.inputs:
                if name in self._side.in_parts and name not in self._gathered:
                    self._gathered.add(name)
                    self._taken_whole(layer, self._side.gathered(name), made)
        return made

    def _summed(self, layer: Layer, step: Step, made: _Made) -> None:
        if not step.sums:
            return
        if step.name == layer.name:
            made.sums[0].append(Sum(step.value_bytes))
            made.sums[1].append(Sum(step.value_bytes))
            return
        channels = self._px_bytes(step.maps[0]) // FLOAT_BYTES
        made.sums[0].append(Sum(MOMENTS * channels * COUNT_BYTES, gathered=True))
        if self._graph.flows_back(layer.name):
            made.sums[1].append(Sum((MOMENTS - 1) * channels * COUNT_BYTES))
            made.copied[1] += round(NORM_PASSES * layer.output_bytes * self._share(layer))

    def _drawn(self, layer: Layer, made: _Made) -> None:
        """Every member draws for the whole map, and keeps the numbers of its own part."""
        drawn, own = DRAWN_COPIES * layer.output_bytes, round(layer.output_bytes * self._share(layer))
        kept = sum(size for _, size in layer.saved)
        # Neither the value nor what is kept of it is there yet.
        made.forward = max(made.forward, drawn - own - round(kept * self._share(layer)))
        made.copied[0] += drawn

    def _px_bytes(self, name: str) -> int:
        return self._graph.by_name[name].output_bytes // math.prod(self._side.sides[name])

    def _fetched(self, layer: Layer, step: Step, fetch: Fetch, made: _Made) -> None:
        source = self._graph.by_name[fetch.source]
        shape = next((op.convolution for op in layer.ops if op.convolution is not None), None)
        each = self._px_bytes(fetch.source)
        plain = shape is not None and not shape.transposed and all(hasattr(rule, "before") for rule in step.rules)
        if plain and shape is not None:  # pieces are sent in the type that is convolved
            numbers = shape.batch * shape.channels_out * math.prod(shape.size_out)
            each = shape.batch * shape.channels_in * (layer.output_bytes // numbers)
        back = self._graph.flows_back(fetch.source)
        parts: list[Borders | None] = [None]
        own = round(source.output_bytes * self._share(source))
        if plain and overlap_pays(own, layer.param_bytes):
            parts = self._side.borders(step, fetch)
        overlapped = plain and all(parts)
        halo = Halo(fetch.arriving_px * each, fetch.exchange.px * each, fetch.messages, back, overlapped)
        made.halos.append(halo)
        box, padded = fetch.boxes_px * each, fetch.padded_px * each
        wide = padded or box
        value = round(layer.output_bytes * self._share(layer))
        if plain:
            made.kept.append((self._number(), halo.bytes))
            self._taken_apart(layer, [borders for borders in parts if borders], each, back, made)
            if overlapped:
                return
        made.copied[0] += 2 * (box + padded)
        made.copied[1] += 2 * own * back
        if plain:
            made.forward = max(made.forward, wide, box + padded - value)
            made.backward = max(made.backward, wide * (1 + back))
            made.copied[1] += 2 * (box + padded)
            return
        keeps = _storages(source).intersection(number for number, _ in layer.saved)
        if keeps:
            made.dropped |= keeps
            made.kept.append((self._number(), wide))
            made.forward += box if padded else 0
        else:
            made.forward += box + padded
        made.backward += (wide + (box if padded else 0)) * back

    def _taken_apart(self, layer: Layer, apart: list[Borders], each: int, back: bool, made: _Made) -> None:
        """A convolution of a member's own part, whose boundary strips are computed again: small copies, and in the
        backward pass a gradient of the weights for each halo beside its own."""
        strips = max((sum(box_px(strip.have) for strip in borders.strips) for borders in apart), default=0)
        halos = max((sum(box_px(halo.box) for halo in borders.halos) for borders in apart), default=0)
        beside = max((len(borders.halos) for borders in apart), default=0)
        made.forward = strips * each
        made.backward = halos * each * (1 + back) + beside * layer.param_bytes
        made.copied[0] += 2 * strips * each
        made.copied[1] += 4 * halos * each
        if apart:
            most = max(apart, key=lambda borders: sum(box_px(strip.made) for strip in borders.strips))
            made.again += [_strip_op(layer, strip) for strip in most.strips]

    def _taken_whole(self, layer: Layer, fetch: Fetch, made: _Made) -> None:
        """Member 0 puts a map together to compute what follows."""
        source = self._graph.by_name[fetch.source]
        each = self._px_bytes(fetch.source)
        back = self._graph.flows_back(fetch.source)
        halo = Halo(fetch.arriving_px * each, fetch.exchange.px * each, fetch.messages, back)
        made.halos.append(halo)
        keeps = _storages(source).intersection(number for number, _ in layer.saved)
        made.dropped |= keeps
        if keeps:
            made.kept.append((self._number(), source.output_bytes))
        else:
            made.forward += source.output_bytes
        made.backward += source.output_bytes * back
        made.copied[0] += 2 * source.output_bytes
        made.copied[1] += 2 * source.output_bytes * back

    def _number(self) -> int:
        self._free += 1
        return self._free

    def _part(self, layer: Layer, made: _Made) -> Layer:
        share = self._share(layer)
        casts = cast_parameters(layer)
        kept = [
            (number, size if size in casts else round(size * self._shares.get(number, share)))
            for number, size in layer.saved
            if number not in made.dropped
        ]
        return dataclasses.replace(
            layer,
            output_bytes=round(layer.output_bytes * share),
            flops=round(layer.flops * share),
            saved=(*kept, *made.kept),
            ops=(*(on_part(op, layer, share, self._shape(op.convolution, layer)) for op in layer.ops), *made.again),
            output_storages=tuple((n, round(size * self._shares[n])) for n, size in layer.output_storages),
            forward_work=made.forward,
            backward_work=made.backward,
        )

    def _shape(self, shape: Convolution | None, layer: Layer) -> Convolution | None:
        if shape is None or layer.name not in self._side.in_parts:
            return shape
        whole, own = self._side.sides[layer.name], self._side.own(layer.name)
        parts = [mine / side for mine, side in zip(own, whole, strict=True)]
        return dataclasses.replace(
            shape,
            size_in=tuple(max(1, round(px * part)) for px, part in zip(shape.size_in, parts, strict=True)),
            size_out=tuple(max(1, round(px * part)) for px, part in zip(shape.size_out, parts, strict=True)),
        )


def _strip_op(layer: Layer, strip: BoundaryStrip) -> Op:
    """The convolution of ``layer`` for one strip of a part: forward once more than the part's own, and backward for the
    halo beside it, which reads and writes the weights as any other."""
    op = next(op for op in layer.ops if op.convolution is not None)
    whole = op.convolution
    assert whole is not None
    size_in, size_out = (tuple(max(1, span.size) for span in box) for box in (strip.have, strip.made))
    shape = dataclasses.replace(whole, size_in=size_in, size_out=size_out)
    return on_part(op, layer, math.prod(size_out) / math.prod(whole.size_out), shape)


def _storages(layer: Layer) -> set[int]:
    return {number for number, _ in layer.output_storages}
