"""Parameters and buffers on the host between iterations: copied to the device before a step, and back after it.

The published study copied them one by one in four ``WAYS``; ``flattened`` copies them at once. All copies are on the
computing stream, so none overlaps computation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

WAYS = ("naive", "pinned", "nonblocking", "pinned-nonblocking")
ALIGNMENT = 512
"""Bytes, as of torch's own memory on a GPU: kernels may depend on the alignment of their operands."""


class TensorByTensor:
    """A copy of each tensor, by the calls that a script makes.

    With "pinned", a tensor is copied to page-locked memory in each iteration, then to the device; a CPU has no such
    memory, and copies to other. With "nonblocking" the host does not wait, and torch page-locks what it copies to.
    """

    def __init__(self, way: str, state: Sequence[Tensor], device: torch.device) -> None:
        assert way in WAYS, way
        self._pinned, self._nonblocking = "pinned" in way, "nonblocking" in way
        self._state, self._device = state, device

    def to_device(self) -> None:
        for tensor in self._state:
            host = tensor.data
            if self._pinned:
                host = host.pin_memory() if self._device.type == "cuda" else host.clone()
            tensor.data = host.to(self._device, non_blocking=self._nonblocking, copy=True)

    def to_host(self) -> None:
        for tensor in self._state:
            tensor.data = tensor.data.to("cpu", non_blocking=self._nonblocking, copy=True)


class Flattened:
    """One copy each way, of a buffer that all tensors are views of. The host's is page-locked for a GPU, and kept."""

    def __init__(self, state: Sequence[Tensor], device: torch.device) -> None:
        self._state, self._device = state, device
        sizes = [-(-tensor.nbytes // ALIGNMENT) * ALIGNMENT for tensor in state]
        self._bounds = list(pairwise(accumulate(sizes, initial=0)))
        self._host = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device: Tensor | None = None
        values = [tensor.data for tensor in state]
        self._view(self._host)
        for tensor, value in zip(state, values, strict=True):
            tensor.data.copy_(value)

    def to_device(self) -> None:
        self._on_device = self._host.to(self._device, non_blocking=True, copy=True)
        self._view(self._on_device)

    def to_host(self) -> None:
        assert self._on_device is not None
        self._host.copy_(self._on_device, non_blocking=True)
        self._view(self._host)
        self._on_device = None

    def _view(self, flat: Tensor) -> None:
        """Let every tensor be a view of ``flat``."""
        for tensor, (start, stop) in zip(self._state, self._bounds, strict=True):
            tensor.data = flat[start:stop].view(tensor.dtype)[: tensor.numel()].view(tensor.shape)


def offload(approach: str, state: Sequence[Tensor], device: torch.device) -> TensorByTensor | Flattened:
    """Return the offload of ``state``, which is on the host, in one of ``WAYS``, or ``flattened``."""
    return Flattened(state, device) if approach == "flattened" else TensorByTensor(approach, state, device)
