"""Graphs for microbatches of any number of tiles, from that of one tile, without tracing again.

Takes a ``LayerGraph``; gives one with its bytes, flops and operations scaled. What belongs to parameters stays: their
bytes, what operations read of them, and the copies of lower precision that autocast makes. Statistics that
normalisation keeps per channel are scaled too, as a graph does not tell them apart: 0.2 % of what ResNet-50 keeps at
224 px, less above.
"""

from __future__ import annotations

import dataclasses
import functools
import math

from parallel.graph.layers import Layer, LayerGraph
from parallel.graph.op import Convolution, Op

CAST = "_to_copy"
"""The operation by which autocast copies a tensor into another type."""


def with_tiles(graph: LayerGraph, tiles: int) -> LayerGraph:
    """Return ``graph``, traced with one tile, for a microbatch of ``tiles`` tiles.

    Raises:
        ValueError: ``tiles`` is not positive.
    """
    if tiles < 1:
        raise ValueError(f"a microbatch has at least one tile; got {tiles}")
    if tiles == 1:
        return graph
    if ("tiles", tiles) not in graph.remembered:
        layers = tuple(_scaled(layer, tiles) for layer in graph.layers)
        graph.remembered["tiles", tiles] = dataclasses.replace(graph, layers=layers)
    scaled: LayerGraph = graph.remembered["tiles", tiles]
    return scaled


def _scaled(layer: Layer, tiles: int) -> Layer:
    casts = cast_parameters(layer)
    saved = []
    for number, size in layer.saved:
        if size in casts:
            casts.remove(size)
            saved.append((number, size))
        else:
            saved.append((number, size * tiles))
    return dataclasses.replace(
        layer,
        output_bytes=layer.output_bytes * tiles,
        flops=layer.flops * tiles,
        saved=tuple(saved),
        ops=tuple(_scaled_op(op, _parameter_bytes(op, layer), tiles) for op in layer.ops),
        output_storages=tuple((number, size * tiles) for number, size in layer.output_storages),
        forward_work=layer.forward_work * tiles,
        backward_work=layer.backward_work * tiles,
    )


@functools.lru_cache(maxsize=1024)  # the blocks of a model repeat their operations
def _scaled_op(op: Op, fixed: int, tiles: int) -> Op:
    """Return ``op`` for ``tiles`` tiles; ``fixed`` of the bytes it reads are of parameters."""
    if _casts_parameter(op):
        return op
    shape = op.convolution
    return dataclasses.replace(
        op,
        flops=op.flops * tiles,
        read_bytes=fixed + (op.read_bytes - fixed) * tiles,
        written_bytes=op.written_bytes * tiles,
        convolution=shape and dataclasses.replace(shape, batch=shape.batch * tiles),
    )


def on_part(op: Op, layer: Layer, share: float, shape: Convolution | None) -> Op:
    """Return ``op`` of ``layer`` on a part of its maps.

    Args:
        shape: of the convolution there.
    """
    if _casts_parameter(op):
        return op
    fixed = _parameter_bytes(op, layer)
    return dataclasses.replace(
        op,
        flops=round(op.flops * share),
        read_bytes=fixed + round((op.read_bytes - fixed) * share),
        written_bytes=round(op.written_bytes * share),
        convolution=shape,
    )


def cast_parameters(layer: Layer) -> list[int]:
    """Return the bytes of the copies of parameters in lower precision that ``layer`` makes."""
    return [op.written_bytes for op in layer.ops if _casts_parameter(op)]


def _casts_parameter(op: Op) -> bool:
    return op.name == CAST and op.differentiable and not op.passes_on


def _parameter_bytes(op: Op, layer: Layer) -> int:
    """Return the bytes that ``op`` reads of parameters: known of convolutions, and of layers of one operation."""
    if op.convolution is not None:
        shape = op.convolution
        size = op.written_bytes // (shape.batch * shape.channels_out * math.prod(shape.size_out))
        return max(0, op.read_bytes - shape.batch * shape.channels_in * math.prod(shape.size_in) * size)
    return min(layer.param_bytes, op.read_bytes) if len(layer.ops) == 1 else 0
