"""What the ranks of a run can say to each other.

One protocol; ``local`` (one process), ``torch_comm`` (torch.distributed: Gloo, NCCL), ``mpi_comm`` (mpi4py) and
``thread_comm`` (ranks as threads of one process) implement it. Ranks are 0..world-1. There is no blocking send: a
schedule that is right with sends that return at once stays free of deadlock on every implementation.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor


class CommunicationError(RuntimeError):
    """A rank that cannot be reached, or that stopped answering: says which operation on which rank."""


class ToldElsewhere(CommunicationError):
    """The same, of which another rank tells the user."""


class Work(Protocol):
    """An operation under way. The tensor it was given belongs to it until it is done."""

    def wait(self) -> None:
        """Return when the operation is done here: data received or summed, or the sent tensor free for reuse.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        ...

    def done(self) -> bool:
        """True once ``wait`` would return at once; never blocks. May stay False until ``wait`` where the library
        underneath does not tell."""
        ...


Message = tuple[int, Tensor]
"""The rank at the other end, and what is sent, or where to put what is received."""


class Communicator(Protocol):
    """A fixed group of ranks. Every rank calls the collective operations in the same order.

    Tensors of sends, receives and sums are dense (contiguous in some order of dims is enough) and on the CPU or the
    rank's device; receives and sums write in place. Implementations inherit what has a body here.
    """

    rank: int
    world: int
    local_rank: int
    """Number of this rank on its machine; chooses the device."""

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """Prepare for ``isend`` and ``irecv`` of tensors on the device; tensors on the CPU do not need it.

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
        ...

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to receive into ``tensor`` what rank ``peer`` sends with ``tag``; number of bytes and dtype agree."""
        ...

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Work], list[Work]]:
        """Begin to send and to receive, as one operation between GPUs; return the works of ``sends`` and ``receives``.

        Ranks that take part in several exchanges and collective operations of this communicator, on the device, come to
        them in the same order. The first of these is a collective operation.

        Args:
            tag: as of ``isend``; the same on all ranks.
        """
        messages = [(self.rank, peer, number) for number, (peer, _) in enumerate(sends)]
        messages += [(peer, self.rank, number) for number, (peer, _) in enumerate(receives)]
        sending: dict[int, Work] = {}
        receiving: dict[int, Work] = {}
        # All messages have one order that every rank keeps to: the first under way is one that both of its ranks have
        # come to, and nobody waits in a circle where messages wait for their receives (Gloo, and MPI beyond its eager
        # limit).
        for sender, receiver, number in sorted(messages):
            if sender == self.rank:
                sending[number] = self.isend(sends[number][1], receiver, tag)
            else:
                receiving[number] = self.irecv(receives[number][1], sender, tag)
        return [sending[n] for n in range(len(sends))], [receiving[n] for n in range(len(receives))]

    def iall_reduce(self, tensor: Tensor) -> Work:
        """Begin to sum ``tensor`` over all ranks, in place; the result has the same bits on every rank."""
        ...

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum ``tensor`` over all ranks, in place on every rank.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        self.iall_reduce(tensor).wait()

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return the ``tensor`` of every rank in order, (world, *shape); all have one shape and dtype."""
        ...

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        """Give every rank the ``tensor`` of rank ``source``, in place."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """A communicator of ``ranks`` alone, renumbered 0..len-1 in the order given; None on ranks not among them.

        Every rank of this communicator calls it, all with the same arguments in the same order.
        """
        ...

    def abort(self) -> None:
        """This rank has failed: bring the others down now. A rank that is a process ends here; where the launcher ends
        the others once one has failed, that is all it does."""
        ...

    def close(self) -> None:
        """Leave the other ranks."""
        return


def sum_bytes(size: int, ranks: int) -> int:
    """Return the bytes that each rank sends in an ``all_reduce`` of ``size`` bytes as a ring, the least of all ways
    (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms). Libraries do not report what they send.

    >>> sum_bytes(100, 4), sum_bytes(100, 1)
    (150, 0)
    """
    return 2 * part_bytes(size, ranks)


def part_bytes(size: int, ranks: int) -> int:
    """Return the same of an all-gather or a reduce-scatter of ``size`` bytes."""
    return size * (ranks - 1) // ranks


def agree(communicator: Communicator, flag: bool) -> bool:
    """True on every rank when ``flag`` is true on any."""
    votes = torch.tensor([int(flag)])
    communicator.all_reduce(votes)
    return bool(votes.item())
