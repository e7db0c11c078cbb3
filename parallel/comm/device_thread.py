"""Work handed to another thread, done on the GPU that is current where it is handed over."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_current_device(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``call`` for another thread, with the GPU of this thread as its current one.

    A thread begins on GPU 0: on any other rank, a CUDA call there would open a context on a GPU that is not the rank's.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return call
    device = torch.cuda.current_device()

    def call_on_device(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        torch.cuda.set_device(device)
        return call(*args, **kwargs)

    return call_on_device
