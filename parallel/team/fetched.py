"""A map as an operation of this member needs it, put together of its own part and of others'; and its gradient, handed
back to where each row came from.

The backward pass of a fetch is its linear adjoint: gradients of rows that were fetched go to their owners and are added
there. So each member's gradients are partial sums, and the sum over the members is exact whoever computed what (Hewett
and Grady 2020, A linear algebraic approach to model parallelism in deep learning, section 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
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
        ctx.link, ctx.exchange, ctx.dims = link, exchange, dims
        ctx.own = torch.empty((), dtype=own.dtype, device=own.device).expand(own.shape)  # its form alone
        pieces = link.fetch(exchange, own, dims).wait()
        return put_together(exchange, link.member, own, pieces, dims, exchange.boxes[link.member])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return handed_back(ctx.link, ctx.exchange, gradients[0], ctx.own, ctx.dims)(), None, None, None


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


def handed_back(link: TeamLink, exchange: Exchange, gradient: Tensor, form: Tensor, dims: Dims) -> Any:
    """Send the gradients of what was fetched to their owners.

    Args:
        gradient: of the needed box.
        form: of shape and type of this member's part.

    Returns:
        () -> gradient of this member's part, with what the others hand back.
    """
    box, member = exchange.boxes[link.member], link.member
    pieces = [cut(gradient, dims, piece.box, box) for piece in exchange.arriving(member)]
    halos = link.give_back(exchange, pieces, form, dims)
    looked_at = [piece.box for piece in exchange.pieces[member] if piece.owner == member]
    own = _own_of(gradient, box, exchange.owned[member], looked_at, form, dims)

    def finish() -> Tensor:
        add_pieces(exchange, member, own, halos.wait(), dims)
        return own

    return finish


def add_pieces(exchange: Exchange, member: int, own: Tensor, pieces: Sequence[Tensor], dims: Dims) -> None:
    """Add to this member's gradient what others handed back, in the order of ``Exchange.leaving``."""
    for (_, sent), arrived in zip(exchange.leaving(member), pieces, strict=True):
        cut(own, dims, sent, exchange.owned[member]).add_(arrived)


def _own_of(gradient: Tensor, box: Box, at: Box, looked_at: Sequence[Box], form: Tensor, dims: Dims) -> Tensor:
    """The gradient of this member's part ``at``, zero where nobody looked at it. It is written once: pages that are
    touched for zeros first cost as much as the rest of a pass over a large map."""
    if [*looked_at] == [at]:
        return cut(gradient, dims, at, box).clone(memory_format=layout(gradient))
    own = torch.zeros(form.shape, dtype=form.dtype, device=form.device)
    for part in looked_at:
        cut(own, dims, part, at).copy_(cut(gradient, dims, part, box))
    return own


def all_of_own(exchange: Exchange, member: int, patch: Patch, own: Tensor) -> Patch | None:
    """Return a patch of this member's part as it is, in place of ``patch``, which leaves out its last rows or columns
    as a window that moves by several does not come to them; None where it begins elsewhere.

    So the map is not copied, and neither is its gradient. A convolution makes no more of it: where nobody needs what
    another has (``Exchange.quiet``), the next window begins beyond this part, or it would be this member's.
    """
    need, have, at = patch.need, patch.have, exchange.owned[member]
    if any(h.start != o.start for h, o in zip(have, at, strict=True)):
        return None
    rows, columns = (type(n)(n.start, n.stop + o.stop - h.stop) for n, h, o in zip(need, have, at, strict=True))
    return replace(patch, tensor=own, need=(rows, columns), have=at)


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
