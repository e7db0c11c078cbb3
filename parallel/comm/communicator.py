"""Communication between the ranks of a run.

``local`` (one process), ``torch_comm`` (torch.distributed: Gloo, NCCL), ``mpi_comm`` (mpi4py), ``thread_comm`` (threads
of one process) and ``mixed_comm`` (ranks on CPUs and GPUs) implement one protocol. Ranks are 0..world-1. There
is no blocking send: a schedule that is free of deadlock with sends that do not wait is so on every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class CommunicationError(RuntimeError):
    """A rank cannot be reached or stopped answering; names the operation and the rank that waited."""


class SecondaryError(CommunicationError):
    """A communication error whose cause another rank reports."""


class Work(Protocol):
    """An operation under way. Its tensor must not be used until it is done."""

    def wait(self) -> None:
        """Return when the operation is done on this rank: data received or summed, or the sent tensor free for reuse.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """

    def done(self) -> bool:
        """Return whether ``wait`` would return without blocking; may stay False where a library does not report it."""


TAGS = 32767
"""Tags from 0 on that the messages of a step may have; the next one is of other messages."""
Message = tuple[int, Tensor]
"""The rank at the other end, and what is sent, or where to put what is received."""


SEND, RECEIVE = "isend of {} {} to rank {}, tag {}", "irecv of {} {} from rank {}, tag {}"


class Operation(NamedTuple):
    """An operation of one rank, put into words where it fails; ``text`` has places for ``values``."""

    rank: int
    world: int
    text: str
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        values = (tuple(value) if isinstance(value, torch.Size) else value for value in self.values)
        return f"rank {self.rank} of {self.world}: {self.text.format(*values).replace('torch.', '')}"

    def lost(self, reason: str) -> CommunicationError:
        """Return the error where the other ranks do not answer."""
        return CommunicationError(f"{self} failed: {reason}; another rank has ended or hangs: its own message says why")


class Communicator(Protocol):
    """A fixed group of ranks. Every rank calls the collective operations in the same order.

    Tensors of sends, receives and sums are dense (contiguous in some order of dims is enough) and on the CPU or the
    rank's device; receives and sums write in place. Implementations inherit what has a body here.
    """

    rank: int
    world: int

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Connect the devices of ranks for ``isend`` and ``irecv``. Without it, messages go through host memory.

        Every rank calls it with the same pairs. Those of a subgroup must have been among the pairs of the whole run.

        Args:
            pairs: (sender, receiver), of all ranks.
        """
        return

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send ``tensor`` to rank ``peer``. Messages of one tag to one peer arrive in the order sent.

        Args:
            tag: 0 to 32767.
        """

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to receive into ``tensor`` a message of rank ``peer`` with ``tag``, of the same size and dtype."""

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Work], list[Work]]:
        """Begin to send and to receive, as one operation between GPUs; return the works of ``sends`` and ``receives``.

        Ranks that take part in several exchanges and collective operations of this communicator, on the device, come to
        them in the same order. The first of these is a collective operation.

        Args:
            tag: as of ``isend``; the same on all ranks.
        """
        works: dict[int, Work] = {}
        messages = [*sends, *receives]
        ends = [(self.rank, peer) for peer, _ in sends] + [(peer, self.rank) for peer, _ in receives]
        # All messages have one order that every rank keeps to: the first under way is one that both of its ranks have
        # come to, and no ranks wait in a circle where messages wait for their receives (Gloo, and MPI beyond its eager
        # limit).
        for number in sorted(range(len(ends)), key=ends.__getitem__):
            begin, (peer, tensor) = self.isend if number < len(sends) else self.irecv, messages[number]
            works[number] = begin(tensor, peer, tag)
        in_order = [works[number] for number in range(len(ends))]
        return in_order[: len(sends)], in_order[len(sends) :]

    def iall_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum ``tensor`` over all ranks, in place; the result has the same bits on every rank."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place on every rank."""
        self.iall_reduce(tensor).wait()

    def ireduce_scatter(self, rows: Tensor) -> Work:
        """Begin to sum ``rows`` (world, n) over all ranks: row r becomes the sum on rank r, the other rows anything."""
        return self.iall_reduce(rows)

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ``tensor`` of every rank in order, (world, *shape); all have one shape and dtype."""

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Overwrite ``tensor`` on every rank with that of rank ``source``."""

    def barrier(self) -> None:
        """Return once every rank has called it."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of ``ranks``, renumbered 0..len-1 in the order given; None on all other ranks.

        Every rank of this communicator calls it, all with the same arguments in the same order.
        """

    def abort(self) -> None:
        """End all ranks, as this one has failed: a rank that is a process exits here."""

    def close(self) -> None:
        """Leave the other ranks."""
        return


def sum_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an ``all_reduce`` of ``size`` bytes as a ring, the least of all ways
    (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms).

    >>> sum_bytes(100, 4), sum_bytes(100, 1)
    (150, 0)
    """
    return 2 * part_bytes(size, ranks)


def part_bytes(size: int, ranks: int) -> int:
    """Return the same of an all-gather or a reduce-scatter of ``size`` bytes.

    >>> part_bytes(400, 4)
    300
    """
    return size * (ranks - 1) // ranks


def agree(communicator: Communicator, flag: bool) -> bool:
    """Return, on every rank, whether ``flag`` is true on any."""
    votes = torch.tensor([int(flag)])
    communicator.all_reduce(votes)
    return bool(votes.item())
