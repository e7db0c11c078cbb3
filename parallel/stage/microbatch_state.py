"""The state of one microbatch in a stage between forward and backward, and where gradients enter and leave it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from parallel.offload.saved_tensors import CheckpointedSegment


class GradCapture:
    """Gradient of one received tensor that needs one; the stage need not hold the tensor.

    Autograd's graph keeps its leaves. ``capture_grad`` returns an alias of the value, which is freed once no layer uses
    it and autograd has not saved it.
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

    def captured(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or not leaf.requires_grad:
            return leaf
        captures.append(GradCapture(leaf))
        anchor = torch.zeros((), requires_grad=True)
        return _CaptureGrad.apply(anchor, leaf.detach(), captures[-1])

    return tree_map(captured, value), captures


@dataclass
class MicrobatchState:
    """State of one microbatch in a stage between forward and backward.

    Attributes:
        values: received, by name; their tensors are leaves of this stage's part of the autograd graph. None where
            activations go to the host.
        segment: the whole stage, where it is recomputed.
        roots: by name of the value given: where its gradients enter.
        captures: by name of the value received: where its gradients end up, where activations go to the host.
    """

    values: dict[str, Any]
    segment: CheckpointedSegment | None = None
    roots: dict[str, list[GradientEdge]] = field(default_factory=dict)
    captures: dict[str, list[GradCapture]] = field(default_factory=dict)


def edges_of(value: Any) -> list[GradientEdge]:
    """Return the edges of the tensors of ``value`` that a gradient comes back for."""
    return [get_gradient_edge(leaf) for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and leaf.requires_grad]


def gradients_of(value: Any) -> list[Tensor]:
    """Return gradients of the leaves of ``value`` that need one, taken out of them; zeros where nothing flowed back."""
    gradients = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            gradients.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
            leaf.grad = None
    return gradients


def renew_buffers(module: nn.Module, names: Collection[str]) -> None:
    """Put copies in the place of the buffers ``names``: earlier microbatches keep or sent the old ones."""
    copies: dict[int, Tensor] = {}
    for name in names:
        path, _, last = name.rpartition(".")
        owner = module.get_submodule(path)
        state: dict[str, Any] = owner._buffers if last in owner._buffers else owner._parameters
        if (tensor := state[last]) is not None:
            copy = nn.Parameter(tensor.clone(), False) if isinstance(tensor, nn.Parameter) else tensor.clone()
            state[last] = copies.setdefault(id(tensor), copy)
