"""Gradients of what a stage received, caught without the stage holding what it received.

A leaf of autograd's graph lives as long as the graph. What goes through ``arrived`` instead is only alias of the value:
it lives as long as layers use it or autograd saves it, and its gradient is kept here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map


class Arrival:
    """The gradient of one received tensor that asks for one."""

    def __init__(self, tensor: Tensor) -> None:
        self.gradient: Tensor | None = None
        self._form = tensor.shape, tensor.stride(), tensor.dtype, tensor.device

    def take(self) -> Tensor:
        """Return the gradient and let go of it; zeros where nothing flowed back."""
        gradient, self.gradient = self.gradient, None
        if gradient is not None:
            return gradient
        shape, strides, dtype, device = self._form
        return torch.empty_strided(shape, strides, dtype=dtype, device=device).zero_()


class _Arrive(torch.autograd.Function):
    """The identity; its backward pass leaves the gradient with the arrival. The anchor makes the output ask for one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, arrival: Arrival) -> Tensor:
        ctx.arrival = arrival
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.arrival.gradient = gradient
        return None, None, None


def arrived(value: Any) -> tuple[Any, list[Arrival]]:
    """Return ``value`` as a stage is to use it, and the arrivals of its tensors that ask for a gradient, in order."""
    arrivals: list[Arrival] = []

    def enter(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        arrivals.append(Arrival(leaf))
        anchor = torch.zeros((), requires_grad=True)
        return _Arrive.apply(anchor, leaf.detach(), arrivals[-1])

    return tree_map(enter, value), arrivals
