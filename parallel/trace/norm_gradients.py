"""Gradients of batch and instance norm of one tile, in a layout that torch's backward pass reads right.

With one tile the stride of the first dim says nothing, and a view leaves any number there. Torch's batch norm on CPUs,
which instance norm is made of, takes a channels_last gradient of such a stride for a contiguous one and gives another
input gradient (seen in 2.14 and 2.15; ``test_norm_gradients.py`` says when it is no longer needed).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

_MENDED = "_megatile_gradient_layout"


def mend_norm_gradients() -> None:
    """Give ``F.batch_norm`` and ``F.instance_norm`` gradients in a plain layout from now on in this process: in layers,
    subclasses and a model's own forward, traced or not."""
    for name, plain in (("batch_norm", _with_plain_stride), ("instance_norm", _contiguous)):
        function = getattr(F, name)
        if not hasattr(function, _MENDED):
            setattr(F, name, _mended(function, plain))


def _mended(function: Callable[..., Any], plain: Callable[[Tensor], Tensor]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        images: Any = args[0] if args else kwargs.get("input")
        if issubclass(type(images), fx.Proxy):  # traced: this is what the graph is to call
            return images.tracer.create_proxy("call_function", call, args, kwargs)
        output = function(*args, **kwargs)
        # Compiled code has a backward pass of its own.
        alone = isinstance(output, Tensor) and output.requires_grad and len(output) == 1
        if alone and not torch.compiler.is_compiling():
            output.register_hook(plain)
        return output

    setattr(call, _MENDED, True)
    # What torch.jit.script compiles in its place: scripted modules are as they were.
    vars(call).update({"__script_if_tracing_wrapper": True, "__original_fn": function})
    return call


def _with_plain_stride(gradient: Tensor) -> Tensor:
    """Return the same memory with the stride that a second tile would need."""
    strides = gradient.stride()
    plain = gradient[0].numel()
    return gradient if strides[0] == plain else gradient.as_strided(gradient.shape, (plain, *strides[1:]))


def _contiguous(gradient: Tensor) -> Tensor:
    """Return a contiguous copy: the view inside instance norm would give another layout its stride again."""
    return gradient.contiguous()
