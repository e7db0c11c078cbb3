"""Convolutions, pools and resampling of a box, with the rows and columns outside the image padded.

Each takes the patch that a box needs and returns exactly the box. Padding is of the whole image, at each operation:
zeros, or minus infinity for maxima.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.cuts import Span
from parallel.space.rule import AdaptivePool, Chained, Mirrored, Resample, Window
from parallel.streaming.patch import Patch

Rules = tuple[Any, Any]


def convolve(patch: Patch, rules: Rules, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return the box of a convolution."""
    x, stride, pads, dilation = _evenly_padded(patch, rules)
    return F.conv2d(x, weight, bias, stride, pads, dilation, groups)


def _evenly_padded(patch: Patch, rules: Rules) -> tuple[Tensor, tuple[int, int], tuple[int, int], tuple[int, int]]:
    """Return (patch, stride, rows and columns to pad on both sides, dilation); a padded copy where pads are uneven."""
    rows, columns = rules
    stride, dilation = (rows.stride, columns.stride), (rows.dilation, columns.dilation)
    if patch.have == patch.need:
        return patch.tensor, stride, (0, 0), dilation
    (top, bottom), (left, right) = patch.pads
    if top == bottom and left == right:
        return patch.tensor, stride, (top, left), dilation
    return F.pad(patch.tensor, (left, right, top, bottom)), stride, (0, 0), dilation


def convolve_again(
    patch: Patch, rules: Rules, weight: Tensor, bias: Tensor | None, groups: int, stored: Tensor | None
) -> Tensor:
    """Return ``stored``, the box of a convolution, or any numbers; the gradients of ``convolve`` do not need them."""
    x, stride, pads, dilation = _evenly_padded(patch, rules)
    operands = [x, weight, bias]
    device = weight.device.type
    if torch.is_autocast_enabled(device):
        operands = [each if each is None else each.to(torch.get_autocast_dtype(device)) for each in operands]
    (first_row, last_row), (first_column, last_column) = patch.box
    box = last_row - first_row, last_column - first_column
    value: Tensor = _AgainConvolved.apply(*operands, stored, box, stride, pads, dilation, groups)
    return value


class _AgainConvolved(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stored: Tensor | None, box: Any, *numbers: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.bias, ctx.numbers = None if bias is None else list(bias.shape), numbers
        if stored is not None:
            return stored.view_as(stored)
        return x.new_zeros(()).expand(x.shape[0], weight.shape[0], *box)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        stride, pads, dilation, groups = ctx.numbers
        found = torch.ops.aten.convolution_backward(
            gradients[0], x, weight, ctx.bias, stride, pads, dilation, False, (0, 0), groups, ctx.needs_input_grad[:3]
        )
        return (*found, None, None, None, None, None, None)


def convolve_transposed(patch: Patch, rules: Rules, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Return the box of a transposed convolution; rows that no row of the input reaches are the bias alone."""
    stride, dilation = tuple(r.stride for r in rules), tuple(r.dilation for r in rules)
    whole = F.conv_transpose2d(patch.tensor, weight, None, stride, 0, 0, groups, dilation)
    pads = []
    for axis, rule in reversed(list(enumerate(rules))):
        start = patch.have[axis].start * rule.stride - rule.padding
        box, has = patch.box[axis], Span(start, start + whole.shape[2 + axis])
        first, last = max(box.start, has.start), min(box.stop, has.stop)
        if first >= last:
            whole, first, last = whole.narrow(2 + axis, 0, 0), box.start, box.start
        elif (first, last) != has:
            whole = whole.narrow(2 + axis, first - has.start, last - first)
        pads += [first - box.start, box.stop - last]
    if any(pads):
        whole = F.pad(whole, pads)
    return whole if bias is None else whole + bias[:, None, None]


def shuffle(patch: Patch, factor: int) -> Tensor:
    """Return the box of a pixel shuffle."""
    whole = F.pixel_shuffle(patch.tensor, factor)
    for axis in (0, 1):
        first = patch.box[axis].start - patch.have[axis].start * factor
        whole = whole.narrow(2 + axis, first, patch.box[axis].size)
    return whole


def pool_max(patch: Patch, rules: Rules) -> Tensor:
    """Return the box of a max pool."""
    rows, columns = rules
    kernel, stride = (rows.kernel, columns.kernel), (rows.stride, columns.stride)
    dilation = rows.dilation, columns.dilation
    (top, bottom), (left, right) = patch.pads
    if top == bottom and left == right and 2 * top <= kernel[0] and 2 * left <= kernel[1]:
        return F.max_pool2d(patch.tensor, kernel, stride, (top, left), dilation)
    return F.max_pool2d(patch.padded(-math.inf), kernel, stride, 0, dilation)


def pool_mean(patch: Patch, rules: Rules, counts_pads: bool, divisor: int | None) -> Tensor:
    """Return the box of an average pool.

    Args:
        counts_pads: rows padded by the operation count in the mean; those that only a last, wider window adds do not.
        divisor: of every window; None: the rows and columns that count.
    """
    kernel, stride = tuple(rule.kernel for rule in rules), tuple(rule.stride for rule in rules)
    if divisor is not None:
        return F.avg_pool2d(patch.padded(), kernel, stride, divisor_override=divisor)
    limits = [_counting_rows(rule, side, counts_pads) for rule, side in zip(rules, patch.sides, strict=True)]
    sizes = list(zip(patch.box, rules, limits, strict=True))
    if all(
        limit.start <= box.start * rule.stride - rule.before
        and (box.stop - 1) * rule.stride - rule.before + rule.kernel <= limit.stop
        for box, rule, limit in sizes
    ):
        return F.avg_pool2d(patch.padded(), kernel, stride)
    sums = F.avg_pool2d(patch.padded(), kernel, stride, divisor_override=1)
    counts: list[Tensor] = []
    for box, rule, limit in sizes:
        starts = torch.arange(*box, device=sums.device) * rule.stride - rule.before
        counts.append(((starts + rule.kernel).clamp(max=limit.stop) - starts.clamp(min=limit.start)).to(sums.dtype))
    return sums / (counts[0][:, None] * counts[1])


def _counting_rows(rule: Window, side: int, counts_pads: bool) -> Span:
    """Return the rows, of the image and padded, that count in means."""
    return Span(-rule.before, side + rule.after) if counts_pads else Span(0, side)


def resample(patch: Patch, rules: tuple[Resample, Resample]) -> Tensor:
    """Return the box of a bilinear or nearest resampling, by torch's own formula in its own precision."""
    value = patch.tensor
    wide = torch.float64 if value.dtype == torch.float64 else torch.float32
    for axis, rule in enumerate(rules):
        side, first = patch.sides[axis], patch.have[axis].start
        rows = torch.arange(*patch.box[axis], device=value.device, dtype=wide)
        scale = rule.scale(side)
        if rule.how.startswith("nearest"):
            at = ((rows + 0.5) * scale if rule.how == "nearest-exact" else rows * scale).long().clamp(max=side - 1)
            value = value.index_select(2 + axis, at - first)
            continue
        at = rows * scale if rule.how == "corners" else ((rows + 0.5) * scale - 0.5).clamp(min=0)
        low = at.long().clamp(max=side - 1)
        weight = (at - low).clamp(0, 1).to(value.dtype).reshape((-1, 1) if axis == 0 else (-1,))
        below = value.index_select(2 + axis, low - first)
        value = below + (value.index_select(2 + axis, (low + 1).clamp(max=side - 1) - first) - below) * weight
    return value


def mirrored(patch: Patch, rules: tuple[Mirrored, Mirrored]) -> Tensor:
    """Return the box of a map padded by rows and columns of its own."""
    value = patch.tensor
    for axis, rule in enumerate(rules):
        box, have, last = patch.box[axis], patch.have[axis], patch.sides[axis] - 1
        if (box.start - rule.before, box.stop - rule.before) == have:
            continue
        rows = torch.arange(*box, device=value.device) - rule.before  # as Mirrored.source, without a host tensor
        if rule.how == "reflect":
            rows = rows.abs()
            rows = torch.minimum(rows, 2 * last - rows)
        value = value.index_select(2 + axis, rows.clamp(0, last) - have.start)
    return value


def convolve_mirrored(
    patch: Patch, rules: tuple[Chained, Chained], weight: Tensor, bias: Tensor | None, groups: int
) -> Tensor:
    """Return the box of a convolution of a map padded by rows and columns of its own."""
    pads: Any = tuple(rule.first for rule in rules)
    windows: Any = tuple(rule.then for rule in rules)
    inner = tuple(windows[axis].need(patch.box[axis], pads[axis].out(patch.sides[axis])) for axis in (0, 1))
    wide = mirrored(replace(patch, box=(inner[0], inner[1])), pads)
    stride, dilation = tuple(rule.stride for rule in windows), tuple(rule.dilation for rule in windows)
    return F.conv2d(wide, weight, bias, stride, 0, dilation, groups)


def pool_adaptive(patch: Patch, rules: tuple[AdaptivePool, AdaptivePool]) -> Tensor:
    """Return the box of an average pool to cells, which may overlap."""
    value = patch.tensor
    for axis, rule in enumerate(rules):
        cells = [rule.need(Span(cell, cell + 1), patch.sides[axis]) for cell in range(*patch.box[axis])]
        means = [
            value.narrow(2 + axis, rows.start - patch.have[axis].start, rows.size).mean(2 + axis) for rows in cells
        ]
        value = torch.stack(means, 2 + axis)
    return value
