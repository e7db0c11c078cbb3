"""Calls of torch's kernels, recorded with their arguments, and what CUDA's kernels check that CPU's do not.

``RecordedCalls`` is a dispatch mode for one thread; ``form_faults`` compares calls with those that autograd's own
formulas make; ``cuda_faults`` repeats CUDA's checks.
"""

from __future__ import annotations

import collections
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

ROOT = Path(__file__).parents[2]
KERNELS = (
    "native_batch_norm",
    "native_batch_norm_backward",
    "batch_norm_update_stats",
    "convolution_backward",
)
"""Those that the product calls by hand."""
LARGEST_INDEX = 2**31 - 1


@dataclass(frozen=True)
class Call:
    """A call of a kernel.

    Attributes:
        kernel: its name.
        site: (path, function) of the product that is at work, or None.
        arguments: by name; tensors are kept.
    """

    kernel: str
    site: tuple[str, str] | None
    arguments: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.kernel} at {self.site}"

    @property
    def trains(self) -> bool:
        """Whether a batch norm uses statistics of its input."""
        return bool(self.arguments.get("training", self.arguments.get("train", False)))


class RecordedCalls(TorchDispatchMode):
    """Adds this thread's calls of ``KERNELS`` that compute to ``calls``, backward passes of CPU tensors included."""

    def __init__(self, calls: list[Call]) -> None:
        super().__init__()
        self._calls = calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in KERNELS and not isinstance(args[0], FakeTensor) and not args[0].is_meta:
            names = [argument.name for argument in func._schema.arguments]
            arguments = dict(zip(names, args, strict=False)) | (kwargs or {})
            self._calls.append(Call(name, _site(), arguments))
        return func(*args, **(kwargs or {}))


def _site() -> tuple[str, str] | None:
    """Return the innermost function outside torch, if it is of the product."""
    frame: Any = sys._getframe(2)
    while frame is not None and Path(frame.f_code.co_filename).is_relative_to(Path(torch.__file__).parent):
        frame = frame.f_back
    path, function = (
        Path(frame.f_code.co_filename),
        frame.f_code.co_qualname.partition(".<locals>")[0].rpartition(".")[2],
    )
    return (str(path.relative_to(PRODUCT)), function) if path.is_relative_to(PRODUCT) else None


PRODUCT = Path(sys.modules["parallel"].__file__ or "").parents[1] if "parallel" in sys.modules else ROOT


def form(name: str, value: Any, like: Tensor) -> tuple[Any, ...]:
    """Return the form of an argument: whether it is defined, its type against that of the images ``like``, its rank,
    and its layout where it is a vector."""
    if isinstance(value, Tensor):
        layout = value.is_contiguous() if value.dim() == 1 else None
        return "empty" if not value.numel() else "tensor", value.dtype, like.dtype, value.dim(), layout
    if isinstance(value, (list, tuple)):
        return "list", len(value), *sorted({type(each).__name__ for each in value})
    if isinstance(value, bool) and name in ("train", "training", "transposed"):
        return "flag", value
    return (type(value).__name__,)


def forms(call: Call) -> dict[str, tuple[Any, ...]]:
    """Return the forms of all arguments, by name."""
    like = call.arguments["input"]
    return {name: form(name, value, like) for name, value in call.arguments.items()}


def form_faults(calls: Iterable[Call], reference: Iterable[Call]) -> list[str]:
    """Return the arguments of ``calls`` whose form no call of the same kernel and mode in ``reference`` has."""
    known: dict[tuple[str, bool, str], set[Any]] = collections.defaultdict(set)
    for call in reference:
        for name, shape in forms(call).items():
            known[call.kernel, call.trains, name].add(shape)
    return sorted(
        {
            f"{call}: {name} is {shape}, autograd passes {sorted(known[call.kernel, call.trains, name], key=str)}"
            for call in calls
            for name, shape in forms(call).items()
            if shape not in known[call.kernel, call.trains, name]
        }
    )


def cuda_faults(call: Call) -> list[str]:
    """Return what CUDA's kernel refuses of a call that the CPU's takes, as read in aten/src/ATen/native."""
    checks = _batch_norm_checks(call) if "norm" in call.kernel else _convolution_checks(call)
    tensors = [value for value in call.arguments.values() if isinstance(value, Tensor)]
    # Every kernel: is_same_device / checkAllSameGPU.
    checks["tensors on one device"] = len({tensor.device for tensor in tensors}) == 1
    return [f"{call}: not {check}" for check, passed in checks.items() if not passed]


def _batch_norm_checks(call: Call) -> dict[str, bool]:
    a = call.arguments
    x, mean, variance, weight = a["input"], a.get("running_mean"), a.get("running_var"), a.get("weight")
    parameters = [t for t in (weight, a.get("bias"), mean, variance) if t is not None]
    half = x.dtype in (torch.float16, torch.bfloat16)
    # cuda/Normalization.cu is_mixed_type, and packed_accessor_or_dummy<stat_scalar_t> of Normalization.cuh: parameters
    # and statistics are read as one type, the input's or its accumulation type.
    checks = {
        "parameters and statistics of one type": len({t.dtype for t in parameters}) <= 1,
        "parameters of the input's type, or float32 with half": all(
            t.dtype == x.dtype or (half and t.dtype == torch.float32) for t in parameters
        ),
        # batch_norm_cuda_out and batch_norm_update_stats_cuda: TORCH_CHECK(has_running_mean == has_running_var)
        "both running statistics or neither": (mean is None) == (variance is None),
        # Normalization.cu as_nd: TORCH_INTERNAL_ASSERT(t.defined() && t.dim() == 1)
        "vectors of parameters and statistics": all(t.dim() == 1 for t in parameters),
    }
    if call.kernel == "native_batch_norm" and not call.trains:
        checks["running statistics in evaluation"] = mean is not None  # TORCH_CHECK(has_running_mean)
    if call.kernel == "native_batch_norm_backward":
        saved = a["save_mean"], a["save_invstd"]
        # batch_norm_backward_cuda: TORCH_INTERNAL_ASSERT(save_mean->defined(), "save_mean should always be defined")
        checks["defined save_mean and save_invstd"] = all(t is not None for t in saved)
        # ... else TORCH_CHECK(!train && running_mean->defined())
        checks["values in save_mean, or running statistics in evaluation"] = all(
            t is None or t.numel() or (not call.trains and mean is not None) for t in saved
        )
        # The same accessors: CUDA saves in the accumulation type, the CPU in that of the parameters.
        checks["save_mean and save_invstd of one type, at least the parameters'"] = all(
            t is None or torch.promote_types(t.dtype, p.dtype) == t.dtype for t in saved for p in parameters
        )
        # batch_norm_backward_reduce_cuda: input is read by an accessor of the gradient's type
        checks["gradient of the input's type"] = a["grad_out"].dtype == x.dtype
        # batch_norm_backward_reduce_cuda_template: grad_weight = at::empty({C}, weight_.options())
        checks["a weight where its gradient is wanted"] = weight is not None or not a["output_mask"][1]
    if call.kernel == "batch_norm_update_stats":  # dispatched by input type alone; statistics of the accumulation type
        checks["floating input"] = x.is_floating_point()
    return checks


def _convolution_checks(call: Call) -> dict[str, bool]:
    a = call.arguments
    x, weight, bias = a["input"], a["weight"], a.get("bias")
    dims, gradient = x.dim() - 2, a.get("grad_output")
    others = [t for t in (weight, bias, gradient) if isinstance(t, Tensor)]
    checks = {
        # cudnn/ConvShared.cpp: checkAllSameType(c, {input, weight}); Convolution.cpp check_shape_forward
        "one type of input, weight, bias and gradient": all(t.dtype == x.dtype for t in others),
        "geometry of as many dims as the maps have": all(
            len(a[name]) == dims for name in ("stride", "padding", "dilation", "output_padding")
        ),
        "no negative padding": min(a["padding"]) >= 0,
    }
    if gradient is not None:
        # Convolution.cpp convolution_backward: Empty and dilated backends make grad_bias from bias_sizes
        checks["bias_sizes where the bias's gradient is wanted"] = (
            a["bias_sizes"] is not None or not a["output_mask"][2]
        )
    if a["groups"] == x.shape[1] and a["groups"] > 1:
        # cuda/DepthwiseConv2d.cu: TORCH_CHECK(canUse32BitIndexMath(input) && canUse32BitIndexMath(output))
        maps = [x] if gradient is None else [x, gradient]
        checks["depthwise maps within 32-bit indexing"] = all(_last_index(t) <= LARGEST_INDEX for t in maps)
    return checks


def _last_index(tensor: Tensor) -> int:
    return sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
