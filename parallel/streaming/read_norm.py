"""Reads norms whose statistics are of the whole image: sums over all boxes, known before any box is normalised.

A norm is two steps: the moments of all boxes, merged, a barrier before which the norm's input is stored; and the map
normalised by them, px by px. Gradients flow back through the moments as through any sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from parallel.streaming.moments import merged, moments, normalised, share_of_moments
from parallel.streaming.operation import DIMS, ChannelNorm, NotTileable, Operation, Prior, Reading
from parallel.streaming.read_window import bound

ADVICE = (
    "its statistics are of the whole image, and it is of a kind that boxes do not know: use --norm frozen, which keeps "
    "running statistics as they are (start from --weights), or --norm layer"
)
HALVES = (torch.float16, torch.bfloat16)
MOMENTS, RUNNING = "~moments", "~running"


def batch_norm(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """Batch norm: by running statistics where they are used, else by those of the microbatch."""
    (source,) = reading.maps(node)
    joined = _joined_with_activation(module)
    if type(module).forward not in (_BatchNorm.forward, nn.SyncBatchNorm.forward) and not joined:
        raise NotTileable(ADVICE)
    if not module.training and module.track_running_stats:
        return Operation(lambda given: module(given.patch.tensor), dims=reading.dims[source.name])
    if type(module) is not nn.BatchNorm2d and not joined:
        raise NotTileable(ADVICE)
    count = _px(reading, source)
    running: tuple[Prior, ...] = ()
    if module.training and module.track_running_stats:
        running = (Prior(RUNNING, Operation(lambda given: _count_step(module, given, count)), once=True),)
    norm = _Norm(count, (0, 2, 3), module.eps, lambda _: (module.weight, module.bias), running=running)
    if joined:
        if type(module.drop) is not nn.Identity:
            raise NotTileable(
                f"drops by {type(module.drop).__name__} inside a norm, which boxes do not do: leave it out"
            )
        norm = replace(norm, then=module.act)
    return norm.operation(reading, source)


def _joined_with_activation(module: nn.Module) -> bool:
    """Whether it is timm's batch norm with an activation behind it, or one of a kind made of it."""
    kinds = [(kind.__module__, kind.__name__) for kind in type(module).__mro__]
    known = ("timm.layers.norm_act", "BatchNormAct2d")
    if known not in kinds:
        return False
    return type(module).forward is type(module).__mro__[kinds.index(known)].forward  # type: ignore[attr-defined]


def functional_batch_norm(reading: Reading, node: fx.Node) -> Operation:
    """``F.batch_norm``."""
    numbers = bound(node, ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"))
    (source,) = reading.maps(node)
    statistics = numbers.get("running_mean"), numbers.get("running_var")
    if not reading.value(numbers.get("training", False)):
        return Operation(lambda given: given.run(), dims=reading.dims[source.name])
    count, share = _px(reading, source), reading.value(numbers.get("momentum", 0.1))
    running: tuple[Prior, ...] = ()
    if statistics[0] is not None:

        def update(given: Any) -> Tensor:
            mean, variance = given.value(statistics)
            return _count(mean, variance, share, given, count)

        running = (Prior(RUNNING, Operation(update), once=True),)
    affine = numbers.get("weight"), numbers.get("bias")
    eps = reading.value(numbers.get("eps", 1e-5))
    return _Norm(count, (0, 2, 3), eps, lambda given: given.value(affine), running=running).operation(reading, source)


def group_norm(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """Group and instance norm."""
    (source,) = reading.maps(node)
    if type(module) not in (nn.GroupNorm, nn.InstanceNorm2d) or getattr(module, "track_running_stats", False):
        raise NotTileable(ADVICE)
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else reading.shape(source)[1]
    return _in_groups(reading, source, groups, module.eps, lambda _: (module.weight, module.bias))


def functional_group_norm(reading: Reading, node: fx.Node) -> Operation:
    """``F.group_norm``."""
    numbers = bound(node, ("input", "num_groups", "weight", "bias", "eps"))
    (source,) = reading.maps(node)
    affine = numbers.get("weight"), numbers.get("bias")
    groups, eps = reading.value((numbers["num_groups"], numbers.get("eps", 1e-5)))
    return _in_groups(reading, source, groups, eps, lambda given: given.value(affine))


def functional_instance_norm(reading: Reading, node: fx.Node) -> Operation:
    """``F.instance_norm``."""
    names = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    numbers = bound(node, names)
    if numbers.get("running_mean") is not None or not reading.value(numbers.get("use_input_stats", True)):
        raise NotTileable(ADVICE)
    (source,) = reading.maps(node)
    affine = numbers.get("weight"), numbers.get("bias")
    eps = reading.value(numbers.get("eps", 1e-5))
    return _in_groups(reading, source, reading.shape(source)[1], eps, lambda given: given.value(affine))


def _in_groups(
    reading: Reading, source: fx.Node, groups: int, eps: float, affine: Callable[[Any], tuple[Any, Any]]
) -> Operation:
    """Statistics of each tile and group of channels."""
    tiles, channels = reading.shape(source)[:2]

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], groups, channels // groups, *x.shape[2:])

    count = _px(reading, source) // tiles * (channels // groups)
    return _Norm(count, (2, 3, 4), eps, affine, grouped).operation(reading, source)


def _px(reading: Reading, source: fx.Node) -> int:
    """Of all tiles."""
    rows, columns = reading.sides[source.name]
    return reading.shape(source)[0] * rows * columns


def unchanged(x: Tensor) -> Tensor:
    """Return ``x``: no activation follows a norm."""
    return x


@dataclass(frozen=True)
class _Norm:
    """A map normalised.

    Attributes:
        count: numbers that go into each mean.
        over: dims of its ``view`` that they lie in.
        eps: added to the variance.
        affine: scale and shift, (channels,) or None.
        view: of the map.
        running: what counts the statistics, once.
        then: an activation.
    """

    count: int
    over: tuple[int, ...]
    eps: float
    affine: Callable[[Any], tuple[Any, Any]]
    view: Callable[[Tensor], Tensor] | None = None
    running: tuple[Prior, ...] = ()
    then: Callable[[Tensor], Tensor] = unchanged

    def operation(self, reading: Reading, source: fx.Node) -> Operation:
        if reading.dims[source.name] != DIMS or len(reading.shape(source)) != 4 or self.count < 2:
            raise NotTileable(ADVICE)
        sums = Operation(self._gather, sums=True, merge=merged, again=self._gather_again)
        priors = (Prior(MOMENTS, sums), *self.running)
        norm = ChannelNorm(self.affine, self.eps, self.then, self.count) if self.over == (0, 2, 3) else None
        return Operation(self._normalise, first=priors, flops_each=100.0, norm=norm)

    def _wide(self, x: Tensor) -> Tensor:
        x = x.float() if x.dtype in HALVES else x
        return x if self.view is None else self.view(x)

    def _gather(self, given: Any) -> Tensor:
        return moments(self._wide(given.patch.tensor), self.over)

    def _gather_again(self, given: Any) -> Tensor:
        return share_of_moments(self._wide(given.patch.tensor), given.prior(MOMENTS))

    def _normalise(self, given: Any) -> Tensor:
        x, (count, mean, squares) = self._wide(given.patch.tensor), given.prior(MOMENTS)
        mean, variance = mean.to(x.dtype), (squares / count).to(x.dtype)
        weight, bias = self.affine(given)
        if self.over == (0, 2, 3) and weight is not None and bias is not None:
            y = normalised(x, mean.flatten(), variance.flatten(), weight, bias, self.eps)
        else:
            y = ((x - mean) * (variance + self.eps).rsqrt()).reshape(given.patch.tensor.shape)
            y = y if weight is None else y * weight[:, None, None]
            y = y if bias is None else y + bias[:, None, None]
        y = y.to(given.patch.tensor.dtype)
        return y if self.then is unchanged else self.then(y)


def _count_step(module: Any, given: Any, count: int) -> Tensor:
    """Update running statistics, as the layer does."""
    with torch.no_grad():
        module.num_batches_tracked.add_(1)
    share = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    return _count(module.running_mean, module.running_var, share, given, count)


@torch.no_grad()
def _count(mean: Tensor, variance: Tensor, share: float, given: Any, count: int) -> Tensor:
    _, means, squares = given.prior(MOMENTS).flatten(1).to(mean.dtype)
    mean.mul_(1 - share).add_(means, alpha=share)
    variance.mul_(1 - share).add_(squares, alpha=share / (count - 1))
    return torch.empty(0)
