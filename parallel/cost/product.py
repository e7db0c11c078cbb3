"""Products as a regression sees them: which kind, how much arithmetic, how many bytes, what shape.

Takes an ``Op`` of a graph, or a shape of the calibration; gives ``OpWork``, the same for both. No torch here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from parallel.cost.shapes import Product, kind_of, largest_flops
from parallel.graph.layers import Convolution, Op

PASSES = ("forward", "input", "weight")
"""Of a product: forward, backward for what goes in, backward for the parameters. A matrix product without parameters
has two of the second kind, which cost about the same."""

LANES = 16
"""Channels that programs work on at once; other numbers leave part of them idle."""


@dataclass(frozen=True, slots=True)
class OpWork:
    """One product.

    Attributes:
        features: of its shape, in logarithms to base 2.
    """

    kind: str
    flops: float
    bytes: float
    features: tuple[float, ...]


def work_of(op: Op) -> OpWork | None:
    """None where arithmetic does not bound the operation."""
    if op.convolution is not None:
        shape = op.convolution
        return OpWork(
            kind_of(shape), op.flops, op.read_bytes + op.written_bytes, _convolution_features(shape, op.flops)
        )
    if op.flops:
        return OpWork(
            "matmul", op.flops, op.read_bytes + op.written_bytes, _product_features(op.flops, op.written_bytes / 4)
        )
    return None


def work_of_shape(shape: Convolution | Product, itemsize: int = 4) -> OpWork:
    """What ``work_of`` gives for the operation that the calibration ran."""
    if isinstance(shape, Product):
        flops = 2.0 * shape.rows * shape.inner * shape.columns
        numbers = shape.rows * shape.inner + shape.inner * shape.columns + shape.rows * shape.columns
        return OpWork("matmul", flops, itemsize * numbers, _product_features(flops, shape.rows * shape.columns))
    weights = shape.channels_in * shape.channels_out // shape.groups * math.prod(shape.kernel)
    px_in, px_out = math.prod(shape.size_in), math.prod(shape.size_out)
    flops = 2.0 * shape.batch * weights * (px_in if shape.transposed else px_out)
    numbers = shape.batch * (shape.channels_in * px_in + shape.channels_out * px_out) + weights
    return OpWork(kind_of(shape), flops, itemsize * numbers, _convolution_features(shape, flops))


def _product_features(flops: float, written: float) -> tuple[float, ...]:
    """Arithmetic, numbers that come out, and length of the sums."""
    return math.log2(flops), math.log2(max(written, 1.0)), math.log2(max(flops / 2 / max(written, 1.0), 1.0))


def _convolution_features(shape: Convolution, flops: float) -> tuple[float, ...]:
    """Channels of a group, groups, kernel, stride, dilation, px that come out, tiles, idle lanes.

    Of a convolution beyond those that are timed, the px are those of one just as large as the largest timed: what it
    attains is bounded, and kernel and channels stay as they are.
    """
    px = shape.batch * math.prod(shape.size_out)
    return (
        math.log2(shape.channels_in // shape.groups),
        math.log2(shape.channels_out // shape.groups),
        math.log2(shape.groups),
        math.log2(math.prod(shape.kernel)),
        math.log2(math.prod(shape.stride)),
        math.log2(math.prod(shape.dilation)),
        math.log2(px * min(1.0, largest_flops(kind_of(shape)) / flops)),
        math.log2(shape.batch),
        _idle(shape.channels_in),
        _idle(shape.channels_out),
    )


def _idle(channels: int) -> float:
    return math.log2(math.ceil(channels / LANES) * LANES / channels)
