"""Sums over the members of a team, and what stands for a value on members that do not compute it; with gradients.

L is the sum of what each member computes of it. So the gradient of a sum is the sum of the members' gradients of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from parallel.team.link import TeamLink


def summed(link: TeamLink, value: Tensor) -> Tensor:
    """Return the sum of all members' values."""
    total: Tensor = _Total.apply(value, link.sum(value), link)
    return total


def echoed(link: TeamLink, value: Tensor) -> Tensor:
    """Return ``value``, which is the same on every member; its gradient is summed over them."""
    echo: Tensor = _Total.apply(value, value, link)
    return echo


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, total: Tensor, link: TeamLink) -> Tensor:
        ctx.link = link
        return total.clone()  # what follows may change it in place, as dropout does, and a tape keeps it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.link.sum_back(gradients[0]), None, None


def silent(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return nothing, in the place of what member 0 makes of ``tensors``; backward gives them zeros, so that a member
    comes to every sum and exchange that the others come to."""
    if not tensors:
        return torch.empty(0, device=device)
    nothing: Tensor = _Silent.apply(*tensors)
    return nothing


class _Silent(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.forms)
