"""Activations on the host as the study moved them: each tensor is copied when autograd keeps it, and copied back when
backward asks for it.

Four ways, by name: ``naive`` copies to pageable memory and waits, ``pinned`` to page-locked memory, ``nonblocking``
does not wait, ``pinned-nonblocking`` is both. Copies run between computations, on the computing stream: they show what
``overlap`` hides.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parallel.offload.copies import CopyClock, Direction

MODES = ("naive", "pinned", "nonblocking", "pinned-nonblocking")


@dataclass(frozen=True)
class OnHost:
    """A saved tensor on the host, and the device that it left."""

    host: Tensor
    device: torch.device


class NaiveOffload:
    """One of ``MODES``.

    Args:
        state: parameters and buffers, which stay where they are.

    Attributes:
        clock: notes how long copies take, while it is on.
    """

    def __init__(self, mode: str, device: torch.device, state: Iterable[Tensor]) -> None:
        assert mode in MODES, mode
        self.clock = CopyClock()
        self._pinned = "pinned" in mode and device.type == "cuda"
        self._nonblocking = "nonblocking" in mode
        self._anyway = {tensor.untyped_storage().data_ptr() for tensor in state}

    def moving(self) -> saved_tensors_hooks:
        """Return a context in which whatever autograd keeps goes to the host."""
        return saved_tensors_hooks(self._out, self._back)

    def _out(self, tensor: Tensor) -> Tensor | OnHost:
        if tensor.untyped_storage().data_ptr() in self._anyway:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=self._pinned, requires_grad=False)
        return OnHost(self._copy("out", tensor.detach(), host), tensor.device)

    def _back(self, kept: Tensor | OnHost) -> Tensor:
        if isinstance(kept, Tensor):
            return kept
        return self._copy("back", kept.host, torch.empty_like(kept.host, device=kept.device, pin_memory=False))

    def _copy(self, direction: Direction, source: Tensor, target: Tensor) -> Tensor:
        with self.clock.timing(direction, source, gpu=source.is_cuda or target.is_cuda):
            return target.copy_(source, non_blocking=self._nonblocking)
