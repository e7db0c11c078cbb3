"""A model as it is drawn or listed: its layers grouped into operations, layers, blocks or modules, and its stages.

Parts stand in the order in which they run and cover all layers once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby, pairwise
from typing import Literal, get_args

from parallel.graph.blocks import Block, find_blocks, find_modules, heavy_positions
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, values_across
from parallel.units import bytes_text

Level = Literal["op", "layer", "block", "module"]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers, or one operation of a layer.

    Attributes:
        name: unique: path of a module, or name of a layer.
        kind: class of the module, or kinds of the layers.
        scope: path of the module that is all of the part, "" where none is.
        start, stop: position in ``graph.layers`` of its first layer, and one past its last.
        flops: of its forward pass, for the traced shapes.
        saved_bytes: that autograd keeps of it for backward; memory that several layers keep counts once.
        output_bytes: of the values that others use.
        forward_s, backward_s: seconds, None where unknown.
    """

    name: str
    kind: str
    scope: str
    start: int
    stop: int
    flops: int
    param_bytes: int
    saved_bytes: int
    output_bytes: int
    forward_s: float | None = None
    backward_s: float | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds forward and backward, 0 where they are not known."""
        return (self.forward_s or 0.0) + (self.backward_s or 0.0)

    @property
    def sizes(self) -> list[str]:
        """Return, in words, the bytes of its parameters and those saved for backward, where there are any."""
        named = ((self.param_bytes, "params"), (self.saved_bytes, "saved"))
        return [f"{bytes_text(size)} {name}" for size, name in named if size]


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """``values`` go from part ``source`` to the later part ``target``, or from one stage to the next; numbers of them.

    Attributes:
        bytes: of the values, for the traced shapes; 0 for numbers such as a size.
    """

    source: int
    target: int
    values: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Parts ``first`` to ``last`` belong together: blocks of one class in one place, or the layers of one block."""

    first: int
    last: int
    label: str


@dataclass(frozen=True)
class ModelView:
    """A model as it is to be shown: its layers grouped into parts, and its stages.

    At level ``op`` the operations of a layer follow each other as they run; what passes between them inside the layer
    is not recorded, and time is known of whole layers only.

    Attributes:
        level: "op", "layer", "block" (bottlenecks, cells, levels of a U-Net) or "module" (the first level of modules).
        partition: whose stages and cuts are shown; parts are split where a cut falls inside. None: one stage, no cut.
        forward_s, backward_s: seconds of each layer.

    Raises:
        ValueError: an unknown level.
    """

    graph: LayerGraph
    level: Level = "block"
    partition: Partition | None = None
    forward_s: Sequence[float] | None = None
    backward_s: Sequence[float] | None = None
    title: str = ""

    def __post_init__(self) -> None:
        if self.level not in get_args(Level):
            raise ValueError(f"a graph is drawn by {', '.join(get_args(Level))}; got {self.level!r}")

    @property
    def stages(self) -> Partition:
        """Return the partition, or that of a single stage."""
        return self.partition or Partition(self.graph, (0,))

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Return the groups of the graph's layers, in the order in which they run."""
        if self.level == "op":
            return tuple(_operations(self.graph))
        blocks = {
            "layer": lambda: [Block(k, k + 1) for k in range(len(self.graph.layers))],
            "block": lambda: _with_ends(self.graph, find_blocks(self.graph)),
            "module": lambda: _with_ends(self.graph, find_modules(self.graph)),
        }[self.level]()
        return tuple(
            _part(self.graph, piece, name, self.forward_s, self.backward_s)
            for block, block_name in zip(blocks, _names(self.graph, blocks), strict=True)
            for piece, name in _split(block, block_name, self.stages.starts)
        )

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Return the values that pass between parts, by source and target."""
        return _links(self.graph, self.parts)

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Return the groups of parts, which do not overlap, by first part."""
        grouped = _repeats if self.level in ("block", "module") else _in_blocks
        return grouped(self.graph, self.parts)

    @cached_property
    def stage_of(self) -> list[int]:
        """Return the stage of each part."""
        return [self.stages.stage_of(self.graph.layers[part.start].name) for part in self.parts]

    @cached_property
    def stage_sums(self) -> tuple[Part, ...]:
        """Return each stage as one part."""
        bounds = pairwise([*self.stages.starts, len(self.graph.layers)])
        times = self.forward_s, self.backward_s
        return tuple(_part(self.graph, Block(*bound), f"stage {k}", *times) for k, bound in enumerate(bounds))

    @cached_property
    def cuts(self) -> dict[int, Link]:
        """Return position -> values across the cut before that layer; one that several later stages use crosses each
        cut before them."""
        links, sizes = {}, self.graph.by_name
        for stage, position in enumerate(self.stages.starts[1:]):
            values = values_across(self.graph, position)
            links[position] = Link(stage, stage + 1, values, sum(sizes[name].output_bytes for name in values))
        return links


def saved_bytes(graph: LayerGraph, positions: Iterable[int]) -> int:
    """Bytes that autograd keeps for backward of the layers at ``positions``, each piece of memory once."""
    return sum(dict(piece for position in positions for piece in graph.layers[position].saved).values())


PLAIN = ("Module", "ModuleDict", "ModuleList", "Sequential")
"""Classes that say nothing of what they hold."""

COUNTER_BYTES = 8
"""BatchNorm counts its calls in one integer; that operation is not shown."""


def _with_ends(graph: LayerGraph, blocks: list[Block]) -> list[Block]:
    inside = range(blocks[0].start, blocks[-1].stop) if blocks else range(0)
    ends = [Block(k, k + 1) for k in range(len(graph.layers)) if k not in inside]
    return sorted([*blocks, *ends], key=lambda block: block.start)


def _names(graph: LayerGraph, blocks: list[Block]) -> list[str]:
    """Return the name of each block: of its module, or of its first heavy layer; the second of a name gets a number."""
    heavy, seen, names = heavy_positions(graph), Counter[str](), []
    for block in blocks:
        main = next((k for k in range(block.start, block.stop) if k in heavy), block.start)
        layer = graph.layers[main]
        name = ".".join(block.scope) or layer.module or layer.name
        if block.stop - block.start == 1:
            name = layer.name
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name} ({seen[name]})")
    return names


def _split(block: Block, name: str, cuts: Sequence[int]) -> list[tuple[Block, str]]:
    """The block, or its pieces between cuts that fall inside."""
    ends = [block.start, *sorted({cut for cut in cuts if block.start < cut < block.stop}), block.stop]
    pieces = [Block(start, stop, block.scope) for start, stop in pairwise(ends)]
    if len(pieces) == 1:
        return [(block, name)]
    return [(piece, f"{name} [{k}/{len(pieces)}]") for k, piece in enumerate(pieces, 1)]


def _part(
    graph: LayerGraph, block: Block, name: str, forward_s: Sequence[float] | None, backward_s: Sequence[float] | None
) -> Part:
    layers = graph.layers[block.start : block.stop]
    used = {value for layer in graph.layers[block.stop :] for value in layer.inputs}
    return Part(
        name=name,
        kind=_kind(graph, block),
        scope=".".join(block.scope),
        start=block.start,
        stop=block.stop,
        flops=sum(layer.flops for layer in layers),
        param_bytes=sum(layer.param_bytes for layer in layers),
        saved_bytes=saved_bytes(graph, range(block.start, block.stop)),
        output_bytes=sum(layer.output_bytes for layer in layers if layer.name in used),
        forward_s=None if forward_s is None else sum(forward_s[block.start : block.stop]),
        backward_s=None if backward_s is None else sum(backward_s[block.start : block.stop]),
    )


def _kind(graph: LayerGraph, block: Block) -> str:
    named = graph.classes.get(".".join(block.scope)) if block.scope else None
    if named and named not in PLAIN:
        return named.lstrip("_")
    layers = [layer for layer in graph.layers[block.start : block.stop] if layer.kind != "get_attr"]
    if len(layers) <= 4:
        return ", ".join(layer.kind for layer in layers) or graph.layers[block.start].kind
    heavy = heavy_positions(graph)
    kinds = Counter(graph.layers[k].kind for k in range(block.start, block.stop) if k in heavy)
    return ", ".join(f"{count} × {kind}" if count > 1 else kind for kind, count in kinds.items())


def _operations(graph: LayerGraph) -> list[Part]:
    """A part for each operation; a layer without any, such as a view, stays."""
    parts = []
    for k, layer in enumerate(graph.layers):
        ops = [op for op in layer.ops if op.differentiable or op.written_bytes > COUNTER_BYTES]
        # Which operation uses the layer's parameters and keeps what, nobody noted: the last stands for all.
        last = _part(graph, Block(k, k + 1), layer.name, None, None)
        other = replace(last, param_bytes=0, saved_bytes=0)
        for number, op in enumerate(ops, 1):
            part = last if number == len(ops) else replace(other, output_bytes=op.written_bytes)
            name = layer.name if len(ops) == 1 else f"{layer.name} [{number}/{len(ops)}]"
            parts.append(replace(part, name=name, kind=op.name, scope=layer.scope, flops=op.flops))
        if not ops:
            parts.append(last)
    return parts


def _links(graph: LayerGraph, parts: Sequence[Part]) -> tuple[Link, ...]:
    """Return the values that pass between parts, and from operation to operation of a layer."""
    makers: dict[str, int] = {}
    values: dict[tuple[int, int], list[str]] = {}
    links = []
    for number, part in enumerate(parts):
        again = number > 0 and parts[number - 1].start == part.start
        if again:
            links.append(Link(number - 1, number, (), parts[number - 1].output_bytes))
        for layer in graph.layers[part.start : part.stop]:
            for value in () if again else layer.inputs:
                if makers[value] != number and value not in (known := values.setdefault((makers[value], number), [])):
                    known.append(value)
            makers[layer.name] = number
    links += [
        Link(source, target, tuple(names), sum(graph.by_name[name].output_bytes for name in names))
        for (source, target), names in values.items()
    ]
    return tuple(sorted(links))


def _repeats(graph: LayerGraph, parts: Sequence[Part]) -> tuple[Group, ...]:
    """Return groups of neighbours that are modules of one class, inside one module."""

    def family(number: int) -> tuple[str, str]:
        parent, _, _ = parts[number].scope.rpartition(".")
        kind = graph.classes.get(parts[number].scope, "")
        return parent, "" if kind in PLAIN and not parent else kind

    groups = []
    for (parent, kind), members in groupby(range(len(parts)), family):
        numbers = list(members)
        modules = {parts[number].scope for number in numbers}
        if kind and len(modules) > 1:
            called = parent if kind in PLAIN else kind.lstrip("_")
            groups.append(Group(numbers[0], numbers[-1], f"{len(modules)} × {called}"))
    return tuple(groups)


def _in_blocks(graph: LayerGraph, parts: Sequence[Part]) -> tuple[Group, ...]:
    blocks = _with_ends(graph, find_blocks(graph))
    groups, number = [], 0
    for block, name in zip(blocks, _names(graph, blocks), strict=True):
        first = number
        while number < len(parts) and parts[number].start < block.stop:
            number += 1
        if number - first > 1:
            groups.append(Group(first, number - 1, name))
    return tuple(groups)
