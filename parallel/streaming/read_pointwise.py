"""Reads what works on each px alone: activations, sums and joins of maps, norms with known statistics, permutes."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.space.rule import Window
from parallel.streaming.operation import NotTileable, Operation, Reading
from parallel.streaming.patch import narrowed
from parallel.streaming.read_dropout import dropout, dropped_channels, functional_dropout, identity
from parallel.streaming.read_norm import (
    batch_norm,
    functional_batch_norm,
    functional_group_norm,
    functional_instance_norm,
    group_norm,
)
from parallel.streaming.read_window import bound

ACTIVATIONS = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish,
    nn.Hardsigmoid, nn.Hardtanh, nn.Sigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Threshold,
)  # fmt: skip

FUNCTIONS = frozenset({
    F.relu, F.relu6, F.leaky_relu, F.elu, F.selu, F.gelu, F.silu, F.mish, F.hardswish, F.hardsigmoid, F.hardtanh,
    F.sigmoid, F.tanh, F.softplus, torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.log, torch.abs, torch.sqrt,
    torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.neg, torch.clamp, torch.maximum, torch.minimum,
    torch.square, torch.rsqrt, torch.addcmul,
    operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.pow, operator.iadd,
    operator.imul, operator.isub, operator.itruediv,
})  # fmt: skip

METHODS = frozenset({
    "add", "sub", "mul", "div", "neg", "pow", "sqrt", "exp", "log", "abs", "relu", "sigmoid", "tanh", "clamp", "square",
    "add_", "mul_", "sub_", "div_", "relu_", "float", "to", "type_as", "contiguous", "clone", "sigmoid_", "clamp_",
    "expand_as",
})  # fmt: skip

IN_PLACE = {operator.iadd: operator.add, operator.imul: operator.mul, operator.isub: operator.sub}
"""Functions that change their first argument, and what gives the same in new memory."""


def pointwise(reading: Reading, node: fx.Node) -> Operation:
    """What ``node`` calls, on a box of each map it takes.

    Raises:
        NotTileable: the maps differ in size, or something else has rows or columns.
    """
    maps = reading.maps(node)
    count, dims = len(reading.shape(maps[0])), reading.dims[maps[0].name]
    if any(
        (len(reading.shape(other)), reading.dims[other.name]) != (count, dims)
        or reading.sides[other.name] != reading.sides[maps[0].name]
        for other in maps[1:]
    ):
        raise NotTileable("joins maps of different sizes")
    for other in node.all_input_nodes:
        if other not in maps:
            _refuse_rows(reading, other, [dim - count for dim in dims])
    target = IN_PLACE.get(node.target, node.target) if callable(node.target) else str(node.target).rstrip("_")

    def compute(given: Any) -> Any:
        args, kwargs = given.value(node.args), given.value(node.kwargs)
        if "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        return target(*args, **kwargs) if callable(target) else getattr(args[0], target)(*args[1:], **kwargs)

    shares = target in ("to", "float", "type_as", "contiguous")
    return Operation(compute, dims=dims, shares=shares)


def _refuse_rows(reading: Reading, other: fx.Node, dims: list[int]) -> None:
    value = reading.of(other)
    if isinstance(value, Tensor) and any(-dim <= value.dim() and value.shape[dim] != 1 for dim in dims):
        raise NotTileable(f"joins a map with {other.name}, which has rows of its own")


def activation(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """In place only where nobody else uses the memory."""
    (source,) = reading.maps(node)
    if not getattr(module, "inplace", False):
        return Operation(lambda given: module(given.patch.tensor), dims=reading.dims[source.name])

    def compute(given: Any) -> Any:
        tensor = given.patch.tensor
        return module(tensor if given.may_change else tensor.clone())

    return Operation(compute, dims=reading.dims[source.name])


def over_last(reading: Reading, node: fx.Node, count: int) -> Operation:
    """What works on the last ``count`` dims of each px, such as a linear layer or a layer norm over channels."""
    (source,) = reading.maps(node)
    dims, whole = reading.dims[source.name], len(reading.shape(source))
    if max(dims) >= whole - count:
        raise NotTileable("works along rows or columns")
    return Operation(lambda given: given.run(), dims=dims)


def joined(reading: Reading, node: fx.Node) -> Operation:
    """``torch.cat`` of maps; where each node is computed once, of what each member has whole too, as a pooled branch
    that was resampled to the map's size."""
    given = bound(node, ("tensors", "dim"))
    maps = reading.maps(node)
    dims, count = reading.dims[maps[0].name], len(reading.shape(maps[0]))
    sides = reading.sides[maps[0].name]
    for other in set(node.all_input_nodes) - set(maps):
        if not reading.once or [reading.shape(other)[dim] for dim in dims] != list(sides):
            raise NotTileable("joins a map with something that has no rows")
    at = reading.value(given.get("dim", 0)) % count
    if at in dims:
        raise NotTileable("joins maps along rows or columns")
    if len({(reading.dims[m.name], reading.sides[m.name]) for m in maps}) > 1:
        raise NotTileable("joins maps of different sizes")

    def compute(arguments: Any) -> Tensor:
        rows, columns = next(iter(arguments.patches.values())).box
        cut = (rows.start, rows.size), (columns.start, columns.size)
        parts = [
            arguments.value(each) if each in maps else narrowed(arguments.value(each), dims, cut)
            for each in given["tensors"]
        ]
        return torch.cat(parts, at)

    return Operation(compute, dims=dims)


def stacked(reading: Reading, node: fx.Node) -> Operation:
    """``torch.stack`` of maps along a new dim before rows and columns, or behind them."""
    given = bound(node, ("tensors", "dim"))
    (first, *others) = reading.maps(node)
    dims, count = reading.dims[first.name], len(reading.shape(first)) + 1
    if len(others) + 1 != len(set(node.all_input_nodes)):
        raise NotTileable("joins a map with something that has no rows")
    if any((reading.dims[m.name], reading.sides[m.name]) != (dims, reading.sides[first.name]) for m in others):
        raise NotTileable("joins maps of different sizes")
    at = reading.value(given.get("dim", 0)) % count
    return Operation(lambda given: given.run(), dims=(dims[0] + (at <= dims[0]), dims[1] + (at <= dims[1])))


def along(reading: Reading, node: fx.Node, names: tuple[str, ...], usual: int, shares: bool = False) -> Operation:
    """What works along one dim, as softmax does, or splits it."""
    (source,) = reading.maps(node)
    dims, count = reading.dims[source.name], len(reading.shape(source))
    if reading.value(bound(node, names).get("dim", usual)) % count in dims:
        raise NotTileable("works along rows or columns")
    return Operation(lambda given: given.run(), dims=dims, shares=shares)


def permuted(reading: Reading, node: fx.Node, order: Any) -> Operation:
    (source,) = reading.maps(node)
    dims, count = reading.dims[source.name], len(reading.shape(source))
    order = [int(d) % count for d in order]
    return Operation(lambda given: given.run(), dims=(order.index(dims[0]), order.index(dims[1])), shares=True)


def method_permute(reading: Reading, node: fx.Node) -> Operation:
    order = reading.value(node.args[1:])
    return permuted(reading, node, order[0] if isinstance(order[0], (tuple, list)) else order)


def transposed(reading: Reading, node: fx.Node) -> Operation:
    (source,) = reading.maps(node)
    order = list(range(len(reading.shape(source))))
    first, second = (int(d) % len(order) for d in reading.value(node.args[1:3]))
    order[first], order[second] = order[second], order[first]
    return permuted(reading, node, order)


def viewed(reading: Reading, node: fx.Node) -> Operation:
    """Other dims in the place of those before rows and columns, as a channel shuffle takes."""
    (source,) = reading.maps(node)
    before, after = reading.shape(source), reading.shape(node)
    turned = reading.dims[source.name] != (len(before) - 2, len(before) - 1)
    if turned or len(after) < 3 or after[-2:] != before[-2:]:
        raise NotTileable("makes other dims of rows and columns")

    def compute(given: Any) -> Any:
        tensor = given.patch.tensor
        return tensor.reshape(*after[:-2], *tensor.shape[-2:])

    return Operation(compute, dims=(len(after) - 2, len(after) - 1), shares=True)


def indexed(reading: Reading, node: fx.Node) -> Operation:
    """Slices: of channels, and crops or strides of rows and columns; an element of what was split."""
    (source,) = reading.maps(node)
    dims, place = reading.dims[source.name], reading.value(node.args[1])
    if isinstance(reading.of(source), (tuple, list)):
        return Operation(lambda given: given.run(), dims=dims, shares=True)
    shape = reading.shape(source)
    places = list(place) if isinstance(place, tuple) else [place]
    if Ellipsis in places:
        at = places.index(Ellipsis)
        places[at : at + 1] = [slice(None)] * (len(shape) - len(places) + 1)
    places += [slice(None)] * (len(shape) - len(places))
    if len(places) != len(shape) or not all(isinstance(part, slice) for part in places):
        raise NotTileable("takes single rows, or other than by slices")
    rules = []
    for dim in dims:
        start, stop, step = places[dim].indices(shape[dim])
        if step < 1:
            raise NotTileable("turns rows round")
        rules.append(Window(stride=step, before=-start, after=stop - shape[dim]))
        places[dim] = slice(None, None, step)
    whole = tuple(places)
    return Operation(lambda given: given.patch.tensor[whole], (rules[0], rules[1]), dims, shares=True)


MODULES: dict[type[nn.Module], Callable[[Any, Reading, fx.Node], Operation]] = {
    **dict.fromkeys(ACTIVATIONS, activation),
    nn.Identity: lambda module, reading, node: identity(reading, node),
    nn.Dropout: dropout,
    nn.Dropout2d: dropped_channels,
    nn.AlphaDropout: dropout,
    nn.FeatureAlphaDropout: dropout,
    _BatchNorm: batch_norm,
    nn.GroupNorm: group_norm,
    nn.InstanceNorm2d: group_norm,
    nn.LayerNorm: lambda module, reading, node: over_last(reading, node, len(module.normalized_shape)),
    nn.Linear: lambda module, reading, node: over_last(reading, node, 1),
    nn.Softmax: lambda module, reading, node: along(reading, node, (), module.dim),
}

CALLS: dict[Any, Callable[[Reading, fx.Node], Operation]] = {
    **dict.fromkeys(FUNCTIONS | METHODS, pointwise),
    F.dropout: functional_dropout,
    F.batch_norm: functional_batch_norm,
    F.group_norm: functional_group_norm,
    F.instance_norm: functional_instance_norm,
    F.layer_norm: lambda reading, node: over_last(
        reading, node, len(reading.value(bound(node, ("input", "normalized_shape"))["normalized_shape"]))
    ),
    F.linear: lambda reading, node: over_last(reading, node, 1),
    torch.cat: joined,
    torch.concat: joined,
    torch.stack: stacked,
    torch.softmax: lambda reading, node: along(reading, node, ("input", "dim"), 0),
    F.softmax: lambda reading, node: along(reading, node, ("input", "dim"), 0),
    "softmax": lambda reading, node: along(reading, node, ("input", "dim"), 0),
    torch.chunk: lambda reading, node: along(reading, node, ("input", "chunks", "dim"), 0, shares=True),
    "chunk": lambda reading, node: along(reading, node, ("input", "chunks", "dim"), 0, shares=True),
    torch.split: lambda reading, node: along(reading, node, ("input", "split_size", "dim"), 0, shares=True),
    "split": lambda reading, node: along(reading, node, ("input", "split_size", "dim"), 0, shares=True),
    "view": viewed,
    "reshape": viewed,
    torch.reshape: viewed,
    torch.flatten: viewed,
    "flatten": viewed,
    torch.permute: lambda reading, node: permuted(reading, node, reading.value(node.args[1])),
    "permute": method_permute,
    torch.transpose: transposed,
    "transpose": transposed,
    operator.getitem: indexed,
}
"""By function, or name of a method."""
