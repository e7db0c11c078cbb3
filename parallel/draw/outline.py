"""A model's graph with its layers put together into parts: what tables and pictures of a model are made from.

Made by ``coarsen``; plain data. Parts stand in the order in which they run and cover all layers once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from parallel.graph.layers import LayerGraph

Level = Literal["op", "layer", "block", "module"]


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive layers, or one operation of a layer.

    Attributes:
        name: unique: path of a module, or name of a layer.
        kind: class of the module, or kinds of the layers.
        scope: path of the module that is all of the part, "" where none is.
        start: position in ``graph.layers`` of its first layer.
        stop: one past its last layer.
        flops: of its forward pass, for the traced shapes.
        param_bytes: of the parameters it uses.
        saved_bytes: that autograd keeps of it for backward; memory that several layers keep counts once.
        output_bytes: of the values that others use.
        forward_s: seconds, None where unknown; ``backward_s`` likewise.
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


@dataclass(frozen=True, slots=True, order=True)
class Link:
    """``values`` go from part ``source`` to the later part ``target``; numbers of parts.

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
class Outline:
    """A graph at one granularity.

    Attributes:
        graph: what the parts are of.
        links: between parts, by source and target.
        groups: by first part; they do not overlap.
    """

    graph: LayerGraph
    level: Level
    parts: tuple[Part, ...]
    links: tuple[Link, ...]
    groups: tuple[Group, ...]


def saved_bytes(graph: LayerGraph, positions: Iterable[int]) -> int:
    """Bytes that autograd keeps for backward of the layers at ``positions``, each piece of memory once."""
    return sum(dict(piece for position in positions for piece in graph.layers[position].saved).values())


def seconds_of(seconds: Sequence[float] | None, start: int, stop: int) -> float | None:
    """Sum over layers ``start`` to ``stop``; None where nothing is known."""
    return None if seconds is None else sum(seconds[start:stop])
