"""Parts of a map for those of its users that need fewer rows than others; gradients come back into one tensor.

Autograd would give each part's gradient a tensor of zeros as large as the map, and add those up: a tenth of a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

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

    Whoever uses it whole gives it a gradient in memory that nobody else has, as convolutions and pools do: those of the
    parts are added to it.
    """
    return list(_Parts.apply(value, dims, tuple(cuts)))


class _Parts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, dims: tuple[int, int], cuts: tuple[Cut, ...]) -> Any:
        ctx.set_materialize_grads(False)
        ctx.dims, ctx.cuts = dims, cuts
        ctx.form = (value.shape, value.dtype, value.device, _layout(value))
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


def _layout(value: Tensor) -> torch.memory_format:
    if value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last) and not value.is_contiguous():
        return torch.channels_last
    return torch.contiguous_format
