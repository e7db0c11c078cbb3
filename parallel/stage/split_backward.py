"""A backward pass in two halves: gradients of the inputs at once, those of the weights when there is time.

Takes a module; convolutions and linear layers put off their weight and bias gradients, everything else gets its own
within the first half. Gradients are those of plain autograd, and nothing is computed twice. This is the split of the
backward pass in Qi et al., Zero Bubble Pipeline Parallelism (2023), sections 1 and 2.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.overrides import TorchFunctionMode

from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.packing import SavedTensor

KINDS = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose weight gradient can wait. Subclasses may compute something else and are left alone."""


class DeferredWeights:
    """The weight gradients of a module that wait for ``backward_weight``.

    Holds no global state: ranks that are threads of one process each have one, over their own modules.

    Args:
        module: layers are found once, here.
        meter: told what is kept between the two halves.

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
        """Return a context whose forward pass leaves in ``waiting`` what its backward pass puts off."""
        return _Redirection({id(layer.weight) for layer in self._layers}, waiting, self._meter)

    def backward_weight(self, key: Hashable) -> None:
        """Add the gradients that the backward pass of ``key`` put off to ``.grad``, and free what was kept."""
        waiting = self._waiting.pop(key)
        waiting.reverse()
        while waiting:
            waiting.pop().accumulate()


class LayerOperation(Protocol):
    """The arithmetic of a layer without its parameters."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output of the layer."""
        ...

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x`` from that of the output."""
        ...

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias that are ``wanted``; the values of ``weight`` do not matter."""
        ...


@dataclass(frozen=True)
class DeferredConvolution:
    """A convolution of maps in n dims, or a transposed one; by torch's words for them."""

    stride: list[int]
    padding: list[int]
    dilation: list[int]
    transposed: bool
    output_padding: list[int]
    groups: int

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output: (n, channels out, ...)."""
        result: Tensor = torch.ops.aten.convolution.default(x, weight, bias, *self._geometry)
        return result

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x``: (n, channels in, ...)."""
        result: Tensor = self._backward(gradient, x, weight, None, [True, False, False])[0]
        return result

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias, None for one that is not wanted."""
        channels = gradient.shape[1]
        result: Sequence[Tensor | None] = self._backward(gradient, x, weight, [channels], [False, *wanted])
        return result[1:]

    @property
    def _geometry(self) -> tuple[Any, ...]:
        return self.stride, self.padding, self.dilation, self.transposed, self.output_padding, self.groups

    def _backward(self, gradient: Tensor, x: Tensor, weight: Tensor, sizes: list[int] | None, mask: list[bool]) -> Any:
        return torch.ops.aten.convolution_backward.default(gradient, x, weight, sizes, *self._geometry, mask)


class Linear:
    """A linear layer over the last dim of its input."""

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the output: (..., features out)."""
        return F.linear(x, weight, bias)

    def input_gradient(self, gradient: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        """Return the gradient of ``x``: (..., features in)."""
        return gradient @ weight

    def parameter_gradients(
        self, gradient: Tensor, x: Tensor, weight: Tensor, wanted: tuple[bool, bool]
    ) -> Sequence[Tensor | None]:
        """Return the gradients of weight and bias, None for one that is not wanted."""
        rows = gradient.reshape(-1, gradient.shape[-1])
        return (
            rows.t() @ x.reshape(-1, x.shape[-1]) if wanted[0] else None,
            rows.sum(0) if wanted[1] else None,
        )


@dataclass
class _Waiting:
    """One use of a layer, as it waits between the two halves."""

    operation: LayerOperation
    weight: Tensor
    bias: Tensor | None
    gradient: Tensor
    x: Tensor
    kept: list[SavedTensor]

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of weight and bias to their ``.grad``, and call the hooks that wait for that."""
        # Autograd would have gone through the weight as cast by autocast.
        weight = self.weight
        like = weight if weight.dtype == self.x.dtype else torch.empty_like(weight, dtype=self.x.dtype)
        wanted = weight.requires_grad, self.bias is not None and self.bias.requires_grad
        gradients = self.operation.parameter_gradients(self.gradient, self.x, like, wanted)
        for parameter, gradient in zip((weight, self.bias), gradients, strict=True):
            if parameter is None or gradient is None:
                continue
            if parameter.grad is not None:
                parameter.grad += gradient
            elif gradient.dtype == parameter.dtype and gradient.stride() == parameter.stride():
                parameter.grad = gradient
            else:
                parameter.grad = torch.empty_like(parameter).copy_(gradient)
            # As autograd does once it has added to a gradient; the sum over ranks is told so.
            for hook in (parameter._post_accumulate_grad_hooks or {}).values():
                hook(parameter)


class _InputGradientOnly(torch.autograd.Function):
    """One use of a layer in autograd's graph. Its weight is an argument so that the output needs a gradient even if the
    input does not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        operation: LayerOperation,
        waiting: list[_Waiting],
        meter: ActivationMeter | None,
    ) -> Tensor:
        cast = weight.to(x.dtype)
        ctx.save_for_backward(x, cast)
        ctx.use = operation, weight, bias, waiting, meter
        output = operation.forward(x, cast, None if bias is None else bias.to(x.dtype))
        # Torch's linear of maps gives a view of what it made for it alone; in-place operations on that are refused.
        return output.data if output._is_view() else output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, cast = ctx.saved_tensors
        operation, weight, bias, waiting, meter = ctx.use
        x = x.detach()
        kept = [SavedTensor(tensor, meter) for tensor in (x, gradient)] if meter else []
        waiting.append(_Waiting(operation, weight, bias, gradient, x, kept))
        input_gradient = operation.input_gradient(gradient, x, cast) if ctx.needs_input_grad[0] else None
        return input_gradient, None, None, None, None, None


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
        redirected = _REDIRECTED.get(func)
        if redirected is None or len(args) < 3 or kwargs or id(args[1]) not in self._weights:
            return func(*args, **(kwargs or {}))
        x, weight, bias = args[:3]
        if not (weight.requires_grad and torch.is_grad_enabled()):
            return func(*args)
        return redirected(_as_autocast(x), weight, bias, self._apply, *args[3:])

    def _apply(self, x: Tensor, weight: Tensor, bias: Tensor | None, operation: LayerOperation) -> Tensor:
        result: Tensor = _InputGradientOnly.apply(x, weight, bias, operation, self._waiting, self._meter)
        return result


_Apply = Callable[[Tensor, Tensor, Tensor | None, LayerOperation], Tensor]


def _convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    apply: _Apply,
    stride: Sequence[int],
    padding: Sequence[int] | str,
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    dims = weight.dim() - 2
    if padding == "valid":
        padding = [0] * dims
    elif padding == "same":
        # As torch does: the odd row or column more is on the far side.
        total = [d * (size - 1) for d, size in zip(dilation, weight.shape[2:], strict=True)]
        padding = [t // 2 for t in total]
        if any(t % 2 for t in total):
            x = F.pad(x, [side for t in reversed(total) for side in (0, t % 2)])
    operation = DeferredConvolution(list(stride), [int(p) for p in padding], list(dilation), False, [0] * dims, groups)
    return _batched(x, weight, bias, apply, operation)


def _transposed_convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    apply: _Apply,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
) -> Tensor:
    operation = DeferredConvolution(list(stride), list(padding), list(dilation), True, list(output_padding), groups)
    return _batched(x, weight, bias, apply, operation)


def _batched(x: Tensor, weight: Tensor, bias: Tensor | None, apply: _Apply, operation: DeferredConvolution) -> Tensor:
    if x.dim() == weight.dim():
        return apply(x, weight, bias, operation)
    return apply(x[None], weight, bias, operation)[0]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, apply: _Apply) -> Tensor:
    return apply(x, weight, bias, Linear())


_REDIRECTED: dict[Any, Callable[..., Tensor]] = {
    F.conv1d: _convolution,
    torch.conv2d: _convolution,
    F.conv3d: _convolution,
    F.conv_transpose1d: _transposed_convolution,
    F.conv_transpose2d: _transposed_convolution,
    F.conv_transpose3d: _transposed_convolution,
    F.linear: _linear,
}


def _as_autocast(x: Tensor) -> Tensor:
    """Return ``x`` in the type that autocast computes convolutions and matrix products in, if it is switched on."""
    device = x.device.type
    if not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


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
