"""Reads norms whose statistics are of the whole image: sums over all boxes, known before any box is normalised.

A norm is two steps: the moments of all boxes, merged, a barrier before which the norm's input is stored; and the map
normalised by them, px by px. Gradients flow back through the moments as through any sum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.streaming.moments import merged, moments, normalised, share_of_moments
from parallel.streaming.operation import DIMS, Operation, Prior, Reading, SpansImage

ADVICE = (
    "its statistics are of the whole image, and it is of a kind that boxes do not know: use --norm frozen, which keeps "
    "running statistics as they are (start from --weights), or --norm layer"
)
MOMENTS, RUNNING = "~moments", "~running"


def batch_norm(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """Batch norm: by running statistics where they are used, else by those of the microbatch."""
    (source,) = reading.maps(node)
    if not module.training and module.track_running_stats:
        return Operation(lambda given: given.run(), dims=reading.dims[source.name])
    if type(module) is not nn.BatchNorm2d:
        raise SpansImage(ADVICE)
    count = reading.shape(source)[0] * reading.sides[source.name][0] * reading.sides[source.name][1]
    running: tuple[Prior, ...] = ()
    if module.training and module.track_running_stats:
        running = (Prior(RUNNING, Operation(lambda given: _count(module, given, count)), once=True),)
    return _normalised(module, reading, source, count, lambda x: x, (0, 2, 3), running)


def group_norm(module: Any, reading: Reading, node: fx.Node) -> Operation:
    """Group and instance norm."""
    (source,) = reading.maps(node)
    if type(module) not in (nn.GroupNorm, nn.InstanceNorm2d) or getattr(module, "track_running_stats", False):
        raise SpansImage(ADVICE)
    channels = reading.shape(source)[1]
    groups = module.num_groups if isinstance(module, nn.GroupNorm) else channels
    count = channels // groups * reading.sides[source.name][0] * reading.sides[source.name][1]

    def grouped(x: Tensor) -> Tensor:
        return x.reshape(x.shape[0], groups, channels // groups, *x.shape[2:])

    return _normalised(module, reading, source, count, grouped, (2, 3, 4), ())


def _normalised(
    module: Any,
    reading: Reading,
    source: fx.Node,
    count: int,
    view: Callable[[Tensor], Tensor],
    over: tuple[int, ...],
    running: tuple[Prior, ...],
) -> Operation:
    """The map normalised over ``over``, dims of its ``view``, which hold ``count`` numbers each time."""
    if reading.dims[source.name] != DIMS or len(reading.shape(source)) != 4 or count < 2:
        raise SpansImage(ADVICE)

    def wide(x: Tensor) -> Tensor:
        return view(x.float() if x.dtype in (torch.float16, torch.bfloat16) else x)

    def gather(given: Any) -> Tensor:
        return moments(wide(given.patch.tensor), over)

    def gather_again(given: Any) -> Tensor:
        return share_of_moments(wide(given.patch.tensor), given.prior(MOMENTS))

    def normalise(given: Any) -> Tensor:
        value: Tensor = given.patch.tensor
        x, (count, mean, squares) = wide(value), given.prior(MOMENTS)
        mean, variance = mean.to(x.dtype), (squares / count).to(x.dtype)
        if over == (0, 2, 3) and module.weight is not None:
            return normalised(x, mean.flatten(), variance.flatten(), module.weight, module.bias, module.eps).to(
                value.dtype
            )
        y = ((x - mean) * (variance + module.eps).rsqrt()).reshape(value.shape)
        if module.weight is not None:
            y = y * module.weight[:, None, None] + module.bias[:, None, None]
        result: Tensor = y.to(value.dtype)
        return result

    sums = Operation(gather, sums=True, merge=merged, again=gather_again)
    return Operation(normalise, first=(Prior(MOMENTS, sums), *running), flops_each=100.0)


@torch.no_grad()
def _count(module: Any, given: Any, count: int) -> Tensor:
    """Update running statistics, as the layer does."""
    module.num_batches_tracked.add_(1)
    share = 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum
    _, mean, squares = (moment.flatten().to(module.running_mean.dtype) for moment in given.prior(MOMENTS))
    module.running_mean.mul_(1 - share).add_(mean, alpha=share)
    module.running_var.mul_(1 - share).add_(squares, alpha=share / (count - 1))
    return torch.empty(0)
