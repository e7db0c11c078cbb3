"""Convolutions with one weight a channel pair and a stride, whose backward pass corrupts the heap on CPUs.

In torch 2.14 oneDNN copies the input of ``Conv2d(8, 8, 1, stride=2)`` into a buffer that is too small, and writes up
to megabytes past its end: in channels_last, float32 and bfloat16, with 2 to 15 input channels, one group, no padding,
and sides of 64 px or more that the stride divides. Here the pixels that the stride leaves are taken first, and
convolved with stride 1: the same sums. ``test_strided_convolution.py`` reports when this is no longer needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

CHANNELS = 32
"""Input channels from which on torch is right: 16 where vectors hold 16 numbers, and as many again for safety. The
layers of ResNets, with 64 and more, stay as they are."""


def mend_strided_convolutions() -> None:
    """Make ``F.conv2d``, which layers call too, the function below from now on in this process."""
    F.conv2d = conv2d  # type: ignore[assignment]


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
    if issubclass(type(input), fx.Proxy):  # traced: the graph is to call this
        given: Any = (input, weight, bias, stride, padding, dilation, groups)
        proxy: Tensor = input.tracer.create_proxy("call_function", conv2d, given, {})  # type: ignore[attr-defined]
        return proxy
    if groups == 1 and weight.shape[2:] == (1, 1) and weight.shape[1] < CHANNELS and input.device.type == "cpu":
        rows, columns = _pair(stride)
        if (rows > 1 or columns > 1) and (padding == "valid" or _pair(padding) == (0, 0)):  # type: ignore[arg-type]
            layout = torch.channels_last if _is_channels_last(input) else torch.contiguous_format
            input, stride = input[..., ::rows, ::columns].contiguous(memory_format=layout), (1, 1)
    return torch.conv2d(input, weight, bias, stride, padding, dilation, groups)


def _pair(value: int | Sequence[int]) -> tuple[int, ...]:
    """``value`` for rows and for columns."""
    return (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]


def _is_channels_last(images: Tensor) -> bool:
    return images.dim() == 4 and images.is_contiguous(memory_format=torch.channels_last) and not images.is_contiguous()


torch.jit._builtins._register_builtin(conv2d, "aten::conv2d")  # scripted modules are as they were
