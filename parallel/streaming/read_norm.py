"""Norms of a traced model whose statistics are of the whole image: sums over all boxes, known before any is normalised.

A norm is two steps: the moments of all boxes, merged, a barrier before which the norm's input is stored; and the map
normalised by them, pixel by pixel. Gradients flow back through the moments as through any sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.streaming.layer import Layer
from parallel.streaming.moments import (
    CHANNELS,
    Normalised,
    accumulating,
    factors_of,
    merged,
    moments,
    next_share,
    share_of_moments,
    update_running,
)
from parallel.streaming.operation import DIMS, ChannelNorm, NotTileable, Operation, Prior

ADVICE = (
    "its statistics are of the whole image, and it is of a kind that boxes do not know: use --norm frozen, which keeps "
    "running statistics as they are (start from --weights), or --norm layer"
)
MOMENTS, FACTORS, RUNNING = "~moments", "~factors", "~running"
FLOPS = 100.0
"""Of each number that is normalised."""
Then = Callable[[Tensor], Tensor]


def batch_norm(layer: Layer) -> Operation:
    """Batch norm by running statistics where they are used, else by those of the microbatch."""
    module, then = layer.module, None
    training, statistics = layer.get("training", False), layer.get("running_mean") is not None
    if module is not None:
        joined = _joined_with_activation(module)
        if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and not joined:
            raise NotTileable(ADVICE)
        training, statistics = training or not module.track_running_stats, training and module.track_running_stats
        if training and type(module) is not nn.BatchNorm2d and not joined:
            raise NotTileable(ADVICE)
        if training and joined:
            if type(module.drop) is not nn.Identity:
                drop = type(module.drop).__name__
                raise NotTileable(f"drops by {drop} inside a norm, which boxes do not do: leave it out")
            then = module.act
    if not training:
        return layer.as_called()
    count, momentum = layer.shape[0] * math.prod(layer.sides), layer.get("momentum", 0.1)
    affine, running = layer.operands("weight", "bias"), layer.operands("running_mean", "running_var")
    eps = layer.get("eps", 1e-5)

    def update(of_all: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Update running statistics, as the layer does."""
        update_running(of_all, mean, variance, momentum if module is None else next_share(module), count)

    def factors_once(given: Any) -> Tensor:
        return factors_of(given.prior(MOMENTS), affine(given)[0], eps, accumulating(given.template.dtype))

    def count_once(given: Any) -> Tensor:
        update(given.prior(MOMENTS), *running(given))
        return torch.empty(0)

    def normalise(given: Any) -> Tensor:
        factors, (weight, bias) = given.prior(FACTORS), affine(given)
        weight = torch.ones_like(factors[0]) if weight is None else weight
        bias = torch.zeros_like(factors[0]) if bias is None else bias
        y: Tensor = Normalised.apply(given.patch.tensor, given.prior(MOMENTS), factors, weight, bias, eps)
        return y if then is None else then(y)

    first = [_moments_of(layer, count, CHANNELS), Prior(FACTORS, Operation(factors_once), once=True)]
    if statistics:
        first.append(Prior(RUNNING, Operation(count_once), once=True))
    norm = ChannelNorm(affine, running, update if statistics else None, eps, then, count)
    return Operation(normalise, first=tuple(first), flops_each=FLOPS, norm=norm)


def _joined_with_activation(module: nn.Module) -> bool:
    """Return whether it is timm's batch norm with an activation behind it, or one of a kind made of it."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    known = ("timm.layers.norm_act", "BatchNormAct2d")
    if known not in kinds:
        return False
    return type(module).forward is type(module).__mro__[kinds.index(known)].forward  # type: ignore[attr-defined]


def group_norm(layer: Layer) -> Operation:
    return _in_groups(layer, nn.GroupNorm, layer.get("num_groups"))


def instance_norm(layer: Layer) -> Operation:
    if layer.get("running_mean") is not None or not layer.get("use_input_stats", True):
        raise NotTileable("keeps running statistics of each tile: set track_running_stats=False")
    return _in_groups(layer, nn.InstanceNorm2d, layer.shape[1])


def _in_groups(layer: Layer, kind: type[nn.Module], groups: int) -> Operation:
    """Return a norm by the statistics of each tile and group of channels."""
    if layer.module is not None and type(layer.module) is not kind:
        raise NotTileable(ADVICE)
    each = layer.shape[1] // groups

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], groups, each, *x.shape[2:])

    affine, eps = layer.operands("weight", "bias"), layer.get("eps", 1e-5)

    def normalise(given: Any) -> Tensor:
        x = grouped(given.patch.tensor)
        _, mean, variance = given.prior(MOMENTS).to(accumulating(x.dtype))
        weight, bias = affine(given)
        y = ((x - mean) * (variance + eps).rsqrt()).reshape(given.patch.tensor.shape)
        y = y if weight is None else y * weight[:, None, None]
        y = y if bias is None else y + bias[:, None, None]
        narrow: Tensor = y.to(x.dtype)
        return narrow

    first = _moments_of(layer, math.prod(layer.sides) * each, (2, 3, 4), grouped)
    return Operation(normalise, first=(first,), flops_each=FLOPS)


def _moments_of(layer: Layer, count: int, over: tuple[int, ...], view: Then | None = None) -> Prior:
    """Return the step before a norm over dims ``over``, whose means are of ``count`` numbers."""
    if layer.dims != DIMS or len(layer.shape) != 4 or count < 2:
        raise NotTileable(ADVICE)

    def sums(given: Any) -> Tensor:
        return moments(given.patch.tensor if view is None else view(given.patch.tensor), over)

    def again(given: Any) -> Tensor:
        x = given.patch.tensor if view is None else view(given.patch.tensor)
        return share_of_moments(x, given.prior(MOMENTS))

    return Prior(MOMENTS, Operation(sums, sums=True, merge=merged, again=again))
