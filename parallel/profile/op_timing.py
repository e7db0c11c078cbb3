"""Times of single operations on the device, forward and backward apart, as autograd runs them.

Each pass runs once to warm up, then several times, of which the median counts. A CPU's caches hold before each run what
they hold in a training step: what the layer before has just written, nothing of what this one kept, and the code of the
operation, which other layers use, too.
"""

from __future__ import annotations

import functools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from parallel.cost.roofline import Product
from parallel.graph.layers import Convolution, Op

LEAST_RUNS, MOST_RUNS, ENOUGH_S = 3, 5, 0.01
"""Runs of a pass after the first: at least, at most, and the time after which no more follow."""
SIDE_BY_SIDE = 8
"""Runs that an accelerator is given together, so that launching them is not what is timed."""

SWEPT = 48 << 20
"""Bytes that are read so that nothing else is in the caches; more than these hold."""
SHORT_S = 0.005
"""A pass that takes longer does not show whether its code was in the caches."""

LEAST_S = 1e-7
"""Of a backward pass, when the call is taken off."""


@dataclass(frozen=True, slots=True)
class Setting:
    """The device, type and layout (of images and of kernels of convolutions) with which operations are timed."""

    device: torch.device
    dtype: torch.dtype = torch.float32
    channels_last: bool = True

    @property
    def at_once(self) -> int:
        """Return the runs between two readings of the clock."""
        return 1 if self.device.type == "cpu" else SIDE_BY_SIDE

    def tensor(self, *shape: int) -> Tensor:
        """Return random numbers, in the layout of the setting where there are four dims."""
        values = torch.randn(shape, device=self.device, dtype=self.dtype)
        if self.channels_last and len(shape) == 4:
            return values.contiguous(memory_format=torch.channels_last)
        return values


@dataclass(frozen=True, slots=True)
class Reading:
    """Seconds of one operation: forward, backward for the gradient of what goes in, and backward for the gradients of
    the parameters alone, 0 where there are none."""

    forward_s: float
    input_s: float
    weight_s: float


def typical_s(
    run: Callable[[], object],
    setting: Setting,
    fresh: Tensor | None = None,
    other: Callable[[], object] = lambda: None,
) -> float:
    """Return the seconds of a run: the median of several.

    Args:
        fresh: what is in the caches when a run begins, and the code of the operation; None: what the run before has
            left there.
        other: the same operation on other tensors.
    """
    at_once = setting.at_once
    start = now(setting)
    run()
    is_short = now(setting) - start < SHORT_S
    seconds: list[float] = []
    while len(seconds) < LEAST_RUNS or (len(seconds) < MOST_RUNS and sum(seconds) * at_once < ENOUGH_S):
        if fresh is not None:
            sweep(setting)
            if is_short:
                other()
            fresh.add_(0)
        start = now(setting)
        for _ in range(at_once):
            run()
        seconds.append((now(setting) - start) / at_once)
    return statistics.median(seconds)


def sweep(setting: Setting) -> None:
    """Fill the caches with unused data. Those of accelerators are small compared with what layers keep."""
    if setting.device.type == "cpu":
        _swept().sum()


@functools.cache
def _swept() -> Tensor:
    return torch.zeros(SWEPT // 4)


def time_convolution(shape: Convolution, setting: Setting) -> Reading:
    """Return the times of a convolution of two dims with a kernel of its own."""
    images = setting.tensor(shape.batch, shape.channels_in, *shape.size_in)
    outer, inner = (
        (shape.channels_in, shape.channels_out) if shape.transposed else (shape.channels_out, shape.channels_in)
    )
    weight = setting.tensor(outer, inner // shape.groups, *shape.kernel)
    if shape.transposed:
        padding = [max(math.ceil((k - s) / 2), 0) for k, s in zip(shape.kernel, shape.stride, strict=True)]
        rest = [s - k + 2 * p for s, k, p in zip(shape.stride, shape.kernel, padding, strict=True)]
        run = functools.partial(F.conv_transpose2d, stride=shape.stride, padding=padding, output_padding=rest)
        return _time(run, [images, weight], setting)
    padding = [d * (k - 1) // 2 for d, k in zip(shape.dilation, shape.kernel, strict=True)]
    run = functools.partial(
        F.conv2d, stride=shape.stride, padding=padding, dilation=shape.dilation, groups=shape.groups
    )
    return _time(run, [images, weight], setting)


def time_product(shape: Product, setting: Setting) -> Reading:
    """Return the times of a linear layer."""
    rows, weight = setting.tensor(shape.rows, shape.inner), setting.tensor(shape.columns, shape.inner)
    return _time(F.linear, [rows, weight, setting.tensor(shape.columns)], setting)


@dataclass(frozen=True, slots=True)
class Moving:
    """An operation that moves bytes.

    Attributes:
        run: computes it from ``inputs`` images (n, c, h, w) and parameters.
        parameters: number of its tensors that have a value for each channel.
        backward: a backward pass follows.
        copies: autograd keeps a copy of what goes in, which graphs have as an operation of its own.
    """

    run: Callable[..., Tensor]
    inputs: int = 1
    parameters: int = 0
    backward: bool = True
    copies: bool = False


def _batch_norm(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    mean, variance = torch.zeros_like(weight), torch.ones_like(bias)
    return F.batch_norm(images, mean, variance, weight, bias, training=True)


def _layer_norm(images: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    rows = images.view(-1, images.shape[1]) if images.is_contiguous() else images.permute(0, 2, 3, 1)
    return F.layer_norm(rows, rows.shape[-1:], weight, bias)


MOVING: dict[str, Moving] = {
    "native_batch_norm": Moving(_batch_norm, parameters=2),
    "relu": Moving(F.relu),
    "relu_": Moving(torch.relu_),
    "add": Moving(torch.add, inputs=2),
    "add_": Moving(lambda images, others: images.add_(others), inputs=2),
    "cat": Moving(lambda images, others: torch.cat([images, others], 1), inputs=2),
    "max_pool2d_with_indices": Moving(lambda images: F.max_pool2d(images, 2)),
    "avg_pool2d": Moving(lambda images: F.avg_pool2d(images, 2)),
    "mean": Moving(lambda images: images.mean((2, 3), keepdim=True)),
    "upsample_nearest2d": Moving(lambda images: F.interpolate(images, scale_factor=2.0)),
    "upsample_bilinear2d": Moving(lambda images: F.interpolate(images, scale_factor=2.0, mode="bilinear")),
    "mul": Moving(lambda images, scale: images * scale.view(1, -1, 1, 1), parameters=1),
    "gelu": Moving(F.gelu),
    "silu": Moving(F.silu),
    "silu_": Moving(lambda images: F.silu(images, inplace=True), copies=True),
    "hardswish": Moving(F.hardswish),
    "hardswish_": Moving(lambda images: F.hardswish(images, inplace=True), copies=True),
    "hardtanh": Moving(F.relu6),
    "hardtanh_": Moving(lambda images: F.relu6(images, inplace=True), copies=True),
    "sigmoid": Moving(torch.sigmoid),
    "clone": Moving(torch.clone),
    "native_layer_norm": Moving(_layer_norm, parameters=2),
    "native_group_norm": Moving(lambda images, *parameters: F.group_norm(images, 8, *parameters), parameters=2),
    "_softmax": Moving(lambda images: images.softmax(-1)),
    "div_": Moving(lambda images: images.div_(0.5), backward=False),
    "bernoulli_": Moving(lambda images: images.bernoulli_(0.5), backward=False),
}
"""torch's name of an operation -> how it is run; those first that nets have most of."""


def time_moving(name: str, images: Tensor, setting: Setting) -> tuple[Op, Reading]:
    """Return the operation ``name`` on ``images`` (n, c, h, w) as a graph has it, and its times.

    Each run works on values that were just written, as those are that another layer gives. An accelerator is given
    several runs before the clock is read, each on tensors of its own.
    """
    moving, at_once = MOVING[name], setting.at_once
    parameters = [setting.tensor(images.shape[1]).requires_grad_() for _ in range(moving.parameters)]
    forward: list[float] = []
    backward: list[float] = []
    outputs, call_s = [images], empty_backward_s(setting)

    def fresh(count: int) -> list[list[Tensor]]:
        needs = moving.backward
        return [[images.detach().requires_grad_(needs).clone() for _ in range(moving.inputs)] for _ in range(count)]

    def compute(runs: list[list[Tensor]]) -> tuple[list[Tensor], list[list[Any]]]:
        wanted = [[get_gradient_edge(tensor) for tensor in run] for run in runs if moving.backward]
        return [moving.run(*run, *parameters) for run in runs], wanted

    def differentiate(outputs: list[Tensor], wanted: list[list[Any]]) -> None:
        # Normalisations give the gradients of their parameters with that of what went in, and slower without.
        for output, edges in zip(outputs, wanted, strict=True):
            torch.autograd.grad(output, [*edges, *parameters], gradient)

    while len(forward) <= LEAST_RUNS or (
        len(forward) <= MOST_RUNS and at_once * (sum(forward) + sum(backward)) < 2 * ENOUGH_S
    ):
        other = fresh(1)
        with torch.set_grad_enabled(not moving.copies):
            compute(other)
        inputs = fresh(at_once)
        with torch.set_grad_enabled(not moving.copies):
            start = now(setting)
            outputs, wanted = compute(inputs)
            forward.append((now(setting) - start) / at_once)
        if moving.copies:
            outputs, wanted = compute(fresh(at_once))
        if moving.backward:
            gradient, computed = torch.ones_like(outputs[0]), compute(fresh(1))
            sweep(setting)
            differentiate(*computed)
            gradient.fill_(1)
            empty_backward(setting.device)()
            start = now(setting)
            differentiate(outputs, wanted)
            backward.append(max((now(setting) - start) / at_once - call_s, LEAST_S))
    output = outputs[0]
    indices = 8 * output.numel() if name == "max_pool2d_with_indices" else 0
    op = Op(name, 0, moving.inputs * _bytes(images), _bytes(output) + indices)
    return op, Reading(statistics.median(forward[1:]), statistics.median(backward[1:] or [0.0]), 0.0)


def _time(operation: Callable[..., Tensor], given: list[Tensor], setting: Setting) -> Reading:
    """Return the times of ``operation`` on ``given``: what goes in, then parameters."""
    other = [tensor.clone().requires_grad_() for tensor in given]
    images, *weights = (tensor.requires_grad_() for tensor in given)

    def run() -> Tensor:
        return operation(images, *weights)

    forward_s = typical_s(run, setting, images.detach(), lambda: operation(*other))
    output, other_output = run(), operation(*other)

    def backward_s(wanted: list[Tensor], of_other: list[Tensor]) -> float:
        gradient = torch.randn_like(output)
        seconds = typical_s(
            lambda: torch.autograd.grad(output, wanted, gradient, retain_graph=True),
            setting,
            gradient,
            lambda: torch.autograd.grad(other_output, of_other, gradient, retain_graph=True),
        )
        return max(seconds - empty_backward_s(setting), LEAST_S)

    return Reading(forward_s, backward_s([images], other[:1]), backward_s(weights, other[1:]))


@functools.cache
def empty_backward(device: torch.device) -> Callable[[], object]:
    """Return a call of autograd's engine that has nothing to do. A training step makes one for all its layers, so that
    it is taken off each; called just before, it also brings the engine back into caches that a layer has swept."""
    leaf = torch.zeros(1, device=device, requires_grad=True)
    output, gradient = leaf.view(1), torch.ones(1, device=device)
    return lambda: torch.autograd.grad(output, leaf, gradient, retain_graph=True)


@functools.cache
def empty_backward_s(setting: Setting) -> float:
    """Return the seconds of ``empty_backward``."""
    return min(typical_s(empty_backward(setting.device), setting) for _ in range(LEAST_RUNS))


def _bytes(tensor: Tensor) -> int:
    """Return the bytes that graphs have, which are traced in float32 where arithmetic is in a half type."""
    return tensor.numel() * max(tensor.element_size(), 4)


def now(setting: Setting) -> float:
    """Return the seconds on the clock, once the device has done all that it was given."""
    if setting.device.type == "cuda":
        torch.cuda.synchronize(setting.device)
    return time.perf_counter()
