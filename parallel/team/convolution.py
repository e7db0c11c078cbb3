"""A convolution of a map that lies with several members: halos come in, and their gradients go back while those of the
weights are computed.

What is kept for the backward pass is this member's own part and the rows that were fetched: the padded tensor they are
put together in lives for one pass alone, or kept maps would double.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.team import Exchange
from parallel.streaming.patch import Patch
from parallel.team.fetched import assembled, handed_back
from parallel.team.link import TeamLink

DIMS = (2, 3)


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
    value: Tensor = _Convolved.apply(own, weight, bias, link, exchange, patch, rules, groups)
    return value


class _Convolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        own: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        link: TeamLink,
        exchange: Exchange,
        patch: Patch,
        rules: tuple[Any, Any],
        groups: int,
    ) -> Tensor:
        halos = link.fetch(exchange, own, DIMS).wait()
        ctx.save_for_backward(own, weight, *halos)
        strides = ([rule.stride for rule in rules], [rule.dilation for rule in rules])
        ctx.link, ctx.exchange, ctx.patch, ctx.groups, ctx.strides = link, exchange, patch, groups, strides
        ctx.bias = None if bias is None else list(bias.shape)
        wide, pads = _padded(assembled(exchange, link.member, own, halos, DIMS), patch)
        return F.conv2d(wide, weight, bias, strides[0], pads, strides[1], groups)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own, weight, *halos = ctx.saved_tensors
        exchange, patch, member = ctx.exchange, ctx.patch, ctx.link.member
        wide, pads = _padded(assembled(exchange, member, own, halos, DIMS), patch)
        del halos

        def backwards(wanted: list[bool]) -> Any:
            return torch.ops.aten.convolution_backward(
                gradients[0],
                wide,
                weight,
                ctx.bias,
                *(ctx.strides[0], pads, ctx.strides[1]),
                False,
                (0, 0),
                ctx.groups,
                wanted,
            )

        finish = None
        if ctx.needs_input_grad[0]:
            to_wide = backwards([True, False, False])[0]
            (top, _), (left, _) = patch.pads if pads == (0, 0) else ((0, 0), (0, 0))
            rows, columns = (span.size for span in exchange.boxes[member])
            inside = to_wide.narrow(2, top, rows).narrow(3, left, columns)
            finish = handed_back(ctx.link, exchange, inside, torch.zeros_like(own), DIMS)
            del to_wide, inside
        _, to_weight, to_bias = backwards([False, ctx.needs_input_grad[1], ctx.needs_input_grad[2]])
        return (None if finish is None else finish(), to_weight, to_bias, *[None] * 5)


def _padded(tensor: Tensor, patch: Patch) -> tuple[Tensor, tuple[int, int]]:
    """Return what is convolved, and what the convolution itself pads: all, where both sides are alike."""
    (top, bottom), (left, right) = patch.pads
    if top == bottom and left == right:
        return tensor, (top, left)
    return F.pad(tensor, (left, right, top, bottom)), (0, 0)
