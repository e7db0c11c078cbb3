"""A map as an operation of this member needs it, put together of its own part and of others'; and its gradient, handed
back to where each row came from.

The backward pass of a fetch is its linear adjoint: gradients of rows that were fetched go to their owners and are added
there. So each member's gradients are partial sums, and the sum over the members is exact whoever computed what (Hewett
and Grady 2020, A linear algebraic approach to model parallelism in deep learning, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.space.team import Box, Exchange, overlap
from parallel.streaming.patch import Patch, had
from parallel.team.link import TeamLink, cut

Dims = tuple[int, int]


def fetched(link: TeamLink, exchange: Exchange, own: Tensor, dims: Dims) -> Tensor:
    """Return the box that this member needs of the map that it owns ``own`` of."""
    if exchange.quiet:
        return cut(own, dims, exchange.boxes[link.member], exchange.owned[link.member])
    value: Tensor = _Fetched.apply(own, link, exchange, dims)
    return value


class _Fetched(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, link: TeamLink, exchange: Exchange, dims: Dims) -> Tensor:
        ctx.link, ctx.exchange, ctx.dims, ctx.form = link, exchange, dims, (own.shape, own.dtype, own.device)
        halos = link.fetch(exchange, own, dims).wait()
        return put_together(exchange, link.member, own, halos, dims, exchange.boxes[link.member])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        shape, dtype, device = ctx.form
        own = torch.zeros(shape, dtype=dtype, device=device)
        finish = handed_back(ctx.link, ctx.exchange, gradients[0], own, ctx.dims)
        return finish(), None, None, None


def put_together(exchange: Exchange, member: int, own: Tensor, halos: Sequence[Tensor], dims: Dims, box: Box) -> Tensor:
    """Return ``box`` of what is needed in one tensor, in the layout of ``own``."""
    at = exchange.owned[member]
    shape = list(own.shape)
    for dim, span in zip(dims, box, strict=True):
        shape[dim] = span.size
    value = torch.empty(shape, dtype=own.dtype, device=own.device, memory_format=layout(own))
    arrived = iter(halos)
    for piece in exchange.pieces[member]:
        source, lies = (own, at) if piece.owner == member else (next(arrived), piece.box)
        if (common := overlap(piece.box, box)) is not None:
            cut(value, dims, common, box).copy_(cut(source, dims, common, lies))
    return value


def handed_back(link: TeamLink, exchange: Exchange, gradient: Tensor, own: Tensor, dims: Dims) -> Any:
    """Send the gradients of what was fetched to their owners, and add this member's own to ``own``.

    Args:
        gradient: of the needed box.
        own: zeros, or what the gradient of this member's part is added to.

    Returns:
        () -> ``own``, with what the others hand back added to it.
    """
    member = link.member
    box, at = exchange.boxes[member], exchange.owned[member]
    pieces = exchange.pieces[member]
    halos = link.give_back(
        exchange, [cut(gradient, dims, piece.box, box) for piece in pieces if piece.owner != member], own, dims
    )
    for piece in pieces:
        if piece.owner == member:
            cut(own, dims, piece.box, at).add_(cut(gradient, dims, piece.box, box))

    def finish() -> Tensor:
        for (_, sent), arrived in zip(exchange.leaving(member), halos.wait(), strict=True):
            cut(own, dims, sent, at).add_(arrived)
        return own

    return finish


def patch_of(exchange: Exchange, member: int, value: Any, made: Box, sides: tuple[int, int], dims: Dims) -> Patch:
    """Return ``value``, the box that is needed of a map of ``sides``, as what an operation takes to give ``made``."""
    need, has = exchange.needs[member], exchange.boxes[member]
    have = had(need, has, sides)
    wide = tuple(n if h.size else type(n)(h.start - n.size, h.stop) for n, h in zip(need, have, strict=True))
    return Patch(value, (wide[0], wide[1]), have, made, sides, dims)


def layout(value: Tensor) -> torch.memory_format:
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
