"""Functions of torch whose backward pass is wrong on CPUs, replaced for the whole process: in layers, subclasses and a
model's own forward, traced or not. ``test_patched_kernels.py`` reports when torch no longer needs it.

- Batch norm, which instance norm is made of, takes a channels_last gradient of one tile for a contiguous one where a
  view has left any number as the stride of the first dim. Its input gradient is wrong then (torch 2.14 and 2.15). The
  gradient gets a layout that torch reads right.
- oneDNN copies the input of ``Conv2d(8, 8, 1, stride=2)`` into a buffer that is too small, and writes up to megabytes
  past its end: in channels_last, float32 and bfloat16, with 2 to 15 input channels, one group, no padding, and sides of
  64 px or more that the stride divides (torch 2.14). The pixels that the stride leaves are taken first, and convolved
  with stride 1: the same sums.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

CHANNELS = 32
"""Input channels from which on strided convolutions are right: 16 where vectors hold 16 numbers, and as many again for
safety. The layers of ResNets, with 64 and more, stay as they are."""

_PATCHED = "_megatile_patched"


def patch_kernels() -> None:
    """Replace ``F.batch_norm``, ``F.instance_norm`` and ``F.conv2d`` in this process from now on."""
    for name, relayout in (("batch_norm", with_plain_stride), ("instance_norm", Tensor.contiguous)):
        function = getattr(F, name)
        if not hasattr(function, _PATCHED):
            setattr(F, name, _patched_norm(function, relayout))
    F.conv2d = conv2d  # type: ignore[assignment]


def _patched_norm(function: Callable[..., Any], relayout: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        images: Any = args[0] if args else kwargs.get("input")
        if issubclass(type(images), fx.Proxy):  # the graph is to call this
            return images.tracer.create_proxy("call_function", call, args, kwargs)
        output = function(*args, **kwargs)
        # Compiled code has a backward pass of its own.
        alone = isinstance(output, Tensor) and output.requires_grad and len(output) == 1
        if alone and not torch.compiler.is_compiling():
            output.register_hook(relayout)
        return output

    # torch.jit.script compiles the original in its place: scripted modules are as they were.
    vars(call).update({_PATCHED: True, "__script_if_tracing_wrapper": True, "__original_fn": function})
    return call


def with_plain_stride(gradient: Tensor) -> Tensor:
    """Return the same memory, of one tile, with the stride that a second tile would need."""
    strides, plain = gradient.stride(), gradient.numel()
    if len(gradient) != 1 or strides[0] == plain:
        return gradient
    return gradient.as_strided(gradient.shape, (plain, *strides[1:]))


def conv2d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: int | Sequence[int] = 1,
    padding: str | int | Sequence[int] = 0,
    dilation: int | Sequence[int] = 1,
    groups: int = 1,
) -> Tensor:
    """Return what ``torch.conv2d`` does."""
    if issubclass(type(input), fx.Proxy):  # the graph is to call this
        given: Any = (input, weight, bias, stride, padding, dilation, groups)
        proxy: Tensor = input.tracer.create_proxy("call_function", conv2d, given, {})  # type: ignore[attr-defined]
        return proxy
    if groups == 1 and weight.shape[2:] == (1, 1) and weight.shape[1] < CHANNELS and input.device.type == "cpu":
        rows, columns = _pair(stride)
        if (rows > 1 or columns > 1) and (padding == "valid" or _pair(padding) == (0, 0)):  # type: ignore[arg-type]
            channels_last = input.is_contiguous(memory_format=torch.channels_last) and not input.is_contiguous()
            layout = torch.channels_last if channels_last and input.dim() == 4 else torch.contiguous_format
            input, stride = input[..., ::rows, ::columns].contiguous(memory_format=layout), (1, 1)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    """Return ``value`` for rows and for columns."""
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


torch.jit._builtins._register_builtin(conv2d, "aten::conv2d")  # scripted modules are as they were
