"""A backward pass in two halves: gradients of the inputs first, those of the weights when there is time.

Takes a module; convolutions and linear layers defer their weight and bias gradients, everything else gets its own
within the first half. Each use of such a layer has an autograd graph of one operation: the first half asks it for the
gradient of the input, the second half for those of the parameters. Both are those of plain autograd, computed once.
This is the split of the backward pass in Qi et al., Zero Bubble Pipeline Parallelism
(2023), sections 1 and 2. ``torch.distributed.pipelining`` asks one graph of the whole stage twice, which keeps all
activations until the second half, and computes gradients between two weights twice.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, saved_tensors_hooks
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from parallel.offload.packing import ActivationMeter, SavedTensor, storages_of
from parallel.stage.microbatch_state import capture_grad

KINDS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d, nn.Linear)
"""Layers whose weight gradient can wait. Subclasses may compute something else and are left alone."""

FUNCTIONS = {F.conv1d, torch.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d, F.linear}
"""What these layers call, with (input, weight, bias, ...)."""


class DeferredWeights:
    """The weight gradients of a module that wait for ``backward_weight``.

    Holds no global state: ranks that are threads of one process each have one, over their own modules.

    Args:
        module: layers are found once, here.
        meter: notified of what is saved between the two halves.

    Raises:
        ValueError: the split would not be exact, or no layer has a weight gradient that can wait.
    """

    def __init__(self, module: nn.Module, meter: ActivationMeter | None = None) -> None:
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, KINDS)}
        faults = [f"{name or 'the module'} {fault}" for name, layer in layers.items() for fault in _faults(layer)]
        plain = [layer for layer in layers.values() if type(layer) in KINDS]
        if not faults and not plain:
            faults = ["it has no convolution or linear layer whose weight gradient can wait"]
        if faults:
            raise ValueError(
                f"the backward pass of {type(module).__name__} cannot be split: {'; '.join(faults)}; "
                "choose a schedule without split backward, or change these layers"
            )
        self._layers = plain
        self._meter = meter
        self._waiting: dict[Hashable, list[_Waiting]] = {}

    @contextmanager
    def recording(self, key: Hashable) -> Iterator[None]:
        """Record what layers will need for their weight gradients, around the forward pass of one microbatch, which
        ``key`` names until ``backward_weight``.

        What an earlier pass of the same key still keeps is dropped: that step was given up.
        """
        waiting: list[_Waiting] = []
        self._waiting[key] = waiting
        with self.redirecting(waiting):
            yield

    def redirecting(self, waiting: list[_Waiting]) -> TorchFunctionMode:
        """Return a context whose forward pass leaves in ``waiting`` what its backward pass defers."""
        return _Redirection({id(layer.weight) for layer in self._layers}, waiting, self._meter)

    def backward_weight(self, key: Hashable) -> None:
        """Add the gradients that the backward pass of ``key`` deferred to ``.grad``, and free what was kept."""
        waiting = self._waiting.pop(key)
        waiting.reverse()
        while waiting:
            use = waiting.pop()
            torch.autograd.backward([use.output], [use.gradient], inputs=use.parameters)


@dataclass
class _Waiting:
    """One use of a layer, as it waits between the two halves: ``kept`` is counted meanwhile."""

    output: GradientEdge
    gradient: Tensor
    parameters: list[Tensor]
    kept: list[SavedTensor]


class _InputGradientOnly(torch.autograd.Function):
    """One use of a layer; its weight is an argument so that the output needs a gradient even if the input does not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        call: Callable[..., Tensor],
        waiting: list[_Waiting],
        meter: ActivationMeter | None,
    ) -> Tensor:
        saved: list[Tensor] = []

        def save(tensor: Tensor) -> int:
            saved.append(tensor.detach())
            return len(saved) - 1

        with torch.enable_grad(), saved_tensors_hooks(save, saved.__getitem__):
            x, captures = capture_grad(x)  # not a leaf, which the graph would keep on the device
            output = call(x, weight, bias)
        ctx.save_for_backward(*saved)  # what the graph of the layer saves may leave for the host meanwhile
        saved.clear()
        parameters = [weight] if bias is None or not bias.requires_grad else [weight, bias]
        entry = [get_gradient_edge(x)] if captures else []
        ctx.use = get_gradient_edge(output), entry, parameters, saved, waiting, meter
        return output.data  # no view, even of what torch made for it alone: it may be changed in place

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        output, entry, parameters, saved, waiting, meter = ctx.use
        saved.extend(ctx.saved_tensors)
        state = storages_of(parameters)
        kept = [tensor for tensor in (*saved, gradient) if meter and tensor.untyped_storage().data_ptr() not in state]
        waiting.append(_Waiting(output, gradient, parameters, [SavedTensor(tensor, meter) for tensor in kept]))
        given = torch.autograd.grad([output], entry, [gradient], retain_graph=True) if entry else (None,)
        return *given, None, None, None, None, None


class _Redirection(TorchFunctionMode):
    """A mode that sends the layers' own calls into ``_InputGradientOnly``, on this thread; the module is untouched."""

    def __init__(self, weights: set[int], waiting: list[_Waiting], meter: ActivationMeter | None) -> None:
        super().__init__()
        self._weights = weights
        self._waiting = waiting
        self._meter = meter

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func not in FUNCTIONS or len(args) < 3 or kwargs or id(args[1]) not in self._weights:
            return func(*args, **(kwargs or {}))
        if not (args[1].requires_grad and torch.is_grad_enabled()):
            return func(*args)

        def call(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            output: Tensor = func(x, weight, bias, *args[3:])
            return output

        return _InputGradientOnly.apply(*args[:3], call, self._waiting, self._meter)


def _faults(layer: nn.Module) -> Iterator[str]:
    """Yield why the weight gradient of ``layer`` cannot wait, although its kind would let it."""
    if is_parametrized(layer):
        yield "has a parametrized weight"
        return
    if type(layer) not in KINDS:
        return
    if "weight" not in layer._parameters:
        yield "computes its weight from other parameters"
        return
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    if any(hooks):
        yield "has hooks"
    for name, parameter in layer.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            yield f"has hooks on its {name}"
