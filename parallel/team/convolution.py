"""A convolution of a map that is sharded over a team, computed while halos travel.

Forward: of its own part alone, while halos come in; then the boundary strips of its output again, with them. Backward:
gradients of the halos first; while they travel, that of its own part and of the weights. So this member's part
and the halos are not copied into one tensor, and they alone are saved for backward. Where the part is mostly boundary
strips, padded unlike, or smaller than the weights, they are copied into one tensor for one pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.spatial_plan import Borders, borders, overlap_pays
from parallel.space.team import Box
from parallel.streaming.operation import DIMS
from parallel.streaming.patch import Patch
from parallel.team.halo_exchange import BoundExchange, Slices, slices
from parallel.team.team_comm import TeamComm

Pads = tuple[tuple[int, int], tuple[int, int]]
Padding = tuple[tuple[int, int, int, int] | None, tuple[int, int]]
"""(what the input is padded by before, as ``F.pad`` takes it; what the convolution pads)"""


def sharded_convolution(
    comm: TeamComm, own: Tensor, work: HaloConvolution, weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """Return this member's box of a convolution of the map that it owns ``own`` of."""
    if torch.is_autocast_enabled(own.device.type):
        kind = torch.get_autocast_dtype(own.device.type)
        own, weight, bias = own.to(kind), weight.to(kind), bias if bias is None else bias.to(kind)
    value: Tensor = _Convolution.apply(own, weight, bias, comm, work, groups)
    return value


class HaloConvolution:
    """One convolution on one member; made once for a plan.

    Args:
        patch: of what the member needs, without a tensor.
        rules: windows of rows and columns.
        map_size, weight_size: numbers of the member's part of a tile, and of the weight.

    Attributes:
        split: into own part and halos; None where part and halos are copied into one tensor.
    """

    def __init__(
        self, exchange: BoundExchange, patch: Patch, rules: tuple[Any, Any], map_size: int, weight_size: int
    ) -> None:
        self.exchange, self.pads = exchange, _padding(patch.pads)
        self.stride, self.dilation = [rule.stride for rule in rules], [rule.dilation for rule in rules]
        split = None
        if overlap_pays(map_size, weight_size):
            split = borders(rules, patch.box, exchange.box, exchange.own, patch.sides)
        self.split = None if split is None else _Split(exchange, patch.box, split)

    def forward(self, x: Tensor, pads: Padding, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
        before, even = pads
        if before is not None:
            x = F.pad(x, before)
        return torch.conv2d(x, weight, bias, self.stride, even, self.dilation, groups)

    def backward(
        self,
        gradient: Tensor,
        x: Tensor,
        pads: Padding,
        weight: Tensor,
        bias: list[int] | None,
        groups: int,
        wanted: Any,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """Gradients of ``x``, weight and bias."""
        before, even = pads
        padded = x if before is None else F.pad(x, before)
        to_x, to_weight, to_bias = torch.ops.aten.convolution_backward(
            gradient, padded, weight, bias, self.stride, even, self.dilation, False, (0, 0), groups, list(wanted)
        )
        if to_x is not None and before is not None:
            to_x = to_x.narrow(2, before[2], x.shape[2]).narrow(3, before[0], x.shape[3])
        return to_x, to_weight, to_bias


class _Split:
    """Slices of own part, boundary strips and halos in the tensors of a pass.

    Attributes:
        strips: (puts its input together, its pads, where it lies in the output).
        halos: as strips; of the output it is part of.
        pieces: (number of the halo, where in it) of each piece received.
    """

    def __init__(self, exchange: BoundExchange, made: Box, split: Borders) -> None:
        self.whole = split.base == exchange.own
        self.base = slices(DIMS, split.base, exchange.own)
        self.pads: Padding = None, split.pads
        self.strips, self.halos = (
            [(exchange.concat_halo(each.box), _padding(each.pads), slices(DIMS, each.made, made)) for each in boxes]
            for boxes in (split.strips, split.halos)
        )
        self.pieces: list[tuple[int, Slices]] = []
        for piece in exchange.exchange.recvs[exchange.member]:
            for number, (rows, columns) in enumerate(halo.box for halo in split.halos):
                if rows.holds(piece.box[0]) and columns.holds(piece.box[1]):
                    self.pieces.append((number, slices(DIMS, piece.box, (rows, columns))))
                    break


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, own: Tensor, weight: Tensor, bias: Tensor | None, comm: TeamComm, work: HaloConvolution, groups: int
    ) -> Tensor:
        split = work.split
        arriving = comm.fetch(work.exchange, own)
        if split is None:
            halos = arriving()
            y = work.forward(work.exchange.needed(own, halos), work.pads, weight, bias, groups)
        else:
            base = own if split.whole else own[split.base]
            y = torch.conv2d(base, weight, bias, work.stride, split.pads[1], work.dilation, groups)
            halos = arriving()
            for concat, pads, part in split.strips:
                y[part].copy_(work.forward(concat(own, halos), pads, weight, bias, groups))
        ctx.save_for_backward(own, weight, *halos)
        ctx.comm, ctx.work, ctx.groups = comm, work, groups
        ctx.bias = None if bias is None else list(bias.shape)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        own, weight, *halos = ctx.saved_tensors
        work, split, (to_input, weights, biases) = ctx.work, ctx.work.split, ctx.needs_input_grad[:3]
        if split is None:
            return *_backward_of_needed(ctx, gradients[0], own, halos, weight), None, None, None
        (gradient,) = gradients
        of_weight, of_halos = [], []
        for concat, pads, part in split.halos:
            to_x, to_weight, _ = work.backward(
                gradient[part], concat(own, halos), pads, weight, None, ctx.groups, (to_input, weights, False)
            )
            of_weight.append(to_weight)
            of_halos.append(to_x)
        if to_input:
            pieces = [of_halos[number][part] for number, part in split.pieces]
            arriving = ctx.comm.send_halo_grads(work.exchange, pieces, own)
        base = own if split.whole else own[split.base]
        to_own, to_weight, to_bias = work.backward(
            gradient, base, split.pads, weight, ctx.bias, ctx.groups, (to_input, weights, biases)
        )
        for of_halo in of_weight:
            if to_weight is not None:
                to_weight.add_(of_halo)
        if to_input:
            if not split.whole:
                to_base, to_own = to_own, torch.zeros_like(own)
                to_own[split.base].copy_(to_base)
            work.exchange.add_pieces(to_own, arriving())
        return to_own, to_weight, to_bias, None, None, None


def _backward_of_needed(ctx: Any, gradient: Tensor, own: Tensor, halos: Sequence[Tensor], weight: Tensor) -> Any:
    """Gradients of the own part, weight and bias, where part and halos are in one tensor."""
    work, (to_input, weights, biases) = ctx.work, ctx.needs_input_grad[:3]
    needed, finish = work.exchange.needed(own, halos), None
    if to_input:
        wanted = (True, False, False)
        to_needed, _, _ = work.backward(gradient, needed, work.pads, weight, ctx.bias, ctx.groups, wanted)
        finish = work.exchange.send_back(ctx.comm, to_needed, own)
        del to_needed
    wanted = (False, weights, biases)
    _, to_weight, to_bias = work.backward(gradient, needed, work.pads, weight, ctx.bias, ctx.groups, wanted)
    return None if finish is None else finish(), to_weight, to_bias


def _padding(pads: Pads) -> Padding:
    """Let the convolution itself pad where both sides are alike."""
    (top, bottom), (left, right) = pads
    return (None, (top, left)) if top == bottom and left == right else ((left, right, top, bottom), (0, 0))
