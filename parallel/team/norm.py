"""Batch norm of a map that lies with several members: statistics of the whole, in one message forward and one back.

Each member gives (count, mean, M2) of its own part; they are merged in the order of members, by Chan, Golub and LeVeque
(1983), the same bits everywhere. Backward is the textbook formula with sums over all members.

What a window behind the norm needs of others can come with their moments, before it is normalised: every member then
normalises it as its own. Gradients of such rows are partial ones, as those of a member's own are; they go to their
owners with the sums, to which each member adds its share of them. So a convolution, its norm and the next convolution
cost a message each way, in place of two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.space.team import Exchange
from parallel.streaming.moments import merged, moments
from parallel.streaming.operation import DIMS, ChannelNorm
from parallel.team.fetched import add_pieces
from parallel.team.link import TeamLink


def merged_moments(link: TeamLink, own: Tensor) -> Tensor:
    """Return (3, ...) count, mean and M2 of all members' parts from those of each."""
    return functools.reduce(merged, link.gather(own))


@dataclass(frozen=True)
class Beside:
    """What came of others' parts of a map with their moments, so that the window behind the norm asks nobody.

    Attributes:
        exchange: of that window.
        halos: of the map that is normalised, in the order of ``Exchange.arriving``.
    """

    exchange: Exchange
    halos: list[Tensor]


def moments_and_halos(link: TeamLink, own: Tensor, x: Tensor, exchange: Exchange) -> tuple[Tensor, Beside]:
    """Return the moments of all members' parts, and what ``exchange`` gives this member of the map that they are of;
    in one message. ``own``: this member's moments, of its part ``x``."""
    parts, halos = link.gather_and_fetch(own, exchange, x.detach(), DIMS)
    return functools.reduce(merged, parts), Beside(exchange, halos)


def normalised_side_by_side(
    link: TeamLink, x: Tensor, of_all: Tensor, norm: ChannelNorm, given: Any, beside: Beside | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Return this member's part of a map normalised by the moments ``of_all`` its parts, and what came beside it,
    normalised."""
    scale, shift = norm.affine(given)
    weight = torch.ones_like(of_all[0].flatten(), dtype=x.dtype) if scale is None else scale
    bias = torch.zeros_like(weight) if shift is None else shift
    halos = beside.halos if beside else ()
    exchange = beside.exchange if beside else None
    y, *others = _Normalised.apply(x, weight, bias, of_all, link, norm, exchange, *halos)
    return norm.then(y), [norm.then(other) for other in others]


def own_moments(x: Tensor) -> Tensor:
    """Return count, mean and M2 of each channel, without gradients."""
    return moments(x.detach(), (0, 2, 3))


class _Normalised(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        of_all: Tensor,
        link: TeamLink,
        norm: ChannelNorm,
        exchange: Exchange | None,
        *halos: Tensor,
    ) -> tuple[Tensor, ...]:
        count, mean, squares = (each.flatten() for each in of_all)
        mean, variance = mean.to(x.dtype), (squares / count).to(x.dtype)
        normalise = functools.partial(torch.native_batch_norm, training=False, momentum=0.0, eps=norm.eps)
        values, means, deviations = zip(
            *(normalise(part, weight, bias, mean, variance) for part in (x, *halos)),
            strict=True,
        )
        ctx.save_for_backward(weight, mean, variance, means[0], deviations[0], x, *halos)
        ctx.count, ctx.link, ctx.epsilon, ctx.exchange = norm.count, link, norm.eps, exchange
        return tuple(values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        weight, mean, variance, *saved, x = ctx.saved_tensors[:6]
        halos, statistics = ctx.saved_tensors[6:], (weight, mean, variance, *saved)
        to_weight, to_bias = _of_affine(ctx, gradients[0], x, statistics)
        for gradient, halo in zip(gradients[1:], halos, strict=True):
            to_scale, to_shift = _of_affine(ctx, gradient, halo, statistics)
            to_weight, to_bias = to_weight + to_scale, to_bias + to_shift
        to_x = None
        if ctx.needs_input_grad[0]:
            sums = torch.stack([to_bias, to_weight]).double()
            if ctx.exchange is None:
                arriving = ctx.link.begin_sum_back(sums)
            else:
                arriving = ctx.link.begin_sum_and_give_back(sums, ctx.exchange, gradients[1:], x, DIMS)
            deviation = (variance.double() + ctx.epsilon).rsqrt()
            scale = (weight.double() * deviation).to(x.dtype)[:, None, None]
            to_x = gradients[0] * scale  # while the sums travel
            total, *pieces = arriving.wait()
            if ctx.exchange is not None:
                add_pieces(ctx.exchange, ctx.link.member, to_x, [piece * scale for piece in pieces], DIMS)
            total = total / ctx.count
            slope = weight.double() * deviation.square() * total[1]
            level = weight.double() * deviation * total[0] - slope * mean.double()
            to_x.addcmul_(x, slope.to(x.dtype)[:, None, None], value=-1).sub_(level.to(x.dtype)[:, None, None])
        return to_x, to_weight, to_bias, *(None,) * (4 + len(halos))


def _of_affine(ctx: Any, gradient: Tensor, x: Tensor, statistics: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Gradients of scale and shift; ``statistics``: weight, mean, variance and the two tensors saved by forward."""
    _, to_weight, to_bias = torch.ops.aten.native_batch_norm_backward(
        gradient, x, *statistics, False, ctx.epsilon, [False, True, True]
    )
    return to_weight, to_bias
