"""Reads convolutions, pools, pads, crops and resampling of a traced model: the numbers of their rules, and who computes
a box of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from parallel.space.rule import Chained, Mirrored, Resample, Rule, Transposed, Window
from parallel.streaming.local_ops import (
    convolve,
    convolve_again,
    convolve_mirrored,
    convolve_transposed,
    mirrored,
    pool_max,
    pool_mean,
    resample,
    shuffle,
)
from parallel.streaming.operation import NotTileable, Operation, Reading
from parallel.trace.patched_kernels import conv2d

Pair = tuple[int, int]
Operands = Callable[[Any], tuple[Tensor, Tensor | None]]
"""(arguments) -> weight and bias of a convolution."""


def pair(value: Any) -> Pair:
    """(rows, columns) of what torch takes as one number or two."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return (int(numbers[0]), int(numbers[-1]))


def same_pads(kernel: int, dilation: int) -> Pair:
    """(before, after) of padding='same': the odd one at the end."""
    whole = dilation * (kernel - 1)
    return whole // 2, whole - whole // 2


def windows(kernel: Any, stride: Any, padding: Any, dilation: Any, ceil: bool = False) -> tuple[Window, Window]:
    """The rule of each axis."""
    kernel, stride, dilation = pair(kernel), pair(stride), pair(dilation)
    if padding == "same":
        pads = [same_pads(kernel[axis], dilation[axis]) for axis in (0, 1)]
    else:
        each = pair(0 if padding == "valid" else padding)
        pads = [(each[axis], each[axis]) for axis in (0, 1)]
    rows, columns = (Window(kernel[axis], stride[axis], dilation[axis], *pads[axis], ceil) for axis in (0, 1))
    return rows, columns


def read_convolution(
    operands: Operands, weight_shape: torch.Size, groups: int, mode: str = "zeros", **numbers: Any
) -> Operation:
    """Args: ``operands``: weight and bias of given arguments."""
    rules = windows(weight_shape[2:], **numbers)
    each = 2.0 * weight_shape[1:].numel()
    if mode != "zeros":
        pads = mirrors(mode, [rule.before for rule in rules], [rule.after for rule in rules])
        inner = [replace(rule, before=0, after=0) for rule in rules]
        chained = Chained(pads[0], inner[0]), Chained(pads[1], inner[1])
        return Operation(
            lambda given: convolve_mirrored(given.patch, chained, *operands(given), groups),
            chained,
            fresh=True,
            flops_each=each,
        )
    return Operation(
        lambda given: convolve(given.patch, rules, *operands(given), groups),
        rules,
        again=lambda given: convolve_again(given.patch, rules, *operands(given), groups, given.stored),
        fresh=True,
        flops_each=each,
        convolution=lambda given: (*operands(given), groups),
    )


def mirrors(mode: Any, before: Sequence[int], after: Sequence[int]) -> tuple[Mirrored, Mirrored]:
    """The rule of each axis of a pad by rows and columns of the map itself."""
    if mode not in ("reflect", "replicate"):
        raise NotTileable(f"pads by {mode}, from the other end of the image: use zeros, reflect or replicate")
    rows, columns = (Mirrored(before[axis], after[axis], mode) for axis in (0, 1))
    return rows, columns


def read_transposed(operands: Operands, weight_shape: torch.Size, **numbers: Any) -> Operation:
    """As ``read_convolution``."""
    kernel, stride, padding, extra, dilation = (
        pair(value) for value in (weight_shape[2:], *(numbers[name] for name in _TRANSPOSED))
    )
    rows, columns = (
        Transposed(kernel[axis], stride[axis], dilation[axis], padding[axis], extra[axis]) for axis in (0, 1)
    )
    groups = int(numbers["groups"])
    each = 2.0 * weight_shape[0] * kernel[0] * kernel[1] / (stride[0] * stride[1] * groups)
    return Operation(
        lambda given: convolve_transposed(given.patch, (rows, columns), *operands(given), groups),
        (rows, columns),
        flops_each=each,
    )


_TRANSPOSED = ("stride", "padding", "output_padding", "dilation")


def module_convolution(module: Any, reading: Reading, node: fx.Node) -> Operation:
    numbers = {name: getattr(module, name) for name in ("stride", "padding", "dilation", "groups")}

    def operands(given: Any) -> Any:
        return module.weight, module.bias

    if isinstance(module, nn.ConvTranspose2d):
        return read_transposed(operands, module.weight.shape, **numbers, output_padding=module.output_padding)
    return read_convolution(operands, module.weight.shape, **numbers, mode=module.padding_mode)


def function_convolution(reading: Reading, node: fx.Node, transposed: bool = False) -> Operation:
    names = ("input", "weight", "bias", "stride", "padding", *(("output_padding",) if transposed else ()))
    names = (*names, *(("groups", "dilation") if transposed else ("dilation", "groups")))
    given = bound(node, names)
    weight, bias = given["weight"], given.get("bias")
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1, **({"output_padding": 0} if transposed else {})}
    numbers = {name: reading.value(given.get(name, value)) for name, value in usual.items()}
    read = read_transposed if transposed else read_convolution
    return read(lambda arguments: arguments.value((weight, bias)), torch.Size(reading.shape(weight)), **numbers)


def bound(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Arguments of a node by name."""
    return dict(zip(names, node.args, strict=False)) | dict(node.kwargs)


def max_pool(numbers: Mapping[str, Any]) -> Operation:
    if numbers.get("return_indices"):
        raise NotTileable("gives indices into the whole map")
    kernel = numbers["kernel_size"]
    rules = windows(
        kernel,
        numbers.get("stride") or kernel,
        numbers.get("padding", 0),
        numbers.get("dilation", 1),
        bool(numbers.get("ceil_mode")),
    )
    return Operation(lambda given: pool_max(given.patch, rules), rules, fresh=True)


def mean_pool(numbers: Mapping[str, Any]) -> Operation:
    kernel = numbers["kernel_size"]
    rules = windows(
        kernel, numbers.get("stride") or kernel, numbers.get("padding", 0), 1, bool(numbers.get("ceil_mode"))
    )
    counts_pads, divisor = bool(numbers.get("count_include_pad", True)), numbers.get("divisor_override")
    return Operation(lambda given: pool_mean(given.patch, rules, counts_pads, divisor), rules, fresh=True)


def pad(reading: Reading, amounts: Any, mode: str, value: float | None) -> Operation:
    amounts = [int(amount) for amount in reading.value(amounts)]
    if any(amounts[4:]):
        raise NotTileable("pads channels or tiles")
    left, right, top, bottom = (*amounts[:4], 0, 0, 0, 0)[:4]
    if mode != "constant":
        mirroring = mirrors(mode, (top, left), (bottom, right))
        return Operation(lambda given: mirrored(given.patch, mirroring), mirroring)
    rules = (Window(before=top, after=bottom), Window(before=left, after=right))
    return Operation(lambda given: given.patch.padded(value or 0.0), rules, shares=True)


def upsample(reading: Reading, node: fx.Node, numbers: Mapping[str, Any]) -> Operation:
    """``F.interpolate`` and ``nn.Upsample``."""
    mode = numbers.get("mode", "nearest")
    kinds = {"nearest": "nearest", "nearest-exact": "nearest-exact", "bilinear": "linear"}
    if mode not in kinds or numbers.get("antialias"):
        raise NotTileable(f"resamples by {mode}{', antialiased' if numbers.get('antialias') else ''}: use bilinear")
    how: Any = "corners" if numbers.get("align_corners") else kinds[mode]
    sizes = reading.shape(node)[2:]
    factor = numbers.get("scale_factor")
    factors = factor if isinstance(factor, (tuple, list)) else (factor, factor)
    if factor is None or numbers.get("recompute_scale_factor"):
        factors = (None, None)
    rows, columns = (Resample(sizes[k], None if factors[k] is None else 1.0 / factors[k], how) for k in (0, 1))
    return Operation(lambda given: resample(given.patch, (rows, columns)), (rows, columns), flops_each=200.0)


def shuffled(factor: int) -> Operation:
    rule: Rule = Transposed(factor, factor)
    return Operation(lambda given: shuffle(given.patch, factor), (rule, rule))


def unshuffled(factor: int) -> Operation:
    rule: Rule = Window(factor, factor)
    return Operation(lambda given: F.pixel_unshuffle(given.patch.tensor, factor), (rule, rule))


def of_module(read: Callable[[Mapping[str, Any]], Operation]) -> Callable[[Any, Reading, fx.Node], Operation]:
    """Reads a module by its attributes."""
    return lambda module, reading, node: read(vars(module))


def of_call(
    names: tuple[str, ...], read: Callable[[Mapping[str, Any]], Operation]
) -> Callable[[Reading, fx.Node], Operation]:
    """Reads a call by its arguments."""
    return lambda reading, node: read(reading.value({k: v for k, v in bound(node, names).items() if k != "input"}))


MAX_POOL = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
MEAN_POOL = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
UPSAMPLE = ("input", "size", "scale_factor", "mode", "align_corners", "recompute_scale_factor", "antialias")


def _upsample_call(reading: Reading, node: fx.Node) -> Operation:
    given = {name: value for name, value in bound(node, UPSAMPLE).items() if name != "input"}
    return upsample(reading, node, reading.value(given))


MODULES: dict[type[nn.Module], Callable[[Any, Reading, fx.Node], Operation]] = {
    nn.Conv2d: module_convolution,
    nn.ConvTranspose2d: module_convolution,
    nn.MaxPool2d: of_module(max_pool),
    nn.Upsample: lambda module, reading, node: upsample(reading, node, vars(module)),
    nn.UpsamplingBilinear2d: lambda module, reading, node: upsample(reading, node, vars(module)),
    nn.UpsamplingNearest2d: lambda module, reading, node: upsample(reading, node, vars(module)),
    nn.PixelShuffle: lambda module, reading, node: shuffled(module.upscale_factor),
    nn.PixelUnshuffle: lambda module, reading, node: unshuffled(module.downscale_factor),
    nn.ZeroPad2d: lambda module, reading, node: pad(reading, module.padding, "constant", 0.0),
    nn.ReflectionPad2d: lambda module, reading, node: pad(reading, module.padding, "reflect", None),
    nn.ReplicationPad2d: lambda module, reading, node: pad(reading, module.padding, "replicate", None),
    nn.ConstantPad2d: lambda module, reading, node: pad(reading, module.padding, "constant", module.value),
}

FUNCTIONS: dict[Any, Callable[[Reading, fx.Node], Operation]] = {
    torch.conv2d: function_convolution,
    conv2d: function_convolution,
    F.conv_transpose2d: functools.partial(function_convolution, transposed=True),
    F.max_pool2d: of_call(MAX_POOL, max_pool),
    torch.max_pool2d: of_call(MAX_POOL, max_pool),
    F.interpolate: _upsample_call,
    F.pad: lambda reading, node: pad(
        reading,
        bound(node, ("input", "pad", "mode", "value"))["pad"],
        bound(node, ("input", "pad", "mode", "value")).get("mode", "constant"),
        bound(node, ("input", "pad", "mode", "value")).get("value"),
    ),
    F.pixel_shuffle: lambda reading, node: shuffled(reading.value(node.args[1])),
    F.pixel_unshuffle: lambda reading, node: unshuffled(reading.value(node.args[1])),
}
"""By function, or name of a method."""
