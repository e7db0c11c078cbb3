"""Layers of a traced model that work on each pixel alone: activations, joins of maps, dropout, permutes and slices."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.space.rule import Window
from parallel.streaming.layer import Layer
from parallel.streaming.operation import NotTileable, Operation, Prior
from parallel.streaming.patch import narrowed

IN_PLACE = {
    operator.iadd: operator.add, operator.isub: operator.sub, operator.imul: operator.mul, operator.ipow: operator.pow,
    operator.itruediv: operator.truediv, operator.ifloordiv: operator.floordiv, operator.imod: operator.mod,
    operator.iand: operator.and_, operator.ior: operator.or_, operator.ixor: operator.xor,
    F.relu_: F.relu, F.leaky_relu_: F.leaky_relu, F.elu_: F.elu,
}  # fmt: skip
"""Functions that change their first argument, and what gives the same in new memory."""
MASK = "~mask"


def pointwise(layer: Layer) -> Operation:
    """Function or method of pixels, on a box of each map that it takes.

    Raises:
        NotTileable: the maps differ in size, or something else has rows or columns.
    """
    node, reading, dims = layer.node, layer.reading, layer.dims
    count = len(reading.shape(layer.maps[0]))
    layer.refuse_other_sizes()
    for other in node.all_input_nodes:
        value = None if other in layer.maps else reading.of(other)
        if isinstance(value, Tensor) and any(
            count - dim <= value.dim() and value.shape[dim - count] != 1 for dim in dims
        ):
            raise NotTileable(f"joins a map with {other.name}, which has rows of its own")
    target = IN_PLACE.get(node.target, node.target) if callable(node.target) else str(node.target).rstrip("_")

    def compute(given: Any) -> Any:
        args, kwargs = given.value(node.args), given.value(node.kwargs)
        if "inplace" in kwargs:
            kwargs = {**kwargs, "inplace": False}
        return target(*args, **kwargs) if callable(target) else getattr(args[0], target)(*args[1:], **kwargs)

    return Operation(compute, dims=dims, shares=target in ("to", "float", "type_as", "contiguous"))


def activation(layer: Layer) -> Operation:
    """Activation, in place only where the memory has no other user."""
    module = layer.module
    if not getattr(module, "inplace", False):
        return layer.as_called()
    return Operation(
        lambda given: module(given.patch.tensor if given.may_change else given.patch.tensor.clone()), dims=layer.dims
    )


def over_last(layer: Layer) -> Operation:
    """A linear layer, or a layer norm over the last dims."""
    if max(layer.dims) >= len(layer.shape) - len(layer.get("normalized_shape", (0,))):
        raise NotTileable("works along rows or columns")
    return layer.as_called()


def along(layer: Layer, *, shares: bool = False, default: int | None = None) -> Operation:
    """A softmax or split along one dim."""
    dim = layer.get("dim", default)
    if dim is None:
        raise NotTileable("is given no dim: pass one")
    if dim % len(layer.shape) in layer.dims:
        raise NotTileable("works along rows or columns")
    return layer.as_called(shares=shares)


def joined(layer: Layer) -> Operation:
    """``torch.cat`` of maps; where each node is computed once, of what each member has whole too, as a pooled branch
    that was resampled to the map's size."""
    reading, maps, dims = layer.reading, layer.maps, layer.dims
    for other in set(layer.node.all_input_nodes) - set(maps):
        if not reading.once or [reading.shape(other)[dim] for dim in dims] != list(layer.sides):
            raise NotTileable("joins a map with something that has no rows")
    at, tensors = layer.get("dim", 0) % len(reading.shape(maps[0])), layer.arguments["tensors"]
    if at in dims:
        raise NotTileable("joins maps along rows or columns")
    layer.refuse_other_sizes()

    def compute(given: Any) -> Tensor:
        rows, columns = next(iter(given.patches.values())).box
        cut = (rows.start, rows.size), (columns.start, columns.size)
        return torch.cat(
            [given.value(each) if each in maps else narrowed(given.value(each), dims, cut) for each in tensors], at
        )

    return Operation(compute, dims=dims)


def stacked(layer: Layer) -> Operation:
    """``torch.stack`` of maps along a new dim before rows and columns, or behind them."""
    dims = layer.dims
    if len(layer.maps) != len(set(layer.node.all_input_nodes)):
        raise NotTileable("joins a map with something that has no rows")
    layer.refuse_other_sizes()
    at = layer.get("dim", 0) % (len(layer.reading.shape(layer.maps[0])) + 1)
    return Operation(lambda given: given.run(), dims=(dims[0] + (at <= dims[0]), dims[1] + (at <= dims[1])))


def permuted(layer: Layer, order: Any = None) -> Operation:
    """Other order of dims, of which ``torch.permute`` takes a tuple, and the method numbers too."""
    if order is None:
        order = layer.get("dims")
        order = order if isinstance(order, (tuple, list)) else layer.reading.value(layer.node.args[1:])
    order = [int(dim) % len(layer.shape) for dim in order]
    rows, columns = (order.index(dim) for dim in layer.dims)
    return Operation(lambda given: given.run(), dims=(rows, columns), shares=True)


def transposed(layer: Layer) -> Operation:
    order = list(range(len(layer.shape)))
    first, second = layer.get("dim0"), layer.get("dim1")
    order[first], order[second] = order[second], order[first]
    return permuted(layer, order)


def viewed(layer: Layer) -> Operation:
    """Other dims in the place of those before rows and columns, as a channel shuffle takes."""
    before, after = layer.shape, layer.reading.shape(layer.node)
    turned = layer.dims != (len(before) - 2, len(before) - 1)
    if turned or len(after) < 3 or after[-2:] != before[-2:]:
        raise NotTileable("makes other dims of rows and columns")

    def compute(given: Any) -> Any:
        tensor = given.patch.tensor
        return tensor.reshape(*after[:-2], *tensor.shape[-2:])

    return Operation(compute, dims=(len(after) - 2, len(after) - 1), shares=True)


def indexed(layer: Layer) -> Operation:
    """Slices: of channels, and crops or strides of rows and columns; an element of what was split."""
    dims, place = layer.dims, layer.reading.value(layer.node.args[1])
    if isinstance(layer.reading.of(layer.source), (tuple, list)):
        return layer.as_called(shares=True)
    shape = layer.shape
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


def identity(layer: Layer) -> Operation:
    return Operation(lambda given: given.patch.tensor, dims=layer.dims, shares=True)


def dropout(layer: Layer) -> Operation:
    """Dropout of pixels, where it is off or each node is computed once."""
    p = layer.get("p", 0.5)
    if not layer.get("training", True) or p == 0:
        return identity(layer)
    if not layer.reading.once or not isinstance(layer.module, (nn.Dropout, type(None))):
        raise NotTileable(
            "draws a number for each px of the image, in an order that boxes do not have: set its probability to 0"
        )
    whole = torch.empty_like(layer.reading.of(layer.source))
    shape, strides = tuple(whole.shape), whole.stride()

    def draw(given: Any) -> Tensor:
        """Draw for the whole map, in the order of its memory, as torch does."""
        return F.dropout(given.patch.tensor.new_empty_strided(shape, strides).fill_(1.0), p)

    return Operation(_masked, dims=layer.dims, drawn=draw)


def dropped_channels(layer: Layer) -> Operation:
    """Dropout of whole channels: a number for each tile and channel, drawn as the layer draws them."""
    if not layer.get("training") or layer.get("p") == 0:
        return identity(layer)
    layer.refuse_turned()
    return _drawn_once(layer, (*layer.shape[:2], 1, 1), layer.get("p"), always=False)


def dropped_paths(layer: Layer) -> Operation:
    """torchvision's stochastic depth: one number for each tile, or for all, whatever its size."""
    p = layer.get("p", 0.0)
    if not layer.get("training", True) or p == 0:
        return identity(layer)
    tiles, *others = layer.shape
    return _drawn_once(layer, (tiles if layer.get("mode", "batch") == "row" else 1, *[1] * len(others)), p)


def _drawn_once(layer: Layer, shape: tuple[int, ...], p: float, always: bool = True) -> Operation:
    """Return a map times numbers without rows, zero with probability ``p``; drawn if all are zero where ``always``."""

    def draw(given: Any) -> Tensor:
        noise: Tensor = given.template.new_zeros(shape)
        if p == 1 and not always:  # torch draws no number
            return noise
        noise.bernoulli_(1.0 - p)
        return noise.div_(1.0 - p) if p < 1 else noise

    return Operation(_masked, dims=layer.dims, first=(Prior(MASK, Operation(draw), once=True),))


def _masked(given: Any) -> Tensor:
    product: Tensor = given.patch.tensor * given.prior(MASK)
    return product
