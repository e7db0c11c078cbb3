"""Mean and squared differences of a map, box by box, and the map normalised by them; with gradients of both.

Boxes give (count, mean, M2), where M2 is the sum of squared differences from the box's own mean; they are merged in
float64 by Chan, Golub and LeVeque (1983), so that nothing cancels and uneven boxes weigh by their px. Members of a team
merge the moments of their parts in the order of members, the same bits everywhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _NormBase

CHUNK_PX = 1024
CHANNELS_LAST = torch.channels_last
HALVES = (torch.float16, torch.bfloat16)
"""Types in which sums lose small addends."""


def moments(x: Tensor, over: tuple[int, ...]) -> Tensor:
    """Return (3, ...) float64: count, mean and M2 over the dims ``over`` of a box, which stay as dims of 1."""
    if over == (0, 2, 3) and x.device.type == "cpu" and x.shape[1] > 1 and x.is_contiguous(memory_format=CHANNELS_LAST):
        return _of_channels(x.detach().permute(0, 2, 3, 1).reshape(-1, x.shape[1])).reshape(3, 1, -1, 1, 1)
    variance, mean = torch.var_mean(x, over, correction=0, keepdim=True)
    count = float(x.numel() // mean.numel())
    mean, variance = mean.double(), variance.double()
    return torch.stack([torch.full_like(mean, count), mean, variance * count])


def _of_channels(x: Tensor) -> Tensor:
    """Return (3, c) moments of the columns of ``x`` (px, c), by batch norm's own sums, which take a twentieth of the
    time of ``var_mean`` in this layout; in chunks, as they add up float32 numbers one by one."""
    count = len(x)
    parts = [
        torch.batch_norm_update_stats(chunk.t()[None, :, :, None], None, None, 0.0)
        for chunk in torch.split(x, CHUNK_PX)
    ]
    means, variances = (torch.stack(each).double() for each in zip(*parts, strict=True))
    counts = torch.full((len(parts), 1), float(CHUNK_PX), dtype=torch.float64)
    counts[-1] = count - CHUNK_PX * (len(parts) - 1)
    mean = (means * counts).sum(0) / count
    squares = ((variances + (means - mean).square()) * counts).sum(0)
    return torch.stack([torch.full_like(mean, float(count)), mean, squares])


def merged(before: Tensor, box: Tensor) -> Tensor:
    """Return the moments of what two of them are of together."""
    count = before[0] + box[0]
    difference = box[1] - before[1]
    mean = before[1] + difference * (box[0] / count)
    return torch.stack([count, mean, before[2] + box[2] + difference.square() * (before[0] * box[0] / count)])


@torch.no_grad()
def update_running(of_all: Tensor, mean: Tensor, variance: Tensor, share: float, count: int) -> None:
    """Update running statistics (c,) as batch norm does.

    Args:
        of_all: moments of all numbers, ``count`` of each channel.
        share: of the new statistics, batch norm's momentum.
    """
    _, means, squares = of_all.flatten(1).to(mean.dtype)
    mean.mul_(1 - share).add_(means, alpha=share)
    variance.mul_(1 - share).add_(squares, alpha=share / (count - 1))


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
        return of_all.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gradient,) = gradients
        x, (count, mean, _) = ctx.saved_tensors
        return (x - mean.to(x.dtype)).mul_((2 * gradient[2]).to(x.dtype)).add_((gradient[1] / count).to(x.dtype)), None


def normalised(x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """Return ``x`` (n, c, h, w) normalised by ``mean`` and ``variance`` (c,), scaled and shifted: batch norm, with
    gradients of the statistics, too."""
    y: Tensor = _Normalised.apply(x, mean, variance, weight, bias, epsilon)
    return y


class _Normalised(torch.autograd.Function):
    """torch's own batch norm by given statistics, whose backward pass takes them for constants."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor, bias: Tensor, epsilon: float
    ) -> Tensor:
        y: Tensor
        y, *saved = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, epsilon)
        ctx.save_for_backward(x, mean, variance, weight, *saved)
        ctx.epsilon = epsilon
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, mean, variance, weight, *saved = ctx.saved_tensors
        to_x, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, mean, variance, *saved, False, ctx.epsilon, [True, True, True]
        )
        scale = (variance + ctx.epsilon).rsqrt()
        return to_x, -weight * scale * to_bias, -0.5 * weight * scale.square() * to_weight, to_weight, to_bias, None


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
        total, mean, squares = of_all.flatten(1)
        mean, variance = mean.to(x.dtype), (squares / total).to(x.dtype)
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
