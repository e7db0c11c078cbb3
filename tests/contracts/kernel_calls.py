"""Calls of torch's kernels, recorded with their arguments.

``RecordedCalls`` is a dispatch mode for one thread; ``form_faults`` compares calls with those that autograd's own
formulas make.
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
