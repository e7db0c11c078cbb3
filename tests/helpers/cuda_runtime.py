"""A CUDA runtime that page-locks memory, or refuses to, for code that calls it by ``torch.cuda.cudart``."""

from __future__ import annotations

import pytest
import torch

REFUSED, NOT_LOCKED = 2, 713


class CudaRuntime:
    """The runtime of one GPU.

    Attributes:
        locked: bytes by address.
        error: of the last call that failed, as long as nobody has asked for it.
        waits: how often the host has waited for the GPU.
    """

    def __init__(self, patch: pytest.MonkeyPatch, *, refuses: bool = False) -> None:
        self.locked: dict[int, int] = {}
        self.error = self.waits = 0
        self._refuses = refuses
        for name, fake in {
            "cudart": lambda: self,
            "current_device": lambda: 0,
            "synchronize": self._synchronize,
            "device": lambda device: torch.no_grad(),  # some context
        }.items():
            patch.setattr(torch.cuda, name, fake)
        patch.setattr("parallel.offload.copies.copy_streams", lambda device: {})
        zeros = torch.zeros
        patch.setattr(torch, "zeros", lambda *size, device=None, **more: self._kernel(zeros(*size, **more), device))

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if self._refuses:
            self.error = REFUSED
            return REFUSED
        assert address not in self.locked
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        if address not in self.locked:
            self.error = NOT_LOCKED
            return NOT_LOCKED
        del self.locked[address]
        return 0

    def _synchronize(self, device: int) -> None:
        self.waits += 1

    def _kernel(self, made: torch.Tensor, device: object) -> torch.Tensor:
        """What torch does after each kernel: raise the error of the last call that failed, whoever called."""
        if device is not None and self.error:
            self.error = 0
            raise torch.AcceleratorError("CUDA error")
        return made
