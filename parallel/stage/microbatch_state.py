"""The state of one microbatch in a stage between forward and backward, and where gradients enter and leave it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from parallel.streaming.images import Boxes
from parallel.team.team_comm import ReplayLog


class GradCapture:
    """Gradient of one received tensor that needs one; the stage need not hold the tensor.

    A leaf of autograd's graph lives as long as the graph. What ``capture_grad`` gives is only an alias of the value: it
    lives as long as layers use it or autograd saves it.
    """

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


class _CaptureGrad(torch.autograd.Function):
    """Identity whose backward pass leaves the gradient in ``capture``. The anchor makes the output need one."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, capture: GradCapture) -> Tensor:
        ctx.capture = capture
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:
        ctx.capture.gradient = gradient
        return None, None, None


def capture_grad(value: Any) -> tuple[Any, list[GradCapture]]:
    """Return ``value`` as a stage is to use it, and the captures of its tensors that ask for a gradient, in order."""
    captures: list[GradCapture] = []

    def enter(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        captures.append(GradCapture(leaf))
        anchor = torch.zeros((), requires_grad=True)
        return _CaptureGrad.apply(anchor, leaf.detach(), captures[-1])

    return tree_map(enter, value), captures


@dataclass
class MicrobatchState:
    """What one microbatch leaves in a stage between forward and backward.

    Attributes:
        tiles: in the microbatch.
        values: received, by name; their tensors are leaves of this stage's part of the autograd graph. Where
            activations go to the host, put away, or gone.
        targets: for the loss, in the last stage.
        random: where the stage's random numbers began: a seed, or a state handed on by an earlier stage.
        recomputed: the first forward pass kept nothing else.
        shape: (n, 3, h, w) of the tiles, for a stage that a team computes.
        log: of what its forward pass received from its team, where it is recomputed.
        roots: by name of the value given: where its gradients enter, None for a tensor that nothing flows back from.
        captures: by name of the value received: where its gradients end up, where activations go to the host.
    """

    tiles: int
    values: dict[str, Any]
    targets: Tensor | Boxes | None
    random: int | Tensor
    recomputed: bool
    shape: tuple[int, ...] = ()
    log: ReplayLog | None = None
    roots: dict[str, list[GradientEdge | None]] = field(default_factory=dict)
    captures: dict[str, list[GradCapture]] = field(default_factory=dict)


def can_need_grad(tensor: Tensor) -> bool:
    """Return whether autograd differentiates the type of ``tensor``: real and complex floating point."""
    return tensor.is_floating_point() or tensor.is_complex()


def edges_of(value: Any, was_promised: bool) -> list[GradientEdge | None]:
    """Return the edges of the tensors of ``value`` that a gradient comes back for.

    Args:
        was_promised: gradients of all of them were asked for, whether anything flows back from there or not.
    """
    tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and can_need_grad(leaf)]
    if was_promised:
        return [get_gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
    return [get_gradient_edge(tensor) for tensor in tensors if tensor.requires_grad]


def promised(value: Any) -> Any:
    """Return ``value`` of a pass without gradients, marked where recomputation will ask for one."""
    return tree_map(
        lambda leaf: leaf.detach().requires_grad_(can_need_grad(leaf)) if isinstance(leaf, Tensor) else leaf,
        value,
    )


def gradients_of(value: Any) -> list[Tensor]:
    """Return gradients of the leaves of ``value`` that need one, taken out of them; zeros where nothing flowed back."""
    gradients = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
    return gradients
