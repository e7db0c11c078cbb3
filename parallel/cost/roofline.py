"""Times of layers from a data sheet, for devices that are not at hand; shapes of layers that a calibration times.

Each operation takes what its arithmetic or its bytes take, whichever is more, and a launch (Williams et al., Roofline,
CACM 2009). The bytes that an operation moves follow from what it has to read and write, were nothing kept in a cache.
How much of a device's best is attained is assumed in ``ARITHMETIC`` and ``BANDWIDTH``. These were set so that a
training step of ResNet-50, 224 px, 256 images, takes what NVIDIA publishes (DeepLearningExamples, ResNet50 v1.5 for
PyTorch, container 21.03: V100 367 images/s in float32 and 1200 in mixed precision, A100 938 in TF32 and 2470 in mixed
precision); all four come out within 10 %.

Shapes to time are convolutions and matrix products as nets have them, drawn at random without end; every beginning is a
fair sample, so a budget may cut them anywhere. Lengths are drawn evenly in their logarithms.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain

from parallel.cost.cluster import DTYPES, LAUNCH_S, DeviceSpec
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import Convolution, LayerGraph, Op

VECTOR = {"convolution": 0.85, "grouped": 0.25, "depthwise": 0.10, "matmul": 0.85}
TENSOR = {"convolution": 0.50, "grouped": 0.10, "matmul": 0.60}
ARITHMETIC: Mapping[str, Mapping[str, float]] = {
    "float32": VECTOR,
    "tf32": TENSOR | {"convolution": 0.25, "matmul": 0.50},
    "bfloat16": TENSOR,
    "float16": TENSOR,
}
"""Arithmetic -> kind of product -> attained fraction of the data sheet. Depthwise convolutions run on the vector units
whatever the type: their fraction is of float32."""

BANDWIDTH = 0.80
"""Attained fraction of the data sheet's bytes per second."""

HALF = ("bfloat16", "float16")
"""Graphs are traced in float32; mixed precision moves half of it."""


ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"
PRODUCTS = frozenset({"convolution", "addmm", "mm", "bmm", "baddbmm", ATTENTION})
"""Operations that arithmetic may bound."""

FREE = frozenset({"_unsafe_view", "as_strided_", "detach", "lift_fresh", "alias", "t", "transpose"})
"""They give another view of memory that is there."""

FORWARD: Mapping[str, tuple[float, float]] = dict.fromkeys(
    ("native_batch_norm", "native_group_norm", "_native_batch_norm_legit"), (2, 1)
)
"""Name -> how often all that is given is read, and all that it gives written; (1, 1) for others."""

BACKWARD: Mapping[str, tuple[float, float]] = {
    # Input and gradient for the sums, and again for the input's gradient.
    **dict.fromkeys(FORWARD, (3, 2)),
    "native_layer_norm": (2, 1),  # a row stays in the cache
    **dict.fromkeys(("add", "add_", "sub", "clone"), (0, 0)),  # the gradient is handed on as it is
    **dict.fromkeys(("cat", "mean", "sum", "constant_pad_nd", "roll"), (1, 1)),
    **dict.fromkeys(("max_pool2d_with_indices", "avg_pool2d", "_adaptive_avg_pool2d"), (1, 1)),
    **dict.fromkeys(("upsample_nearest2d", "upsample_bilinear2d"), (1, 1)),
    **dict.fromkeys(("mul", "div"), (2, 1)),  # both inputs read, both gradients written
}
"""Likewise of the backward pass; (1, 2) for others: the gradient and what was kept are read, a gradient is written."""


def cost_on(graph: LayerGraph, device: DeviceSpec, dtype: str = "float32") -> Costs:
    """Return the time of every layer of ``graph`` on ``device``.

    Args:
        graph: traced in float32.
        dtype: of the products; "bfloat16" and "float16" are mixed precision, activations take half their bytes.

    Raises:
        ValueError: the device has no arithmetic of this type; says which it has.
    """
    if dtype not in device.flops:
        rule = "tell one of these" if dtype in DTYPES else f"no such type; there are {', '.join(DTYPES)}"
        raise ValueError(f"{device.name} has figures for {', '.join(device.flops)}; got dtype {dtype!r}: {rule}")
    share = 0.5 if dtype in HALF else 1.0
    memory_s = share / (device.bandwidth * BANDWIDTH)
    layers = []
    for layer, accumulated in zip(graph.layers, accumulated_bytes(graph), strict=True):
        forward = backward = backward_input = 0.0
        for op in layer.ops:
            if op.name in PRODUCTS:
                once = max(op.flops / _flops_s(op, device, dtype), forward_bytes(op) * memory_s) + LAUNCH_S
                forward += once
                if op.differentiable:
                    backward += once * (1 + op.passes_on)
                    backward_input += once * op.passes_on
            elif moved := forward_bytes(op):
                forward += moved * memory_s + LAUNCH_S
                if moved := backward_bytes(op):
                    backward += moved * memory_s + LAUNCH_S
                    backward_input += moved * memory_s + LAUNCH_S
        extra = accumulated * memory_s + (LAUNCH_S if accumulated else 0.0)
        layers.append(LayerCost(forward, backward + extra, backward_input + extra))
    return Costs(tuple(layers), f"the data sheet of {device.name}, {dtype}")


def _flops_s(op: Op, device: DeviceSpec, dtype: str) -> float:
    shape = op.convolution
    if shape is None:
        return device.flops[dtype] * ARITHMETIC[dtype]["matmul"]
    if shape.groups == 1:
        return device.flops[dtype] * ARITHMETIC[dtype]["convolution"]
    if shape.groups in (shape.channels_in, shape.channels_out):
        return device.flops["float32"] * ARITHMETIC["float32"]["depthwise"]
    return device.flops[dtype] * ARITHMETIC[dtype]["grouped"]


def forward_bytes(op: Op) -> float:
    """Return the bytes that the forward pass moves."""
    return _bytes(op, FORWARD.get(op.name, (1, 1)))


def backward_bytes(op: Op) -> float:
    """Return the bytes that the backward pass moves; 0 where none follows. Not for products."""
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
        per_tile = max(shape.channels_in * math.prod(shape.size_in), shape.channels_out * math.prod(shape.size_out))
        if 4 * shape.batch * per_tile <= MOST_BYTES and max(shape.size_in) <= 2048:
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
    small, large = (side, side), (side * stride, side * stride)
    size_in, size_out = (small, large) if kind == "transposed" else (large, small)
    strides, dilations = (stride, stride), (dilation, dilation)
    return Convolution(
        batch, channels_in, channels_out, kernel, strides, dilations, groups, size_in, size_out, kind == "transposed"
    )


def _channels(draw: random.Random) -> int:
    """Mostly multiples of 16, sometimes of 8, seldom of nothing."""
    drawn, multiple = _log_uniform(draw, 8, 1024), draw.choice((16,) * 14 + (8,) * 5 + (1,))
    return max(round(drawn / multiple) * multiple, min(multiple, 8))


def _log_uniform(draw: random.Random, low: float, high: float) -> float:
    return math.exp(draw.uniform(math.log(low), math.log(high)))
