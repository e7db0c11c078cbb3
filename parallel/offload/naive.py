"""Activations on the host as simply as it can be done: each tensor is copied when autograd keeps it, and copied back
when backward asks for it.

Four ways, by name: ``naive`` copies to pageable memory and waits, ``pinned`` to page-locked memory, ``nonblocking``
does not wait, ``pinned-nonblocking`` is both. Copies run between computations, on the computing stream: they show what
``overlap`` hides. They are there to be measured against.
"""

from __future__ import annotations

import torch
from torch import Tensor

from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.copy_clock import CopyClock, Direction
from parallel.offload.live_bytes import not_counted
from parallel.offload.packing import Packed

MODES = ("naive", "pinned", "nonblocking", "pinned-nonblocking")


class OnHost:
    """A saved tensor on the host."""

    def __init__(self, owner: SimpleOffload, tensor: Tensor) -> None:
        self._owner, self._device = owner, tensor.device
        self._host = owner.out(tensor)

    def unpack(self) -> Tensor:
        return self._owner.back(self._host, self._device)


class SimpleOffload:
    """One of ``MODES``; a ``Packer``.

    Attributes:
        clock: notes how long copies take, while it is on.
    """

    def __init__(self, mode: str, device: torch.device, meter: ActivationMeter | None = None) -> None:
        assert mode in MODES, mode
        self.clock = CopyClock()
        self._pinned = "pinned" in mode and device.type == "cuda"
        self._nonblocking = "nonblocking" in mode
        self._meter = meter

    def pack(self, tensor: Tensor) -> Packed:
        return OnHost(self, tensor)

    def out(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor`` on the host."""
        with not_counted():
            host = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
        return self._copy("out", tensor.detach(), host)

    def back(self, host: Tensor, device: torch.device) -> Tensor:
        """A copy of ``host`` on the device."""
        return self._copy("back", host, torch.empty_like(host, device=device, pin_memory=False))

    def _copy(self, direction: Direction, source: Tensor, target: Tensor) -> Tensor:
        with self.clock.timing(direction, source, gpu=source.is_cuda or target.is_cuda):
            return target.copy_(source, non_blocking=self._nonblocking)
