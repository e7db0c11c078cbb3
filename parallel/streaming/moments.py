"""Mean and variance of a map, box by box, and the map normalised by them; with gradients of both.

Boxes give (count, mean, variance), which are merged in float64 by Chan, Golub and LeVeque (1983), so that nothing
cancels and uneven boxes weigh by their px. Members of a team merge the moments of their parts in the order of members,
the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

CHUNK_PX = 1024
CHANNELS = (0, 2, 3)
"""Dims over which batch norm adds up."""
HALVES = (torch.float16, torch.bfloat16)
"""Types in which sums lose small addends."""


def moments(x: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return (3, ...) float64: count, mean and variance over the dims ``over`` of a box, which stay as dims of 1."""
    if over == CHANNELS and x.device.type == "cuda":
        return _of_channels(x).double().reshape(3, 1, -1, 1, 1)
    x = x.float() if x.dtype in HALVES else x
    dense = x.device.type == "cpu" and x.is_contiguous(memory_format=torch.channels_last)
    if over == CHANNELS and dense and x.shape[1] > 1:
        # Batch norm's own sums take a twentieth of the time of ``var_mean``, but add up numbers one by one on a CPU.
        columns = x.permute(0, 2, 3, 1).reshape(-1, x.shape[1]).t()[None, :, :, None]
        return merged([_of_channels(chunk) for chunk in torch.split(columns, CHUNK_PX, 2)]).reshape(3, 1, -1, 1, 1)
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    return torch.stack([torch.full_like(mean, x.numel() // mean.numel()), mean, variance]).double()


def _of_channels(x: Tensor) -> Tensor:
    """Return (3, c) moments of the channels of ``x`` (n, c, ...), by batch norm's own sums."""
    mean, variance = torch.batch_norm_update_stats(x, None, None, 0.0)
    return torch.stack([torch.full_like(mean, x.numel() // x.shape[1]), mean, variance])


def merged(parts: Sequence[Tensor]) -> Tensor:
    """Return the moments of all that ``parts`` are of."""
    if len(parts) == 1:
        return parts[0].double()
    counts, means, variances = torch.stack(tuple(parts), 1).double()
    count = counts.sum(0)
    mean = (counts * means).sum(0) / count
    return torch.stack([count, mean, (counts * (variances + (means - mean).square())).sum(0) / count])


@torch.no_grad()
def update_running(of_all: Tensor, mean: Tensor, variance: Tensor, share: float, count: int) -> None:
    """Update running statistics (c,) as batch norm does.

    Args:
        of_all: moments of all numbers, ``count`` of each channel.
        share: of the new statistics, batch norm's momentum.
    """
    _, means, variances = of_all.flatten(1).to(mean.dtype)
    mean.mul_(1 - share).add_(means, alpha=share)
    variance.mul_(1 - share).add_(variances, alpha=share * count / (count - 1))


@torch.no_grad()
def next_share(module: _NormBase) -> float:
    """Count an update of a batch norm's running statistics; return the share of the new ones."""
    assert module.num_batches_tracked is not None
    module.num_batches_tracked.add_(1)
    return 1 / float(module.num_batches_tracked) if module.momentum is None else module.momentum


def share_of_moments(x: Tensor, of_all: Tensor) -> Tensor:
    """Return ``of_all``, the moments of all boxes, as a function of this one: backward gives its share."""
    share: Tensor = _Share.apply(x, of_all)
    return share


class _Share(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, of_all: Tensor) -> Tensor:
        ctx.save_for_backward(x, of_all)
        return of_all.view_as(of_all)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, of_all = ctx.saved_tensors
        of_number = (gradients[0] / of_all[0]).to(accumulating(x.dtype))
        difference = x - of_all[1].to(of_number.dtype)
        return torch.addcmul(of_number[1], difference, of_number[2], value=2).to(x.dtype), None


def accumulating(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which norms compute with numbers of a type."""
    return torch.float32 if dtype in HALVES else dtype


def factors_of(of_all: Tensor, weight: Tensor | None, epsilon: float, dtype: torch.dtype) -> Tensor:
    """Return (5, c): mean, variance, and what gradients of shift, shift and scale, summed over px, are multiplied by to
    give those of count, mean and variance."""
    mean, variance = of_all.flatten(1)[1:]
    deviation = (variance + epsilon).rsqrt()
    scale = deviation if weight is None else deviation * weight
    return torch.stack([mean, variance, torch.zeros_like(mean), -scale, -0.5 * scale * deviation]).to(dtype)


class Normalised(torch.autograd.Function):
    """Normalises x (n, c, h, w) by the moments ``of_all`` boxes, scales and shifts it; with gradients of the moments.

    It is torch's own batch norm by given statistics, whose backward pass takes them for constants. ``factors_of`` gives
    both these and what their gradients are made with.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, of_all: Tensor, factors: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> Tensor:
        y: Tensor
        y, *saved = torch.native_batch_norm(x, weight, bias, factors[0], factors[1], False, 0.0, epsilon)
        ctx.save_for_backward(x, factors, weight, *saved)
        ctx.epsilon, ctx.form = epsilon, of_all.shape
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, factors, weight, *saved = ctx.saved_tensors
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, factors[0], factors[1], *saved, False, ctx.epsilon, [True, True, True]
        )
        to_moments = (torch.stack([to_bias, to_bias, to_weight]) * factors[2:]).double()
        return to_x, to_moments.view(ctx.form), None, to_weight, to_bias, None


def normalised_part(
    x: Tensor,
    of_all: Tensor,
    operands: tuple[Tensor | None, Tensor | None],
    count: int,
    epsilon: float,
    sum_of_all: Callable[[Tensor], Callable[[], list[Tensor]]],
) -> Tensor:
    """Return a member's part of a map normalised by the moments ``of_all`` parts. Backward is the textbook formula with
    sums over all members, in one message.

    Args:
        operands: scale and shift.
        count: px of all tiles.
        sum_of_all: begins to sum over the members; what it returns waits for the sum.
    """
    weight = torch.ones_like(of_all[0].flatten(), dtype=x.dtype) if operands[0] is None else operands[0]
    bias = torch.zeros_like(weight) if operands[1] is None else operands[1]
    y: Tensor = _NormalisedPart.apply(x, weight, bias, of_all, count, epsilon, sum_of_all)
    return y


class _NormalisedPart(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, of_all: Tensor, count: int, epsilon: float, sum_of_all: Any
    ) -> Tensor:
        _, mean, variance = of_all.flatten(1).to(x.dtype)
        y, *saved = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, epsilon)
        ctx.save_for_backward(x, weight, mean, variance, *saved)
        ctx.count, ctx.sum_of_all, ctx.epsilon = count, sum_of_all, epsilon
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, variance, *saved = ctx.saved_tensors
        to_weight = to_bias = torch.zeros_like(weight)
        if len(x):  # torch divides by the number of samples
            _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
                gradients[0], x, weight, mean, variance, *saved, False, ctx.epsilon, [False, True, True]
            )
        to_x = None
        if ctx.needs_input_grad[0]:
            arriving = ctx.sum_of_all(torch.stack([to_bias, to_weight]).double())
            deviation = (variance.double() + ctx.epsilon).rsqrt()
            to_x = gradients[0] * (weight.double() * deviation).to(x.dtype)[:, None, None]  # while the sums travel
            (total,) = arriving()
            total = total / ctx.count
            slope = weight.double() * deviation.square() * total[1]
            level = weight.double() * deviation * total[0] - slope * mean.double()
            to_x.addcmul_(x, slope.to(x.dtype)[:, None, None], value=-1).sub_(level.to(x.dtype)[:, None, None])
        return to_x, to_weight, to_bias, None, None, None, None
