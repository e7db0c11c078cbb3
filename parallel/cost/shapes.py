"""Shapes that a calibration times: convolutions and matrix products as nets have them, drawn at random without end.

They come in an order in which every beginning is a fair sample of the whole: a budget may cut it anywhere. Lengths are
drawn evenly in their logarithms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from parallel.graph.layers import Convolution

FLOPS = (3e7, 3e9)
"""Least and most of one product; more costs time and tells nothing new, since time grows in proportion."""
MOST_BYTES = 48e6
"""Of a product's largest tensor."""
ROUND = {"dense": 6, "pointwise": 4, "stem": 1, "depthwise": 3, "grouped": 1, "transposed": 1, "matmul": 2}
"""Kind of product -> how many are drawn in a round."""
SMALLEST = 7
"""Side of what a convolution gives, px."""

STEM = 8
"""A convolution of fewer channels is a program of its own: the first layer of a net."""

KERNELS = {
    "stem": ((3, 3), (3, 3), (5, 5), (7, 7)),
    "dense": ((3, 3),) * 10 + ((5, 5),) * 3 + ((7, 7),) * 3 + ((1, 7), (7, 1)),
    "pointwise": ((1, 1),),
    "depthwise": ((3, 3), (3, 3), (5, 5), (5, 5), (7, 7)),
    "grouped": ((3, 3),),
    "transposed": ((2, 2), (2, 2), (4, 4), (3, 3)),
}
"""Kind -> what is drawn from."""


@dataclass(frozen=True, slots=True)
class Product:
    """(rows, inner) times (inner, columns)."""

    rows: int
    inner: int
    columns: int


def kind_of(shape: Convolution) -> str:
    """Return the regression that a convolution belongs to; each program of the device has its own."""
    if shape.transposed:
        return "transposed"
    if shape.groups == 1:
        if shape.channels_in < STEM:
            return "stem"
        return "pointwise" if math.prod(shape.kernel) == 1 else "dense"
    return "depthwise" if shape.groups == shape.channels_in else "grouped"


def largest_flops(kind: str) -> float:
    """Return the most arithmetic of a convolution that is timed. Depthwise ones do little arithmetic on many bytes."""
    return FLOPS[1] / 20 if kind == "depthwise" else FLOPS[1]


def products(seed: int) -> Iterator[tuple[str, Convolution | Product]]:
    """(kind, shape), without end."""
    draw = random.Random(seed)
    # Each kind is spread evenly over the round.
    turns = sorted(((number + 0.5) / count, kind) for kind, count in ROUND.items() for number in range(count))
    while True:
        for _, kind in turns:
            yield kind, _matmul(draw) if kind == "matmul" else _convolution(draw, kind)


def _matmul(draw: random.Random) -> Product:
    while True:
        shape = Product(*(round(_log_uniform(draw, low, high)) for low, high in ((1, 2**15), (16, 4096), (2, 4096))))
        if 1e4 <= 2 * shape.rows * shape.inner * shape.columns <= FLOPS[1]:
            return shape


def _convolution(draw: random.Random, kind: str) -> Convolution:
    while True:
        shape = _drawn(draw, kind)
        largest = (
            4
            * shape.batch
            * max(shape.channels_in * math.prod(shape.size_in), shape.channels_out * math.prod(shape.size_out))
        )
        if largest <= MOST_BYTES and max(shape.size_in) <= 2048:
            return shape


def _drawn(draw: random.Random, kind: str) -> Convolution:
    kernel = draw.choice(KERNELS[kind])
    stride = draw.choice((1, 1, 1, 2))
    dilation = draw.choice((1,) * 14 + (2, 4)) if kind == "dense" and kernel == (3, 3) and stride == 1 else 1
    groups, channels_in, channels_out = 1, _channels(draw), _channels(draw)
    if kind == "stem":
        channels_in, channels_out = draw.choice((1, 3, 3, 3, 4)), min(channels_out, 128)
    elif kind == "pointwise" and stride == 2:
        channels_in = max(channels_in, 16)  # torch 2.15 writes beyond its memory in the weights' gradient of fewer
    elif kind == "depthwise":
        groups = channels_out = channels_in
    elif kind == "grouped":
        groups = round(_log_uniform(draw, 2, 64))
        channels_in = channels_out = groups * 2 ** draw.randint(2, 6)
    elif kind == "transposed":
        stride, dilation = 2, 1
    per_px = 2 * channels_in // groups * channels_out * math.prod(kernel)
    low = largest_flops(kind) * FLOPS[0] / FLOPS[1]
    px = min(_log_uniform(draw, low, largest_flops(kind)) / per_px, 1024.0**2)
    if kind == "transposed":
        px /= stride**2  # flops are counted per px that goes in
    batch = draw.choice((1, 1, 1, 1, 1, 2, 4))
    side = max(round(math.sqrt(px / batch)), SMALLEST)
    size = (side, side)
    double = (side * stride, side * stride)
    size_in, size_out = (size, double) if kind == "transposed" else (double, size)
    return Convolution(
        batch,
        channels_in,
        channels_out,
        kernel,
        (stride, stride),
        (dilation, dilation),
        groups,
        size_in,
        size_out,
        kind == "transposed",
    )


def _channels(draw: random.Random) -> int:
    """Mostly multiples of 16, sometimes of 8, seldom of nothing."""
    drawn, multiple = _log_uniform(draw, 8, 1024), draw.choice((16,) * 14 + (8,) * 5 + (1,))
    return max(round(drawn / multiple) * multiple, min(multiple, 8))


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))
