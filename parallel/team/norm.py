"""Batch norm of a map that lies with several members: statistics of the whole, in one message forward and one back.

Each member gives (count, mean, M2) of its own part; they are merged in the order of members, by Chan, Golub and LeVeque
(1983), the same bits everywhere. Backward is the textbook formula with sums over all members.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from parallel.streaming.moments import merged, moments
from parallel.streaming.operation import ChannelNorm
from parallel.team.link import TeamLink


def merged_moments(link: TeamLink, own: Tensor) -> Tensor:
    """Return (3, ...) count, mean and M2 of all members' parts from those of each."""
    return functools.reduce(merged, link.gather(own))


def normalised_side_by_side(link: TeamLink, x: Tensor, of_all: Tensor, norm: ChannelNorm, given: Any) -> Tensor:
    """Return this member's part of a map normalised by the moments ``of_all`` its parts."""
    scale, shift = norm.affine(given)
    weight = torch.ones_like(of_all[0].flatten(), dtype=x.dtype) if scale is None else scale
    bias = torch.zeros_like(weight) if shift is None else shift
    y: Tensor = _Normalised.apply(x, weight, bias, of_all, link, norm.eps)
    return norm.then(y)


def own_moments(x: Tensor) -> Tensor:
    """Return count, mean and M2 of each channel, without gradients."""
    return moments(x.detach(), (0, 2, 3))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, of_all: Tensor, link: TeamLink, epsilon: float
    ) -> Tensor:
        count, mean, squares = (each.flatten() for each in of_all)
        mean, variance = mean.to(x.dtype), (squares / count).to(x.dtype)
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.count, ctx.link, ctx.epsilon = float(count[0]), link, epsilon
        y: Tensor = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, epsilon)[0]
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, variance = ctx.saved_tensors
        gradient, to_x = gradients[0], None
        _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradient, x, weight, mean, variance, None, None, False, ctx.epsilon, [False, True, True]
        )
        if ctx.needs_input_grad[0]:
            arriving = ctx.link.begin_sum_back(torch.stack([to_bias, to_weight]).double())
            scale = (variance.double() + ctx.epsilon).rsqrt()
            to_x = gradient * (weight.double() * scale).to(x.dtype)[:, None, None]  # while the sums travel
            sums = arriving.wait()[0] / ctx.count
            slope = weight.double() * scale.square() * sums[1]
            level = weight.double() * scale * sums[0] - slope * mean.double()
            to_x.addcmul_(x, slope.to(x.dtype)[:, None, None], value=-1).sub_(level.to(x.dtype)[:, None, None])
        return to_x, to_weight, to_bias, None, None, None
