"""Convolutions, pools, pads, resampling and reductions of a traced model: rules of both axes, and their computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.rule import AdaptivePool, Chained, Mirrored, Resample, Rule, Transposed, Window
from parallel.streaming.layer import Layer
from parallel.streaming.local_ops import (
    convolve,
    convolve_again,
    convolve_mirrored,
    convolve_transposed,
    mirrored,
    pool_adaptive,
    pool_max,
    pool_mean,
    resample,
    shuffle,
)
from parallel.streaming.operation import NotTileable, Operation, Prior

MEAN, SUM = "~mean", "~sum"
KNOWN = {"input", "dim", "keepdim", "unbiased", "correction", "p", "ord"}
"""Arguments."""
MAXIMUM = "takes the largest of the whole image, which boxes do not add up: use an average pool"


def summed(layer: Layer, over: set[int], *, keep: bool, mean: bool) -> Operation:
    """Return the sum or mean over rows, columns and whatever else ``over`` holds."""
    dims, divisor = tuple(sorted(over)), _count(layer, over) if mean else 1

    def reduced(x: Tensor) -> Tensor:
        total = x.sum(dims, keepdim=True) / divisor
        return total if keep else total.squeeze(dims)

    return Operation(lambda given: reduced(given.patch.tensor), sums=True, dims=layer.dims, plain=reduced)


def reduction(layer: Layer, kind: str) -> Operation:
    """Return a reduction over dims of one map."""
    count, dims = len(layer.shape), layer.dims
    asked = layer.get("dim")
    other = {name for name in layer.arguments.keys() - KNOWN if layer.get(name) is not None}
    if other or isinstance(asked, bool):
        raise NotTileable(f"is given {', '.join(sorted(other)) or 'no dim'}, which boxes do not take: leave it out")
    over = {d % count for d in ([asked] if isinstance(asked, int) else asked if asked is not None else range(count))}
    keep = bool(layer.get("keepdim", False))
    if not over & set(dims):
        if not keep and max(over) > min(dims):
            raise NotTileable("takes dims away before rows and columns")
        shift = 0 if keep else len(over)
        return Operation(lambda given: given.run(), dims=(dims[0] - shift, dims[1] - shift))
    if not over >= set(dims):
        raise NotTileable("adds up rows or columns alone")
    if kind in ("mean", "sum"):
        return summed(layer, over, keep=keep, mean=kind == "mean")
    if kind == "norm":
        return _norm(layer, over, keep)
    if kind in ("var", "std"):
        return _spread(layer, over, keep=keep, root=kind == "std")
    raise NotTileable(MAXIMUM)


def refuse_maximum(_: Layer) -> Operation:
    """Raise the reason why a maximum over the image ends the boxes."""
    raise NotTileable(MAXIMUM)


def _norm(layer: Layer, over: set[int], keep: bool) -> Operation:
    """Return the Euclidean norm, as global response norm takes it."""
    order = layer.get("p", layer.get("ord"))
    if order not in (2, "fro", None):
        raise NotTileable(f"is a norm of order {order}: use 2")
    return _of_sums({SUM: lambda x, _: x.square()}, over, keep, _root)


def _spread(layer: Layer, over: set[int], *, keep: bool, root: bool) -> Operation:
    """Return the variance, or its root, in two sums: nothing cancels."""
    count, less = _count(layer, over), layer.get("correction", layer.get("unbiased"))
    divisor = count - (1 if less is None else int(less))
    if divisor < 1:
        raise NotTileable("divides by no numbers")
    sums = {MEAN: lambda x, _: x, SUM: lambda x, given: (x - given.prior(MEAN)).square()}
    return _of_sums(sums, over, keep, _root if root else None, {MEAN: count, SUM: divisor})


Addend = Callable[[Tensor, Any], Tensor]
"""(map, arguments of the box) -> numbers that are summed."""


def _of_sums(
    sums: dict[str, Addend],
    over: set[int],
    keep: bool,
    then: Callable[[Tensor], Tensor] | None,
    divisors: dict[str, int] | None = None,
) -> Operation:
    """Return ``then`` of the last of ``sums``, each of which may use those before it."""
    dims = tuple(sorted(over))

    def prior(suffix: str, addend: Addend) -> Prior:
        def compute(given: Any) -> Tensor:
            total = addend(given.patch.tensor, given).sum(dims, keepdim=True)
            return total / divisors[suffix] if divisors else total

        return Prior(suffix, Operation(compute, sums=True))

    def compute(given: Any) -> Tensor:
        total = given.prior(SUM) if then is None else then(given.prior(SUM))
        return total * 1 if keep else total.squeeze(dims)

    return Operation(compute, of_sums=True, first=tuple(prior(*each) for each in sums.items()))


def _root(squares: Tensor) -> Tensor:
    """Return the root; of zero it is zero, and so is its gradient, as torch has it."""
    there = squares > 0
    return torch.where(there, torch.where(there, squares, 1.0).sqrt(), 0.0)


def _count(layer: Layer, over: set[int]) -> int:
    """Return how many numbers of a map go into each sum."""
    return math.prod(layer.sides) * math.prod(layer.shape[dim] for dim in over - set(layer.dims))


Pair = tuple[int, int]


def pair(value: Any) -> Pair:
    """Return (rows, columns) of what torch takes as one number or two."""
    numbers = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return (int(numbers[0]), int(numbers[-1]))


def same_pads(kernel: int, dilation: int) -> Pair:
    """Return (before, after) of padding='same': the odd one at the end."""
    whole = dilation * (kernel - 1)
    return whole // 2, whole - whole // 2


def windows(kernel: Any, stride: Any, padding: Any, dilation: Any = 1, ceil: bool = False) -> tuple[Window, Window]:
    """Return the rule of each axis."""
    kernel, stride, dilation = pair(kernel), pair(stride), pair(dilation)
    each = (0, 0) if padding in ("same", "valid") else pair(padding)
    pads = [same_pads(kernel[k], dilation[k]) if padding == "same" else (each[k], each[k]) for k in (0, 1)]
    rows, columns = (Window(kernel[k], stride[k], dilation[k], *pads[k], ceil) for k in (0, 1))
    return rows, columns


def mirrors(mode: Any, before: Sequence[int], after: Sequence[int]) -> tuple[Mirrored, Mirrored]:
    """Return the rules of a pad by rows and columns of the map itself."""
    if mode not in ("reflect", "replicate"):
        raise NotTileable(f"pads by {mode}, from the other end of the image: use zeros, reflect or replicate")
    return Mirrored(before[0], after[0], mode), Mirrored(before[1], after[1], mode)


def convolution(layer: Layer) -> Operation:
    shape, operands, groups = layer.get("weight").shape, layer.operands("weight", "bias"), layer.get("groups", 1)
    rules = windows(shape[2:], layer.get("stride", 1), layer.get("padding", 0), layer.get("dilation", 1))
    flops, mode = 2.0 * shape[1:].numel(), layer.get("padding_mode", "zeros")
    if mode != "zeros":
        pads = mirrors(mode, [rule.before for rule in rules], [rule.after for rule in rules])
        rows, columns = (Chained(pads[k], replace(rules[k], before=0, after=0)) for k in (0, 1))
        return Operation(
            lambda given: convolve_mirrored(given.patch, (rows, columns), *operands(given), groups),
            (rows, columns),
            fresh=True,
            flops_each=flops,
        )
    return Operation(
        lambda given: convolve(given.patch, rules, *operands(given), groups),
        rules,
        again=lambda given: convolve_again(given.patch, rules, *operands(given), groups, given.stored),
        fresh=True,
        flops_each=flops,
        convolution=(operands, groups, shape.numel()),
    )


def transposed_convolution(layer: Layer) -> Operation:
    shape, operands, groups = layer.get("weight").shape, layer.operands("weight", "bias"), int(layer.get("groups", 1))
    usual = (("stride", 1), ("dilation", 1), ("padding", 0))
    numbers = [pair(shape[2:]), *(pair(layer.get(name, default)) for name, default in usual)]
    sizes = layer.reading.shape(layer.node)[2:]  # a call may ask for a size in place of the layer's output padding

    def rule(k: int) -> Transposed:
        least = Transposed(*(each[k] for each in numbers))
        return replace(least, output_padding=sizes[k] - least.out(layer.sides[k]))

    rules = rule(0), rule(1)
    stride = numbers[1][0] * numbers[1][1]
    return Operation(
        lambda given: convolve_transposed(given.patch, rules, *operands(given), groups),
        rules,
        flops_each=2.0 * shape[0] * shape[2] * shape[3] / (stride * groups),
    )


def max_pool(layer: Layer) -> Operation:
    if layer.get("return_indices"):
        raise NotTileable("gives indices into the whole map")
    kernel, ceil = layer.get("kernel_size"), bool(layer.get("ceil_mode"))
    stride = layer.get("stride") or kernel
    rules = windows(kernel, stride, layer.get("padding", 0), layer.get("dilation", 1), ceil)
    return Operation(lambda given: pool_max(given.patch, rules), rules, fresh=True)


def average_pool(layer: Layer) -> Operation:
    """Mean over the image where one window spans it, else a pool."""
    kernel, padding, divisor = layer.get("kernel_size"), layer.get("padding", 0), layer.get("divisor_override")
    whole = pair(kernel) == layer.sides and pair(padding) == (0, 0)
    if whole and not divisor and layer.reading.shape(layer.node)[-2:] == (1, 1):
        return summed(layer, set(layer.dims), keep=True, mean=True)
    rules = windows(kernel, layer.get("stride") or kernel, padding, ceil=bool(layer.get("ceil_mode")))
    return _mean_of(rules, bool(layer.get("count_include_pad", True)), divisor)


def _mean_of(rules: tuple[Window, Window], counts_pads: bool = True, divisor: int | None = None) -> Operation:
    return Operation(lambda given: pool_mean(given.patch, rules, counts_pads, divisor), rules, fresh=True)


def adaptive_pool(layer: Layer) -> Operation:
    """A pool to one cell is a mean over the image; to a number of cells that divides it, a pool."""
    wanted, sides = layer.get("output_size"), layer.sides
    wanted = wanted if isinstance(wanted, (tuple, list)) else (wanted, wanted)
    size = [sides[k] if wanted[k] is None else int(wanted[k]) for k in (0, 1)]
    if size == [1, 1]:
        return summed(layer, set(layer.dims), keep=True, mean=True)
    if any(sides[k] % size[k] for k in (0, 1)):
        cells = (AdaptivePool(size[0]), AdaptivePool(size[1]))
        return Operation(lambda given: pool_adaptive(given.patch, cells), cells, flops_each=100.0)
    kernel = [sides[k] // size[k] for k in (0, 1)]
    return _mean_of(windows(kernel, kernel, 0))


def pad(layer: Layer, mode: str | None = None) -> Operation:
    mode = mode or layer.get("mode", "constant")
    amounts = [int(amount) for amount in layer.get("pad", layer.get("padding"))]
    if any(amounts[4:]):
        raise NotTileable("pads channels or tiles")
    left, right, top, bottom = (*amounts[:4], 0, 0, 0, 0)[:4]
    if mode != "constant":
        mirroring = mirrors(mode, (top, left), (bottom, right))
        return Operation(lambda given: mirrored(given.patch, mirroring), mirroring, shares=True)
    rules, value = (Window(before=top, after=bottom), Window(before=left, after=right)), layer.get("value") or 0.0
    return Operation(lambda given: given.patch.padded(value), rules, shares=True)


def upsample(layer: Layer) -> Operation:
    mode, antialiased = layer.get("mode", "nearest"), layer.get("antialias")
    kinds = {"nearest": "nearest", "nearest-exact": "nearest-exact", "bilinear": "linear"}
    if mode not in kinds or antialiased:
        raise NotTileable(f"resamples by {mode}{', antialiased' if antialiased else ''}: use bilinear")
    how: Any = "corners" if layer.get("align_corners") else kinds[mode]
    factor, sizes = layer.get("scale_factor"), layer.reading.shape(layer.node)[2:]
    factors = factor if isinstance(factor, (tuple, list)) else (factor, factor)
    if factor is None or layer.get("recompute_scale_factor"):
        factors = (None, None)
    rows, columns = (Resample(sizes[k], None if factors[k] is None else 1.0 / factors[k], how) for k in (0, 1))
    return Operation(lambda given: resample(given.patch, (rows, columns)), (rows, columns), flops_each=200.0)


def pixel_shuffle(layer: Layer) -> Operation:
    factor = layer.get("upscale_factor")
    rule: Rule = Transposed(factor, factor)
    return Operation(lambda given: shuffle(given.patch, factor), (rule, rule))


def pixel_unshuffle(layer: Layer) -> Operation:
    factor = layer.get("downscale_factor")
    rule: Rule = Window(factor, factor)
    return Operation(lambda given: F.pixel_unshuffle(given.patch.tensor, factor), (rule, rule))
