"""Reductions of a traced model: over rows and columns, as sums over all boxes, or over other dims of each pixel."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from parallel.streaming.layer import Layer
from parallel.streaming.operation import NotTileable, Operation, Prior

MEAN, SUM = "~mean", "~sum"
KNOWN = {"input", "dim", "axis", "keepdim", "unbiased", "correction", "p", "ord"}
"""Arguments."""
MAXIMUM = "takes the largest of the whole image, which boxes do not add up: use an average pool"


def summed(layer: Layer, over: set[int], *, keep: bool, mean: bool) -> Operation:
    """Return the sum or mean over rows, columns and whatever else ``over`` holds."""
    dims, divisor = tuple(sorted(over)), _count(layer, over) if mean else 1

    def plain(x: Tensor) -> Tensor:
        total = x.sum(dims, keepdim=True) / divisor
        return total if keep else total.squeeze(dims)

    return Operation(lambda given: plain(given.patch.tensor), sums=True, dims=layer.dims, plain=plain)


def reduction(layer: Layer, kind: str) -> Operation:
    """Return a reduction over dims of one map."""
    count, dims = len(layer.shape), layer.dims
    asked = layer.get("dim", layer.get("axis"))
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
