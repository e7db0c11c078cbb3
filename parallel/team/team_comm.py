"""Messages between the ranks of a spatial team within a forward or backward pass: pieces of maps, and sums.

Every rank comes to the same exchanges and sums in the same order. A forward pass that is recomputed finds on a
``ReplayLog`` what the first one received, and sends nothing.

Within an exchange a rank sends and receives in the order of (sender, receiver). So all messages of a team have one
order, that every rank keeps to: of those still under way the first is one that both of its ranks have come to, and
nobody waits in a circle. This holds where messages wait for their receives (Gloo, and MPI beyond its eager limit), and
where a device performs them in turn, as NCCL may, which knows no tags: over one link they arrive in the order sent.
Between GPUs ``Communicator.connect`` must have been called with all pairs of ranks.
"""

from __future__ import annotations

import collections
import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from parallel.comm.communicator import Work
from parallel.space.team import Box, is_small_all_reduce
from parallel.streaming.narrowing import narrowed

if TYPE_CHECKING:
    from parallel.team.halo_exchange import BoundExchange

TAGS = 32767
BY_PAIR = operator.itemgetter(0, 1)
Report = Callable[[str | None], None]
"""Is given what the rank waits for, and None once it is there."""
Recv = tuple[int | None, Tensor, Work]


class TeamCommunicator(Protocol):
    """The part of a ``Communicator`` that a team uses."""

    rank: int
    world: int

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    def iall_reduce(self, tensor: Tensor) -> Work: ...


class ReplayLog:
    """Log of received messages and RNG states of a forward pass, replayed by its recomputation."""

    def __init__(self) -> None:
        self.entries: list[Any] = []
        self._next: int | None = None

    def record_or_replay(self, find: Callable[[], Any]) -> Any:
        """Return the next entry: what ``find`` gives, or what it gave when the log was recorded."""
        if self._next is None:
            self.entries.append(find())
            return self.entries[-1]
        entry, self.entries[self._next] = self.entries[self._next], None
        self._next += 1
        return entry

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Within the block entries come from the log."""
        self._next = 0
        yield
        assert self._next == len(self.entries), f"{self._next} of {len(self.entries)} entries were asked for again"
        self.entries, self._next = [], None


class PendingRecvs:
    """Tensors on their way to this rank: pieces of a map in the order of ``Exchange.recvs``, or a sum.

    Args:
        works: (member that a tensor comes from, None for a sum with all; the tensor; operation).
        comm: reports waits; None: nobody is told.
    """

    def __init__(self, tensors: list[Tensor], works: Sequence[Recv] = (), comm: TeamComm | None = None) -> None:
        self._tensors, self._works, self._comm = tensors, works, comm

    def wait(self) -> list[Tensor]:
        report = None if self._comm is None else self._comm.report
        for peer, tensor, work in self._works:
            if report is None or work.done():
                work.wait()
                continue
            assert self._comm is not None
            report(self._comm.describe(peer, tensor))
            work.wait()  # where it fails, the run is over, and what it waited for stays reported
            report(None)
        self._works = ()
        return self._tensors


class PendingSum(PendingRecvs):
    """A sum whose parts are on their way; added in the order of members, to the same bits on each."""

    def wait(self) -> list[Tensor]:
        self._tensors = [functools.reduce(torch.add, super().wait())]
        return self._tensors


class TeamComm:
    """Communication of one rank with the others of its team.

    Args:
        communicator: of the team alone; members in order.
        ranks: numbers of the members in the run; None: as in the team.

    Attributes:
        sent_bytes: of pieces of maps and their gradients, since it was made.
        exchanges: with other members that were begun since then.
        log: of the pass under way; None: the pass is not recomputed.
        report: is given what this rank waits for; None: nobody is.
    """

    def __init__(self, communicator: TeamCommunicator, ranks: Sequence[int] | None = None) -> None:
        self.member, self.members = communicator.rank, communicator.world
        self.sent_bytes = 0
        self.log: ReplayLog | None = None
        self.report: Report | None = None
        self.exchanges = 0
        self._communicator = communicator
        self._ranks = range(self.members) if ranks is None else ranks
        self._sends: collections.deque[Work] = collections.deque()

    @contextmanager
    def on(self, log: ReplayLog) -> Iterator[None]:
        """Record the block on ``log``, or have it replayed from there."""
        before, self.log = self.log, log
        try:
            yield
        finally:
            self.log = before

    def fetch(self, exchange: BoundExchange, own: Tensor) -> PendingRecvs:
        """Begin to fetch what this member needs of the map of which it has ``own``, and to send what others need."""
        if self.log is not None:
            halos: PendingRecvs = self.log.record_or_replay(lambda: self._fetch(exchange, own))
            return halos
        return self._fetch(exchange, own)

    def _fetch(self, exchange: BoundExchange, own: Tensor) -> PendingRecvs:
        own = own.detach()
        sends = [(peer, own[part]) for peer, part, _ in exchange.sends]
        return self._swap_pieces(sends, exchange.recvs, exchange.dims, own)

    def send_halo_grads(self, exchange: BoundExchange, gradients: Sequence[Tensor], like: Tensor) -> PendingRecvs:
        """Begin to send the gradients of what was fetched to their owners; those of what this member had sent arrive in
        the order of ``Exchange.sends``.

        Args:
            gradients: in the order of ``Exchange.recvs``.
            like: gradient or map of this member's own, in the type and layout of what arrives.
        """
        sends = [(peer, gradient) for (peer, _, _), gradient in zip(exchange.recvs, gradients, strict=True)]
        return self._swap_pieces(sends, exchange.sends, exchange.dims, like)

    def _swap_pieces(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[Any], dims: tuple[int, int], like: Tensor
    ) -> PendingRecvs:
        """Begin to send copies of tensors, contiguous whatever their layout, which may differ between two members."""
        copies = [(peer, piece.detach().clone(memory_format=torch.contiguous_format)) for peer, piece in sends]
        shape, places = list(like.shape), []
        for peer, _, sizes in recvs:
            shape[dims[0]], shape[dims[1]] = sizes
            places.append((peer, like.new_empty(shape)))
        return self.swap(copies, places)

    def swap(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], counted: bool = True
    ) -> PendingRecvs:
        """Begin to send (target, pieces) and to receive (owner, places), in the order that all members keep to."""
        return PendingRecvs([tensor for _, tensor in recvs], self._swap(sends, recvs, counted), self)

    def all_reduce(self, value: Tensor, record: bool = True) -> Tensor:
        """Return the sum over the members, the same bits on each.

        Args:
            record: in a forward pass, which may be recomputed.
        """
        if record and self.log is not None:
            summed: Tensor = self.log.record_or_replay(lambda: self.all_reduce(value, False))
            return summed
        return self.all_reduce_async(value).wait()[0]

    def all_reduce_async(self, value: Tensor) -> PendingRecvs:
        """Begin to sum over the members, in a backward pass; the sum arrives."""
        own = value.detach().clone(memory_format=torch.contiguous_format)
        if self._is_small(own):
            return PendingSum(*self._exchange_small(own), self)
        return PendingRecvs([own], [(None, own, self._communicator.iall_reduce(own))] if self.members > 1 else (), self)

    def all_gather(self, value: Tensor, record: bool = True) -> list[Tensor]:
        """Return what each member has, in order; all have values of one shape and type. ``record``: as above."""
        if record and self.log is not None:
            gathered: list[Tensor] = self.log.record_or_replay(lambda: self.all_gather(value, False))
            return gathered
        own = value.detach().clone(memory_format=torch.contiguous_format)
        if self._is_small(own):
            return PendingRecvs(*self._exchange_small(own), self).wait()
        table = own.new_zeros((self.members, *own.shape))
        table[self.member] = own
        return list(self.all_reduce(table, False))

    def _is_small(self, own: Tensor) -> bool:
        """Whether ``own`` goes to the others as a message to each, in place of a sum over all."""
        return is_small_all_reduce(own.nbytes, self.members) and not own.is_cuda

    def _exchange_small(self, own: Tensor) -> tuple[list[Tensor], list[Recv]]:
        """Begin to send ``own`` to all others; return what each member has, in order, and what to wait for."""
        parts, sends, recvs = [], [], []
        for member in range(self.members):
            parts.append(own if member == self.member else torch.empty_like(own))
            if member != self.member:
                sends.append((member, own))
                recvs.append((member, parts[-1]))
        return parts, self._swap(sends, recvs, counted=False)

    def finish(self) -> None:
        """Wait until all that this member sent has left."""
        while self._sends:
            self._sends.popleft().wait()

    def _swap(
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], counted: bool
    ) -> list[Recv]:
        """Begin to send and receive, in the order that all members keep to; return what arrives."""
        self.exchanges += 1
        tag, member = self.exchanges % TAGS, self.member
        messages: list[tuple[int, int, Tensor]] = []
        for target, tensor in sends:
            messages.append((member, target, tensor))
        for source, tensor in recvs:
            messages.append((source, member, tensor))
        works: list[Recv] = []
        while self._sends and self._sends[0].done():
            self._sends.popleft()
        for sender, receiver, tensor in sorted(messages, key=BY_PAIR):
            if sender == member:
                self._sends.append(self._communicator.isend(tensor, receiver, tag))
                self.sent_bytes += tensor.nbytes * counted
            else:
                works.append((sender, tensor, self._communicator.irecv(tensor, sender, tag)))
        return works

    def describe(self, peer: int | None, tensor: Tensor) -> str:
        """Return in words what this rank waits for."""
        shape = tuple(tensor.shape)
        if peer is not None:
            return f"a piece {shape} of a map or sum, from rank {self._ranks[peer]}"
        others = [str(rank) for member, rank in enumerate(self._ranks) if member != self.member]
        return f"a sum {shape} with rank{'s' * (len(others) > 1)} {', '.join(others)}"


def cut(value: Tensor, dims: tuple[int, int], box: Box, at: Box) -> Tensor:
    """Return a view of ``box`` of a map of which ``value`` is the part ``at``."""
    (rows, columns), (top, left) = box, at
    return narrowed(value, dims, ((rows.start - top.start, rows.size), (columns.start - left.start, columns.size)))
