"""Bytes that an operation moves: what bounds the time of normalisation, activation, pooling and all that joins values.

Takes an ``Op``, which knows the tensors it is given and gives; gives the bytes of its forward and of its backward pass.
The factors follow from what each operation has to read and write, were nothing kept in a cache: a batch norm in
training reads its input for the statistics and again to normalise it. No torch here.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain

from parallel.graph.layers import LayerGraph, Op

PRODUCTS = frozenset({"convolution", "addmm", "mm", "bmm", "baddbmm"})
"""Operations that arithmetic may bound."""

FREE = frozenset({"_unsafe_view", "as_strided_", "detach", "lift_fresh", "alias", "t", "transpose"})
"""They give another view of memory that is there."""

FORWARD: Mapping[str, tuple[float, float]] = {
    "native_batch_norm": (2, 1),
    "native_group_norm": (2, 1),
    "_native_batch_norm_legit": (2, 1),
}
"""Name -> how often all that is given is read, and all that it gives written; (1, 1) for others."""

BACKWARD: Mapping[str, tuple[float, float]] = {
    "native_batch_norm": (
        3,
        2,
    ),  # input and gradient twice: for the sums, then for the input's gradient, which is written
    "_native_batch_norm_legit": (3, 2),
    "native_group_norm": (3, 2),
    "native_layer_norm": (2, 1),  # a row stays in the cache
    "add": (0, 0),  # the gradient is handed on as it is
    "add_": (0, 0),
    "sub": (0, 0),
    "clone": (0, 0),
    "cat": (1, 1),
    "mean": (1, 1),
    "sum": (1, 1),
    "constant_pad_nd": (1, 1),
    "max_pool2d_with_indices": (1, 1),
    "avg_pool2d": (1, 1),
    "_adaptive_avg_pool2d": (1, 1),
    "upsample_nearest2d": (1, 1),
    "upsample_bilinear2d": (1, 1),
    "roll": (1, 1),
    "mul": (2, 1),  # both inputs read, both gradients written
    "div": (2, 1),
}
"""Likewise of the backward pass; (1, 2) for others: the gradient and what was kept are read, a gradient is written."""


def forward_bytes(op: Op) -> float:
    """Moved by the forward pass."""
    return _bytes(op, FORWARD.get(op.name, (1, 1)))


def backward_bytes(op: Op) -> float:
    """Moved by the backward pass; 0 where none follows. Not for products."""
    return _bytes(op, BACKWARD.get(op.name, (1, 2))) if op.differentiable else 0.0


def accumulated_bytes(graph: LayerGraph) -> list[float]:
    """Return, by position, the bytes that adding up the gradients of a value moves, where several layers use it."""
    uses = dict.fromkeys(graph.by_name, 0)
    for name in chain.from_iterable(layer.inputs for layer in graph.layers if layer.differentiable):
        uses[name] += 1
    return [
        3.0 * layer.output_bytes * max(uses[layer.name] - 1, 0) if layer.differentiable else 0.0
        for layer in graph.layers
    ]


def _bytes(op: Op, factors: tuple[float, float]) -> float:
    return 0.0 if op.name in FREE else factors[0] * op.read_bytes + factors[1] * op.written_bytes
