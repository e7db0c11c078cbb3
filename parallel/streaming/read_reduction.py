"""Reads what adds a map up: over rows and columns, which gives a sum over all boxes, or over other dims of each px."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from parallel.space.rule import Cells
from parallel.streaming.local_ops import pool_cells
from parallel.streaming.operation import NotTileable, Operation, Prior, Reading
from parallel.streaming.read_window import MEAN_POOL, bound, mean_pool, pair

MEAN, SUM = "~mean", "~sum"
KNOWN = {"dim", "axis", "keepdim", "unbiased", "correction", "p", "ord"}
"""Arguments."""
MAXIMUM = "takes the largest of the whole image, which boxes do not add up: use an average pool"


def adaptive_mean(reading: Reading, node: fx.Node, output_size: Any) -> Operation:
    """A pool to one cell is a mean over the image; to a number of cells that divides it, a pool."""
    (source,) = reading.maps(node)
    sides = reading.sides[source.name]
    wanted = output_size if isinstance(output_size, (tuple, list)) else (output_size, output_size)
    size = [sides[axis] if wanted[axis] is None else int(wanted[axis]) for axis in (0, 1)]
    if size == [1, 1]:
        return summed(reading, node, set(reading.dims[source.name]), keep=True, mean=True)
    if any(sides[axis] % size[axis] for axis in (0, 1)):
        rules = (Cells(size[0]), Cells(size[1]))
        return Operation(lambda given: pool_cells(given.patch, rules), rules, flops_each=100.0)
    return mean_pool({"kernel_size": [sides[axis] // size[axis] for axis in (0, 1)]})


def whole_or_mean_pool(reading: Reading, node: fx.Node, numbers: Mapping[str, Any]) -> Operation:
    """An average pool; a mean over the image where its only window is the whole of it."""
    (source,) = reading.maps(node)
    dims, sides = reading.dims[source.name], reading.sides[source.name]
    whole = pair(numbers["kernel_size"]) == sides and pair(numbers.get("padding") or 0) == (0, 0)
    if whole and not numbers.get("divisor_override") and reading.shape(node)[-2:] == (1, 1):
        return summed(reading, node, set(dims), keep=True, mean=True)
    return mean_pool(numbers)


def summed(reading: Reading, node: fx.Node, over: set[int], *, keep: bool, mean: bool) -> Operation:
    """The sum or mean over rows, columns and whatever else ``over`` holds."""
    (source,) = reading.maps(node)
    dims = tuple(sorted(over))
    divisor = _count(reading, source, over) if mean else 1

    def compute(given: Any) -> Tensor:
        total: Tensor = given.patch.tensor.sum(dims, keepdim=True) / divisor
        return total if keep else total.squeeze(dims)

    return Operation(compute, sums=True, dims=reading.dims[source.name])


def reduction(reading: Reading, node: fx.Node, names: tuple[str, ...], kind: str) -> Operation:
    """What is made of many numbers of one map."""
    given = reading.value({name: value for name, value in bound(node, names).items() if name != "input"})
    (source,) = reading.maps(node)
    count, dims = len(reading.shape(source)), reading.dims[source.name]
    asked = given.get("dim", given.get("axis"))
    other = {name for name, value in given.items() if value is not None} - KNOWN
    if other or isinstance(asked, bool):
        raise NotTileable(f"is given {', '.join(sorted(other)) or 'no dim'}, which boxes do not take: leave it out")
    over = {d % count for d in ([asked] if isinstance(asked, int) else asked if asked is not None else range(count))}
    keep = bool(given.get("keepdim", False))
    if not over & set(dims):
        if not keep and max(over) > min(dims):
            raise NotTileable("takes dims away before rows and columns")
        shift = 0 if keep else len(over)
        return Operation(lambda given: given.run(), dims=(dims[0] - shift, dims[1] - shift))
    if not over >= set(dims):
        raise NotTileable("adds up rows or columns alone")
    if kind in ("mean", "sum"):
        return summed(reading, node, over, keep=keep, mean=kind == "mean")
    if kind == "norm":
        return _norm(given, over, keep)
    if kind in ("var", "std"):
        return _spread(reading, source, given, over, keep=keep, root=kind == "std")
    raise NotTileable(MAXIMUM)


def _norm(numbers: Mapping[str, Any], over: set[int], keep: bool) -> Operation:
    """The Euclidean norm, as global response norm takes it."""
    order = numbers.get("p", numbers.get("ord"))
    if order not in (2, "fro", None):
        raise NotTileable(f"is a norm of order {order}: use 2")
    dims = tuple(sorted(over))

    def squares(given: Any) -> Tensor:
        total: Tensor = given.patch.tensor.square().sum(dims, keepdim=True)
        return total

    return _of_sums(lambda given: _root(given.prior(SUM)), (Prior(SUM, Operation(squares, sums=True)),), dims, keep)


def _spread(
    reading: Reading, source: fx.Node, numbers: Mapping[str, Any], over: set[int], *, keep: bool, root: bool
) -> Operation:
    """Variance, or its root, in two sums: nothing cancels."""
    count, dims = _count(reading, source, over), tuple(sorted(over))
    less = numbers.get("correction", numbers.get("unbiased"))
    divisor = count - (1 if less is None else int(less))
    if divisor < 1:
        raise NotTileable("divides by no numbers")

    def mean(given: Any) -> Tensor:
        total: Tensor = given.patch.tensor.sum(dims, keepdim=True) / count
        return total

    def squares(given: Any) -> Tensor:
        total: Tensor = (given.patch.tensor - given.prior(MEAN)).square().sum(dims, keepdim=True) / divisor
        return total

    sums = (Prior(MEAN, Operation(mean, sums=True)), Prior(SUM, Operation(squares, sums=True)))
    return _of_sums(lambda given: _root(given.prior(SUM)) if root else given.prior(SUM), sums, dims, keep)


def _of_sums(compute: Callable[[Any], Tensor], sums: tuple[Prior, ...], dims: tuple[int, ...], keep: bool) -> Operation:
    return Operation(
        lambda given: compute(given) * 1 if keep else compute(given).squeeze(dims), of_sums=True, first=sums
    )


def _root(squares: Tensor) -> Tensor:
    """Of nothing: zero, and so is its gradient, as torch has it."""
    there = squares > 0
    return torch.where(there, torch.where(there, squares, 1.0).sqrt(), 0.0)


def _count(reading: Reading, source: fx.Node, over: set[int]) -> int:
    """Numbers of a map that go into each sum."""
    shape, dims, sides = reading.shape(source), reading.dims[source.name], reading.sides[source.name]
    count = sides[0] * sides[1]
    for dim in over - set(dims):
        count *= shape[dim]
    return count


def refuse_maximum(*_: Any) -> Operation:
    """Raise the reason why a maximum over the image ends the boxes."""
    raise NotTileable(MAXIMUM)


def _pool_call(reading: Reading, node: fx.Node) -> Operation:
    numbers = {name: value for name, value in bound(node, MEAN_POOL).items() if name != "input"}
    return whole_or_mean_pool(reading, node, reading.value(numbers))


MODULES: dict[type[nn.Module], Callable[[Any, Reading, fx.Node], Operation]] = {
    nn.AvgPool2d: lambda module, reading, node: whole_or_mean_pool(reading, node, vars(module)),
    nn.AdaptiveAvgPool2d: lambda module, reading, node: adaptive_mean(reading, node, module.output_size),
    nn.AdaptiveMaxPool2d: refuse_maximum,
}

POOLS: dict[Any, Callable[[Reading, fx.Node], Operation]] = {
    F.avg_pool2d: _pool_call,
    F.adaptive_avg_pool2d: lambda reading, node: adaptive_mean(
        reading, node, reading.value(bound(node, ("input", "output_size"))["output_size"])
    ),
    F.adaptive_max_pool2d: refuse_maximum,
}
"""By function."""

_USUAL, _SPREAD = ("input", "dim", "keepdim"), ("input", "dim", "unbiased", "keepdim")
_NORM = ("input", "p", "dim", "keepdim")

REDUCTIONS: dict[Any, Callable[[Reading, fx.Node], Operation]] = {
    call: functools.partial(reduction, names=names, kind=kind)
    for kind, names, calls in (
        ("mean", _USUAL, (torch.mean, "mean")),
        ("sum", _USUAL, (torch.sum, "sum")),
        ("var", _SPREAD, (torch.var, "var")),
        ("std", _SPREAD, (torch.std, "std")),
        ("norm", _NORM, (torch.norm, torch.linalg.vector_norm, "norm")),
        ("max", _USUAL, (torch.amax, torch.amin, "amax", "amin")),
    )
    for call in calls
}
"""By function, or name of a method: what takes maps whose rows and columns are any dims."""
