"""A convolution of a map that lies with several members, computed while what they need of each other travels.

Forward: of its own part alone, while halos come in; then the rims of its output again, with them. Backward: gradients
of the halos first; while they travel, that of its own part and of the weights. So nothing is put together in a tensor
of its own, and what is kept is this member's part and the halos. Where its part is mostly rims, padded unlike, or
smaller than the weights, it is put together after all, for one pass alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.borders import Borders, apart_pays, borders
from parallel.space.team import Box, Exchange
from parallel.streaming.patch import Patch
from parallel.team.fetched import add_pieces, handed_back, put_together
from parallel.team.link import TeamLink, cut

DIMS = (2, 3)
Pads = tuple[tuple[int, int], tuple[int, int]]


def convolve_side_by_side(
    link: TeamLink,
    exchange: Exchange,
    own: Tensor,
    patch: Patch,
    rules: tuple[Any, Any],
    operands: tuple[Tensor, Tensor | None, int],
) -> Tensor:
    """Return this member's box of a convolution.

    Args:
        patch: of what it needs, its tensor aside.
        rules: windows of rows and columns.
        operands: (weight, bias, groups).
    """
    weight, bias, groups = operands
    device = own.device.type
    if torch.is_autocast_enabled(device):
        kind = torch.get_autocast_dtype(device)
        own, weight, bias = own.to(kind), weight.to(kind), bias if bias is None else bias.to(kind)
    pays = apart_pays(own.nbytes // len(own), weight.nbytes)
    work = _Work(exchange, link.member, patch, rules, groups, pays)
    value: Tensor = _Convolved.apply(own, weight, bias, link, work)
    return value


class _Work:
    """One convolution on one member."""

    def __init__(
        self, exchange: Exchange, member: int, patch: Patch, rules: tuple[Any, Any], groups: int, pays: bool
    ) -> None:
        self.exchange, self.member, self.groups = exchange, member, groups
        self.patch = replace(patch, tensor=patch.tensor.new_empty(0))  # or a pass that keeps nothing would keep it
        self.need, self.have, self.own = exchange.needs[member], exchange.boxes[member], exchange.owned[member]
        self.stride, self.dilation = [rule.stride for rule in rules], [rule.dilation for rule in rules]
        self.apart: Borders | None = borders(rules, patch.box, self.have, self.own, patch.sides) if pays else None

    def forward(self, x: Tensor, pads: Pads, weight: Tensor, bias: Tensor | None) -> Tensor:
        x, even = _padded(x, pads)
        return F.conv2d(x, weight, bias, self.stride, even, self.dilation, self.groups)

    def backward(
        self, gradient: Tensor, x: Tensor, pads: Pads, weight: Tensor, bias: list[int] | None, wanted: Sequence[bool]
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of ``x``, weight and bias."""
        padded, even = _padded(x, pads)
        to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
            gradient, padded, weight, bias, self.stride, even, self.dilation, False, (0, 0), self.groups, list(wanted)
        )
        if to_x is not None and padded is not x:
            to_x = to_x.narrow(2, pads[0][0], x.shape[2]).narrow(3, pads[1][0], x.shape[3])
        return to_x, to_weight, to_bias

    def whole(self, own: Tensor, halos: Sequence[Tensor]) -> Tensor:
        """All that is needed."""
        return put_together(self.exchange, self.member, own, halos, DIMS, self.have)


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, own: Tensor, weight: Tensor, bias: Tensor | None, link: TeamLink, work: _Work) -> Tensor:
        arriving = link.fetch(work.exchange, own, DIMS)
        apart, made = work.apart, work.patch.box
        if apart is None:
            halos = arriving.wait()
            y = work.forward(work.whole(own, halos), work.patch.pads, weight, bias)
        else:
            y = work.forward(cut(own, DIMS, apart.base, work.own), _both(apart.pads), weight, bias)
            halos = arriving.wait()
            for rim in apart.rims:
                x = put_together(work.exchange, work.member, own, halos, DIMS, rim.have)
                cut(y, DIMS, rim.made, made).copy_(work.forward(x, _between(rim.have, rim.need), weight, bias))
        ctx.save_for_backward(own, weight, *halos)
        ctx.link, ctx.work, ctx.bias = link, work, None if bias is None else list(bias.shape)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own, weight, *halos = ctx.saved_tensors
        work, to_input = ctx.work, ctx.needs_input_grad[0]
        if work.apart is None:
            return _backward_whole(ctx, gradients[0], own, halos, weight)
        (gradient,), (_, weights, biases) = gradients, ctx.needs_input_grad[:3]
        of_weight: list[Tensor | None] = []
        to_halos: dict[Box, Tensor] = {}
        for halo in work.apart.halos:
            x = put_together(work.exchange, work.member, own, halos, DIMS, halo.box)
            above = cut(gradient, DIMS, halo.made, work.patch.box)
            to_x, to_weight, _ = work.backward(above, x, halo.pads, weight, None, (to_input, weights, False))
            of_weight.append(to_weight)
            if to_x is not None:
                to_halos[halo.box] = to_x
        arriving = None
        if to_input:
            pieces = [_piece(to_halos, piece.box) for piece in work.exchange.arriving(work.member)]
            arriving = ctx.link.give_back(work.exchange, pieces, own, DIMS)
        base = cut(own, DIMS, work.apart.base, work.own)
        to_own, to_weight, to_bias = work.backward(
            gradient, base, _both(work.apart.pads), weight, ctx.bias, (to_input, weights, biases)
        )
        for of_halo in of_weight:
            if to_weight is not None:
                to_weight.add_(of_halo)
        if to_input and work.apart.base != work.own:
            whole = torch.zeros_like(own)
            cut(whole, DIMS, work.apart.base, work.own).copy_(to_own)
            to_own = whole
        if arriving is not None:
            add_pieces(work.exchange, work.member, to_own, arriving.wait(), DIMS)
        return to_own, to_weight, to_bias, None, None


def _backward_whole(ctx: Any, gradient: Tensor, own: Tensor, halos: Sequence[Tensor], weight: Tensor) -> Any:
    work, pads = ctx.work, ctx.work.patch.pads
    wide, wants = work.whole(own, halos), ctx.needs_input_grad
    finish = None
    if wants[0]:
        to_wide, _, _ = work.backward(gradient, wide, pads, weight, ctx.bias, (True, False, False))
        finish = handed_back(ctx.link, work.exchange, to_wide, own, DIMS)
        del to_wide
    _, to_weight, to_bias = work.backward(gradient, wide, pads, weight, ctx.bias, (False, *wants[1:3]))
    return None if finish is None else finish(), to_weight, to_bias, None, None


def _padded(x: Tensor, pads: Pads) -> tuple[Tensor, tuple[int, int]]:
    """What is convolved, and what the convolution itself pads: all, where both sides are alike."""
    (top, bottom), (left, right) = pads
    if top == bottom and left == right:
        return x, (top, left)
    return F.pad(x, (left, right, top, bottom)), (0, 0)


def _both(pads: tuple[int, int]) -> Pads:
    return (pads[0], pads[0]), (pads[1], pads[1])


def _between(inner: Box, outer: Box) -> Pads:
    rows, columns = ((o.start, i.start, i.stop, o.stop) for i, o in zip(inner, outer, strict=True))
    return (rows[1] - rows[0], rows[3] - rows[2]), (columns[1] - columns[0], columns[3] - columns[2])


def _piece(parts: dict[Box, Tensor], box: Box) -> Tensor:
    """The part ``box`` of the one among ``parts`` that holds it."""
    for at, value in parts.items():
        if at[0].holds(box[0]) and at[1].holds(box[1]):
            return cut(value, DIMS, box, at)
    raise AssertionError(f"{box} lies in none of {list(parts)}")
