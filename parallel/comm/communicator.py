"""What the ranks of a run can say to each other.

One protocol; ``local`` (one process) and ``torch_comm`` (torch.distributed: Gloo, NCCL) implement it. Ranks are
0..world-1. Tensors are changed in place.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn


class CommunicationError(RuntimeError):
    """A rank that cannot be reached, or that stopped answering: says which operation on which rank."""


class Communicator(Protocol):
    """A fixed group of ranks. Every rank calls the collective operations in the same order."""

    rank: int
    world: int
    local_rank: int
    """Number of this rank on its machine; chooses the device."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place on every rank.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the ``tensor`` of rank ``source``, in place."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def replicate(self, module: nn.Module) -> nn.Module:
        """``module`` with its gradients averaged over the ranks during backward, or itself when there is one rank."""
        ...

    def close(self) -> None: ...


def agree(communicator: Communicator, flag: bool) -> bool:
    """True on every rank when ``flag`` is true on any."""
    votes = torch.tensor([int(flag)])
    communicator.all_reduce(votes)
    return bool(votes.item())
