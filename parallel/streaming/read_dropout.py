"""Reads dropout: of channels and of whole paths, whose numbers are drawn once for all boxes; of px, where it is off."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from torch import Tensor, fx

from parallel.space.rule import SAME
from parallel.streaming.operation import DIMS, Operation, Prior, Reading, SpansImage
from parallel.streaming.read_window import bound

MASK = "~mask"
_DEPTH = (("p", 0.0), ("mode", "batch"), ("training", True))


def identity(reading: Reading, node: fx.Node) -> Operation:
    (source,) = reading.maps(node)
    return Operation(lambda given: given.patch.tensor, (SAME, SAME), reading.dims[source.name], shares=True)


def dropout(module: Any, reading: Reading, node: fx.Node) -> Operation:
    if not module.training or module.p == 0:
        return identity(reading, node)
    raise SpansImage(
        "draws a number for each px of the image, in an order that boxes do not have: set its probability to 0"
    )


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
        raise SpansImage("takes rows and columns as other dims than the last two of four")
    return _masked(reading, source, (*reading.shape(source)[:2], 1, 1), module.p)


def dropped_paths(reading: Reading, node: fx.Node) -> Operation:
    """torchvision's stochastic depth: one number for each tile, or for all, whatever its size."""
    given = bound(node, ("input", "p", "mode", "training"))
    p, mode, training = (reading.value(given.get(name, usual)) for name, usual in _DEPTH)
    if not training or p == 0:
        return identity(reading, node)
    (source,) = reading.maps(node)
    value = reading.of(source)
    return _masked(reading, source, (value.shape[0] if mode == "row" else 1, *[1] * (value.dim() - 1)), p)


def _masked(reading: Reading, source: fx.Node, shape: tuple[int, ...], p: float) -> Operation:
    """A map times numbers without rows, which are drawn once; zero with probability ``p``."""

    def draw(given: Any) -> Tensor:
        noise: Tensor = given.template.new_empty(shape).bernoulli_(1.0 - p)
        return noise.div_(1.0 - p) if p < 1 else noise

    return Operation(
        lambda given: given.patch.tensor * given.prior(MASK),
        dims=reading.dims[source.name],
        first=(Prior(MASK, Operation(draw), once=True),),
    )
