"""State of a microbatch in a stage between forward and backward, and the versions of weights that microbatches use.

Weight stashing of PipeDream (Harlap et al., 2018, section 3.3): the backward pass of a microbatch uses the weights of
its forward pass, though other microbatches have updated the stage since. An update of weights in use makes new
``Parameter`` objects and changes those. Changing the old ones is no option: autograd refuses a change in place, and
after ``parameter.data = ...`` a convolution computes its gradients with the new weights, without an error.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from parallel.offload.saved_tensors import CheckpointedSegment


class GradCapture:
    """Gradient of one received tensor that needs one; the stage does not need to hold the tensor.

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


Version = tuple[nn.Parameter, ...]


class WeightVersions:
    """The newest weights of a module, and the older ones that microbatches in flight use.

    Args:
        module: whose trained parameters have versions. Buffers and frozen parameters have none.
    """

    def __init__(self, module: nn.Module) -> None:
        numbers: dict[nn.Parameter, int] = {}
        # A parameter may be held by several modules.
        self._places = [
            (owner, name, numbers.setdefault(parameter, len(numbers)))
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None and parameter.requires_grad
        ]
        self._newest: Version = tuple(numbers)
        self._used: dict[int, Version] = {}
        self._gradients: dict[int, list[Tensor | None]] = {}

    def begin(self, i: int) -> None:
        """Let microbatch ``i``, whose forward pass follows, use the newest weights."""
        _drop_gradients(self._newest)
        self._used[i] = self._newest

    @contextlib.contextmanager
    def of(self, i: int) -> Iterator[None]:
        """Return a context in which the module has the weights that microbatch ``i`` uses, without gradients; those
        that they are given wait for ``update``."""
        used, newest = self._used[i], self._newest
        _drop_gradients((*newest, *used))
        if used is not newest:
            self._put(used)
        try:
            yield
        finally:
            self._gradients[i] = [parameter.grad for parameter in used]
            _drop_gradients(used)
            if used is not newest:
                self._put(newest)

    def update(self, i: int, step: Callable[[Mapping[nn.Parameter, nn.Parameter]], None]) -> None:
        """Apply the gradients of microbatch ``i`` to the newest weights.

        Args:
            step: updates parameters by their gradients; is given those that take the place of others.
        """
        gradients = self._gradients.pop(i)
        del self._used[i]
        in_use = any(version is self._newest for version in self._used.values())
        new = self._renew() if in_use else {}
        for parameter, gradient in zip(self._newest, gradients, strict=True):
            parameter.grad = gradient
        step(new)

    def _renew(self) -> dict[nn.Parameter, nn.Parameter]:
        """Make copies the newest weights; return them by those that they are copies of."""
        new = {old: nn.Parameter(old.detach().clone()) for old in self._newest}
        self._newest = tuple(new.values())
        self._put(self._newest)
        return new

    def clear(self) -> None:
        """Forget the microbatches in flight."""
        self._used.clear()
        self._gradients.clear()

    def _put(self, version: Version) -> None:
        for owner, name, number in self._places:
            setattr(owner, name, version[number])  # recurrent layers note it


def _drop_gradients(version: Version) -> None:
    for parameter in version:
        parameter.grad = None
