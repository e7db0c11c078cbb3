"""A piece of a map: the rows and columns that an operation needs; what lies outside the image is yet to be padded.

Gradients of several pieces come back into one tensor. Autograd would give the gradient of each a tensor of zeros as
large as the map, and add those up: a tenth of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from parallel.space.cuts import Span
from parallel.space.team import Box
from parallel.trace.stage_module import layout_of

Cut = tuple[tuple[int, int], tuple[int, int]]
"""(start, size) of rows and of columns."""


def narrowed(value: Tensor, dims: tuple[int, int], cut: Cut) -> Tensor:
    """Return a view of the rows and columns of ``cut``."""
    for dim, (start, size) in zip(dims, cut, strict=True):
        if size != value.shape[dim]:
            value = value.narrow(dim, start, size)
    return value


def with_parts(value: Tensor, dims: tuple[int, int], cuts: Sequence[Cut]) -> list[Tensor]:
    """Return ``value`` and its parts.

    A user of the whole value gives it a gradient in memory of its own, as convolutions and pools do: those of the parts
    are added to it.
    """
    return list(_Parts.apply(value, dims, tuple(cuts)))


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dims: tuple[int, int], cuts: tuple[Cut, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.cuts = dims, cuts
        ctx.form = (value.shape, value.dtype, value.device, layout_of(value))
        return (value.view_as(value), *(narrowed(value, dims, cut) for cut in cuts))

    @staticmethod
    def backward(ctx: Any, whole: Tensor | None, *parts: Tensor | None) -> Any:
        if whole is None:
            shape, dtype, device, layout = ctx.form
            whole = torch.empty(shape, dtype=dtype, device=device, memory_format=layout).zero_()
        for cut, part in zip(ctx.cuts, parts, strict=True):
            if part is not None:
                narrowed(whole, ctx.dims, cut).add_(part)
        return whole, None, None


@dataclass(slots=True)
class Patch:
    """Part of a map as an operation takes it.

    Attributes:
        tensor: the needed rows and columns that the map has.
        need: all that are needed, those outside the map among them.
        have: those of ``tensor``.
        box: those of the output.
        sides: rows and columns of the whole input map.
        dims: of rows and columns in ``tensor``.
    """

    tensor: Tensor
    need: Box
    have: Box
    box: Box
    sides: tuple[int, int]
    dims: tuple[int, int]

    @property
    def pads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows missing (before, after), columns missing (before, after)."""
        (rows, columns), (need_rows, need_columns) = self.have, self.need
        return (
            (rows.start - need_rows.start, need_rows.stop - rows.stop),
            (columns.start - need_columns.start, need_columns.stop - columns.stop),
        )

    def padded(self, fill: float = 0.0) -> Tensor:
        """Return all that is needed of an (n, c, h, w) map, ``fill`` where the map has nothing."""
        (top, bottom), (left, right) = self.pads
        if not (top or bottom or left or right):
            return self.tensor
        return F.pad(self.tensor, (left, right, top, bottom), value=fill)


def need_and_have(need: Span, has: Span, side: int) -> tuple[Span, Span]:
    """Return ``need``, and those of its rows that the map, of ``side`` rows, has. Where the map has none of them: as
    many rows next to an empty span of ``has``, and that span."""
    have = need.within(side)
    if have.size:
        return need, have
    place = min(max(need.start, has.start), has.stop)  # beyond the map altogether, before or after it
    return Span(place - need.size, place), Span(place, place)


def cut_of(part: Box, has: Box) -> Cut:
    """Return where ``part`` lies in ``has``."""
    rows, columns = ((inner.start - outer.start, inner.size) for inner, outer in zip(part, has, strict=True))
    return rows, columns


def cut_value(value: Any, dims: tuple[int, int], cut: Cut) -> Any:
    """Return a box of a value; of each map where it is several."""
    if isinstance(value, Tensor):
        return narrowed(value, dims, cut)
    return tuple(cut_value(each, dims, cut) for each in value)
