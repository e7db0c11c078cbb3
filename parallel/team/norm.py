"""Batch norm of a map that is sharded over a team: statistics of the whole, in one message forward and one back.

Each member gives (count, mean, M2) of its own part; they are merged in the order of members, by Chan, Golub and LeVeque
(1983), the same bits everywhere. Backward is the textbook formula with sums over all members.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from parallel.streaming.operation import ChannelNorm
from parallel.team.team_comm import TeamComm


def sharded_batch_norm(comm: TeamComm, x: Tensor, of_all: Tensor, norm: ChannelNorm, given: Any) -> Tensor:
    """Return this member's part of a map normalised by the moments ``of_all`` its parts."""
    scale, shift = norm.affine(given)
    weight = torch.ones_like(of_all[0].flatten(), dtype=x.dtype) if scale is None else scale
    bias = torch.zeros_like(weight) if shift is None else shift
    y: Tensor = _BatchNorm.apply(x, weight, bias, of_all, comm, norm)
    return norm.then(y)


class _BatchNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, of_all: Tensor, comm: TeamComm, norm: ChannelNorm
    ) -> Tensor:
        count, mean, squares = of_all.flatten(1)
        mean, variance = mean.to(x.dtype), (squares / count).to(x.dtype)
        y, *saved = torch.native_batch_norm(x, weight, bias, mean, variance, False, 0.0, norm.eps)
        ctx.save_for_backward(x, weight, mean, variance, *saved)
        ctx.count, ctx.comm, ctx.epsilon = norm.count, comm, norm.eps
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight, mean, variance, *saved = ctx.saved_tensors
        _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
            gradients[0], x, weight, mean, variance, *saved, False, ctx.epsilon, [False, True, True]
        )
        to_x = None
        if ctx.needs_input_grad[0]:
            arriving = ctx.comm.all_reduce_async(torch.stack([to_bias, to_weight]).double())
            deviation = (variance.double() + ctx.epsilon).rsqrt()
            to_x = gradients[0] * (weight.double() * deviation).to(x.dtype)[:, None, None]  # while the sums travel
            (total,) = arriving()
            total = total / ctx.count
            slope = weight.double() * deviation.square() * total[1]
            level = weight.double() * deviation * total[0] - slope * mean.double()
            to_x.addcmul_(x, slope.to(x.dtype)[:, None, None], value=-1).sub_(level.to(x.dtype)[:, None, None])
        return to_x, to_weight, to_bias, None, None, None
