"""The communicator of a run with one process: collective operations are the identity."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from parallel.comm.communicator import Communicator, Work


class Finished:
    """An operation that was done when it began."""

    def wait(self) -> None:
        """Return: nothing is under way."""

    def done(self) -> bool:
        return True


class LocalCommunicator(Communicator):
    """Rank 0 of 1."""

    rank = 0
    world = 1
    local_rank = 0

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        raise AssertionError(f"one rank has no rank {peer} to send to")

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        raise AssertionError(f"one rank has no rank {peer} to receive from")

    def iall_reduce(self, tensor: Tensor) -> Work:
        return Finished()

    def all_gather(self, tensor: Tensor) -> Tensor:
        return tensor.detach().clone()[None]

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """The only rank is the source."""

    def barrier(self) -> None:
        """Nobody to wait for."""

    def subgroup(self, ranks: Sequence[int]) -> LocalCommunicator | None:
        return self if list(ranks) == [0] else None

    def abort(self) -> None:
        """Nobody to bring down."""
