"""The communicator of a run with one process: every operation is the identity."""

from __future__ import annotations

from torch import Tensor, nn


class LocalCommunicator:
    """Rank 0 of 1."""

    rank = 0
    world = 1
    local_rank = 0

    def all_reduce(self, tensor: Tensor) -> None:
        """The sum over one rank is the tensor."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """The only rank is the source."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def replicate(self, module: nn.Module) -> nn.Module:
        return module

    def close(self) -> None:
        """Nothing is held."""
