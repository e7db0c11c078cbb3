"""Messages between the ranks of a spatial team within a forward or backward pass: pieces of maps, and sums.

Every rank comes to the same exchanges and sums in the same order. A forward pass that is recomputed finds on a
``ReplayLog`` what the first one received, and sends nothing.

Messages go through the team's own communicator, between GPUs as one operation for each exchange. Its first operation is
a sum: NCCL connects a group when all of its ranks come to one operation.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator, Work
from parallel.space import team
from parallel.space.team import Box
from parallel.streaming.patch import narrowed

if TYPE_CHECKING:
    from parallel.team.halo_exchange import BoundExchange

TAGS = 32767
Report = Callable[[str | None], None]
"""Is given what the rank waits for, and None once it is there."""
Recv = tuple[int | None, Tensor, Work]


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
        comm: reports waits; None: waits are not reported.
        sums: they are added up, in the order of members, to the same bits on each.
    """

    def __init__(
        self, tensors: list[Tensor], works: Sequence[Recv] = (), comm: TeamComm | None = None, sums: bool = False
    ) -> None:
        self._tensors, self._works, self._comm, self._sums = tensors, works, comm, sums

    def wait(self) -> list[Tensor]:
        comm = self._comm
        report = None if comm is None else comm.report
        for peer, tensor, work in self._works:
            if comm is None or report is None or work.done():
                work.wait()
                continue
            report(comm.describe(peer, tensor))
            work.wait()  # where it fails, the run is over, and what it waited for stays reported
            report(None)
        if self._sums:
            self._tensors, self._sums = [functools.reduce(torch.add, self._tensors)], False
        self._works = ()
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
        report: is given what this rank waits for; None: waits are not reported.
    """

    def __init__(self, communicator: Communicator, ranks: Sequence[int] | None = None) -> None:
        self.member, self.members = communicator.rank, communicator.world
        self.sent_bytes = 0
        self.log: ReplayLog | None = None
        self.report: Report | None = None
        self.exchanges = 0
        self._communicator = communicator
        self._small_bytes = team.SMALL_ALL_REDUCE_BYTES if 1 < self.members <= team.SMALL_TEAM else -1
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
        own, sends = own.detach(), []
        for peer, part, _ in exchange.sends:
            sends.append((peer, own[part]))
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
        shape, copies, places, tensors = list(like.shape), [], [], []
        for peer, piece in sends:
            copies.append((peer, piece.detach().clone(memory_format=torch.contiguous_format)))
        for peer, _, sizes in recvs:
            shape[dims[0]], shape[dims[1]] = sizes
            tensors.append(like.new_empty(shape))
            places.append((peer, tensors[-1]))
        return PendingRecvs(tensors, self._swap(copies, places), self)

    def swap(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> PendingRecvs:
        """Begin to send (target, pieces) and to receive (owner, places), as one exchange."""
        return PendingRecvs([tensor for _, tensor in recvs], self._swap(sends, recvs), self)

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
        if own.nbytes <= self._small_bytes and not own.is_cuda:  # a message to each, in place of a sum over all
            return PendingRecvs(*self._exchange_small(own), self, sums=True)
        return PendingRecvs([own], [(None, own, self._communicator.iall_reduce(own))] if self.members > 1 else (), self)

    def all_gather(self, value: Tensor, record: bool = True) -> list[Tensor]:
        """Return what each member has, in order; all have values of one shape and type. ``record``: as above."""
        if record and self.log is not None:
            gathered: list[Tensor] = self.log.record_or_replay(lambda: self.all_gather(value, False))
            return gathered
        own = value.detach().clone(memory_format=torch.contiguous_format)
        if own.nbytes <= self._small_bytes and not own.is_cuda:  # a message to each, in place of a sum over all
            return PendingRecvs(*self._exchange_small(own), self).wait()
        if self.report is not None:
            self.report(self.describe(None, own))
        gathered = list(self._communicator.all_gather(own))
        if self.report is not None:
            self.report(None)
        return gathered

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
        self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]], counted: bool = True
    ) -> list[Recv]:
        """Begin to send and receive; return what arrives."""
        self.exchanges += 1
        while self._sends and self._sends[0].done():
            self._sends.popleft()
        leaving, arriving = self._communicator.exchange(sends, recvs, self.exchanges % TAGS)
        self._sends += leaving
        if counted:
            for _, tensor in sends:
                self.sent_bytes += tensor.nbytes
        works: list[Recv] = []
        for (source, tensor), work in zip(recvs, arriving, strict=True):
            works.append((source, tensor, work))
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
