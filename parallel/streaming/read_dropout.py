"""Reads dropout: of channels and of whole paths, whose numbers are drawn once for all boxes; of px, where it is off, or
where each node is computed once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from parallel.space.rule import SAME
from parallel.streaming.operation import DIMS, NotTileable, Operation, Prior, Reading
from parallel.streaming.read_window import bound

MASK = "~mask"
_DEPTH = (("p", 0.0), ("mode", "batch"), ("training", True))


def identity(reading: Reading, node: fx.Node) -> Operation:
    (source,) = reading.maps(node)
    return Operation(lambda given: given.patch.tensor, (SAME, SAME), reading.dims[source.name], shares=True)


def dropout(module: Any, reading: Reading, node: fx.Node) -> Operation:
    if not module.training or module.p == 0:
        return identity(reading, node)
    if reading.once and isinstance(module, (nn.Dropout, SimpleNamespace)):
        return _drawn_whole(reading, node, module.p)
    raise NotTileable(
        "draws a number for each px of the image, in an order that boxes do not have: set its probability to 0"
    )


def _drawn_whole(reading: Reading, node: fx.Node, p: float) -> Operation:
    """A map times numbers that are drawn for the whole of it: in the order of its memory, which torch draws in."""
    (source,) = reading.maps(node)
    whole = torch.empty_like(reading.of(source))
    shape, strides = tuple(whole.shape), whole.stride()

    def draw(given: Any) -> Tensor:
        ones = given.patch.tensor.new_empty_strided(shape, strides).fill_(1.0)
        return F.dropout(ones, p)

    def compute(given: Any) -> Tensor:
        product: Tensor = given.patch.tensor * given.prior(MASK)
        return product

    return Operation(compute, dims=reading.dims[source.name], drawn=draw)


def functional_dropout(reading: Reading, node: fx.Node) -> Operation:
    """``F.dropout`` where it does nothing."""
    given = reading.value({k: v for k, v in bound(node, ("input", "p", "training")).items() if k != "input"})
    return dropout(SimpleNamespace(p=given.get("p", 0.5), training=given.get("training", True)), reading, node)


def dropped_channels(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """Dropout of whole channels: a number for each tile and channel, drawn as the layer draws them."""
    (source,) = reading.maps(node)
    if not module.training or module.p == 0:
        return identity(reading, node)
    if len(reading.shape(source)) != 4 or reading.dims[source.name] != DIMS:
        raise NotTileable("takes rows and columns as other dims than the last two of four")
    return _masked(reading, source, (*reading.shape(source)[:2], 1, 1), module.p, always=False)


def dropped_paths(reading: Reading, node: fx.Node) -> Operation:
    """torchvision's stochastic depth: one number for each tile, or for all, whatever its size."""
    given = bound(node, ("input", "p", "mode", "training"))
    p, mode, training = (reading.value(given.get(name, usual)) for name, usual in _DEPTH)
    if not training or p == 0:
        return identity(reading, node)
    (source,) = reading.maps(node)
    value = reading.of(source)
    return _masked(reading, source, (value.shape[0] if mode == "row" else 1, *[1] * (value.dim() - 1)), p)


def _masked(reading: Reading, source: fx.Node, shape: tuple[int, ...], p: float, always: bool = True) -> Operation:
    """A map times numbers without rows, which are drawn once; zero with probability ``p``.

    Args:
        always: numbers are drawn even where all will be zero.
    """

    def draw(given: Any) -> Tensor:
        noise: Tensor = given.template.new_zeros(shape)
        if p == 1 and not always:  # torch draws no number
            return noise
        noise.bernoulli_(1.0 - p)
        return noise.div_(1.0 - p) if p < 1 else noise

    return Operation(
        lambda given: given.patch.tensor * given.prior(MASK),
        dims=reading.dims[source.name],
        first=(Prior(MASK, Operation(draw), once=True),),
    )
