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
from parallel.streaming.moments import HALVES, merged, moments, next_share, normalised, share_of_moments, update_running
from parallel.streaming.operation import DIMS, ChannelNorm, NotTileable, Operation, Prior

ADVICE = (
    "its statistics are of the whole image, and it is of a kind that boxes do not know: use --norm frozen, which keeps "
    "running statistics as they are (start from --weights), or --norm layer"
)
MOMENTS, RUNNING = "~moments", "~running"
CHANNELS = (0, 2, 3)
"""Dims over which batch norm adds up."""
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

    def update(of_all: Tensor, mean: Tensor, variance: Tensor) -> None:
        """Update running statistics, as the layer does."""
        update_running(of_all, mean, variance, momentum if module is None else next_share(module), count)

    affine, running = layer.operands("weight", "bias"), layer.operands("running_mean", "running_var")
    return _normalisation(
        layer,
        count,
        CHANNELS,
        None,
        ChannelNorm(affine, running, update if statistics else None, layer.get("eps", 1e-5), then, count),
    )


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
        raise NotTileable(ADVICE)
    return _in_groups(layer, nn.InstanceNorm2d, layer.shape[1])


def _in_groups(layer: Layer, kind: type[nn.Module], groups: int) -> Operation:
    """Return a norm by the statistics of each tile and group of channels."""
    if layer.module is not None and type(layer.module) is not kind:
        raise NotTileable(ADVICE)
    each = layer.shape[1] // groups

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], groups, each, *x.shape[2:])

    return _normalisation(layer, math.prod(layer.sides) * each, (2, 3, 4), grouped)


def _normalisation(
    layer: Layer, count: int, over: tuple[int, ...], view: Then | None, norm: ChannelNorm | None = None
) -> Operation:
    """Return the two steps of a norm over dims ``over``, whose means are of ``count`` numbers."""
    if layer.dims != DIMS or len(layer.shape) != 4 or count < 2:
        raise NotTileable(ADVICE)
    affine, eps = layer.operands("weight", "bias"), layer.get("eps", 1e-5)
    then = None if norm is None else norm.then

    def wide(given: Any) -> Tensor:
        x = given.patch.tensor
        x = x.float() if x.dtype in HALVES else x
        return x if view is None else view(x)

    def normalise(given: Any) -> Tensor:
        x, (total, mean, squares) = wide(given), given.prior(MOMENTS)
        mean, variance = mean.to(x.dtype), (squares / total).to(x.dtype)
        weight, bias = affine(given)
        if norm is not None and weight is not None and bias is not None:
            y = normalised(x, mean.flatten(), variance.flatten(), weight, bias, eps)
        else:
            y = ((x - mean) * (variance + eps).rsqrt()).reshape(given.patch.tensor.shape)
            y = y if weight is None else y * weight[:, None, None]
            y = y if bias is None else y + bias[:, None, None]
        y = y.to(given.patch.tensor.dtype)
        return y if then is None else then(y)

    sums = Operation(
        lambda given: moments(wide(given), over),
        sums=True,
        merge=merged,
        again=lambda given: share_of_moments(wide(given), given.prior(MOMENTS)),
    )
    first = [Prior(MOMENTS, sums)]
    if norm is not None and (update := norm.update):
        running = norm.running

        def count_once(given: Any) -> Tensor:
            update(given.prior(MOMENTS), *running(given))
            return torch.empty(0)

        first.append(Prior(RUNNING, Operation(count_once), once=True))
    return Operation(normalise, first=tuple(first), flops_each=100.0, norm=norm)
