"""What the members of a team say to each other within a forward or backward pass: pieces of maps, and sums.

Every member comes to the same exchanges and sums in the same order. A pass that is computed again finds on a ``Tape``
what the first one was told, and says nothing.

Within an exchange a member sends and receives in the order of (sender, receiver). So all messages of a team have one
order, that every member keeps to: of those still under way the first is one that both of its members have come to, and
nobody waits in a circle. This holds where messages wait for their receives (Gloo, and MPI beyond its eager limit), and
where a device performs them in turn, as NCCL may, which knows no tags: over one link they arrive in the order sent.
Between GPUs ``Communicator.connect`` must have been called with all pairs of members.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from parallel.comm.communicator import Work
from parallel.space.team import Box, Exchange, is_told
from parallel.streaming.narrowing import narrowed
from parallel.team.tape import Tape
from parallel.team.told_waits import Talk

TAGS = 32767


class Halos:
    """What is on its way to this member: pieces of a map, or a sum.

    Args:
        tensors: that arrive; pieces in the order of ``Exchange.arriving``.
    """

    def __init__(self, tensors: Sequence[Tensor], works: Sequence[Work]) -> None:
        self._tensors, self._works = list(tensors), works

    def wait(self) -> list[Tensor]:
        for work in self._works:
            work.wait()
        self._works = ()
        return self._tensors


class _Sum(Halos):
    """A sum whose parts are on their way; added in the order of members, to the same bits on each."""

    def wait(self) -> list[Tensor]:
        self._tensors = [functools.reduce(torch.add, super().wait())]
        return self._tensors


class TeamLink:
    """One member's way to the others.

    Args:
        communicator: of the team alone; members in order.

    Attributes:
        sent_bytes: of pieces of maps and their gradients, since it was made.
        exchanges: with other members that were begun since then.
        tape: of the pass under way.
    """

    def __init__(self, communicator: Talk) -> None:
        self.member, self.members = communicator.rank, communicator.world
        self.sent_bytes = 0
        self.tape: Tape | None = None
        self._communicator = communicator
        self.exchanges = 0
        self._leaving: list[Work] = []

    @contextmanager
    def on(self, tape: Tape) -> Iterator[None]:
        """Record the block on ``tape``, or have it replayed from there."""
        before, self.tape = self.tape, tape
        try:
            yield
        finally:
            self.tape = before

    def fetch(self, exchange: Exchange, own: Tensor, dims: tuple[int, int]) -> Halos:
        """Begin to fetch what this member needs of the map of which it has ``own``, and to send what others need."""
        if self.tape is not None:
            halos: Halos = self.tape.word(lambda: self._fetch(exchange, own, dims))
            return halos
        return self._fetch(exchange, own, dims)

    def _fetch(self, exchange: Exchange, own: Tensor, dims: tuple[int, int]) -> Halos:
        at, pieces = exchange.owned[self.member], exchange.arriving(self.member)
        tensors = [_like(own, dims, piece.box) for piece in pieces]
        leaving = [(target, dense(cut(own, dims, box, at))) for target, box in exchange.leaving(self.member)]
        arriving = [(piece.owner, tensor) for piece, tensor in zip(pieces, tensors, strict=True)]
        return Halos(tensors, self._swap(leaving, arriving))

    def give_back(self, exchange: Exchange, gradients: Sequence[Tensor], like: Tensor, dims: tuple[int, int]) -> Halos:
        """Begin to send the gradients of what was fetched to their owners; those of what this member had sent arrive in
        the order of ``Exchange.leaving``.

        Args:
            like: gradient or map of this member's own, in the type and layout of what arrives.
        """
        sent, pieces = exchange.leaving(self.member), exchange.arriving(self.member)
        tensors = [_like(like, dims, box) for _, box in sent]
        leaving = [(piece.owner, dense(gradient)) for piece, gradient in zip(pieces, gradients, strict=True)]
        arriving = [(target, tensor) for (target, _), tensor in zip(sent, tensors, strict=True)]
        return Halos(tensors, self._swap(leaving, arriving))

    def swap(self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]]) -> Halos:
        """Begin to send (target, pieces) and to receive (owner, places), in the order that all members keep to."""
        return Halos([tensor for _, tensor in arriving], self._swap(leaving, arriving))

    def sum(self, value: Tensor) -> Tensor:
        """Return the sum over the members, the same bits on each; of a forward pass."""
        if self.tape is not None:
            summed: Tensor = self.tape.word(lambda: self.sum_back(value))
            return summed
        return self.sum_back(value)

    def sum_back(self, value: Tensor) -> Tensor:
        """The same of a backward pass, which is never computed again."""
        return self.begin_sum_back(value).wait()[0]

    def begin_sum_back(self, value: Tensor) -> Halos:
        """Begin to sum over the members, in a backward pass; the sum arrives."""
        own = dense(value)
        if self.tells(own):
            return _Sum(*self._tell(own))
        return Halos([own], [self._communicator.iall_reduce(own)] if self.members > 1 else ())

    def gather(self, value: Tensor) -> list[Tensor]:
        """Return what each member has, in order; of a forward pass. All have values of one shape and type."""
        if self.tape is not None:
            gathered: list[Tensor] = self.tape.word(lambda: self.gather_back(value))
            return gathered
        return self.gather_back(value)

    def gather_back(self, value: Tensor) -> list[Tensor]:
        """The same of a pass that is never computed again."""
        own = dense(value)
        if self.tells(own):
            return Halos(*self._tell(own)).wait()
        table = own.new_zeros((self.members, *own.shape))
        table[self.member] = own
        return list(self.sum_back(table))

    def tells(self, own: Tensor) -> bool:
        """Return whether ``own`` goes to the others as a message to each, in place of a sum over all."""
        return is_told(own.nbytes, self.members) and not own.is_cuda

    def _tell(self, own: Tensor) -> tuple[list[Tensor], list[Work]]:
        """Begin to send ``own`` to all others; return what each member has, in order, and what to wait for."""
        parts = [own if member == self.member else torch.empty_like(own) for member in range(self.members)]
        others = [member for member in range(self.members) if member != self.member]
        return parts, self._swap([(m, own) for m in others], [(m, parts[m]) for m in others], counted=False)

    def finish(self) -> None:
        """Wait until all that this member sent has left."""
        for work in self._leaving:
            work.wait()
        self._leaving = []

    def _swap(
        self, leaving: Sequence[tuple[int, Tensor]], arriving: Sequence[tuple[int, Tensor]], counted: bool = True
    ) -> list[Work]:
        """Begin to send and receive, in the order that all members keep to; return what arrives."""
        self.exchanges += 1
        tag, member = self.exchanges % TAGS, self.member
        messages = [(member, target, tensor) for target, tensor in leaving]
        messages += [(source, member, tensor) for source, tensor in arriving]
        coming: dict[int, Work] = {}
        self._leaving = [work for work in self._leaving if not work.done()]
        for sender, receiver, tensor in sorted(messages, key=lambda message: message[:2]):
            if sender == member:
                self._leaving.append(self._communicator.isend(tensor, receiver, tag))
                self.sent_bytes += tensor.nbytes * counted
            else:
                coming[sender] = self._communicator.irecv(tensor, sender, tag)
        return list(coming.values())


def cut(value: Tensor, dims: tuple[int, int], box: Box, at: Box) -> Tensor:
    """Return a view of ``box`` of a map of which ``value`` is the part ``at``."""
    (rows, columns), (top, left) = box, at
    return narrowed(value, dims, ((rows.start - top.start, rows.size), (columns.start - left.start, columns.size)))


def dense(value: Tensor) -> Tensor:
    """Return a copy as it is sent: contiguous whatever the layout, which may differ between two members' parts."""
    return value.detach().clone(memory_format=torch.contiguous_format)


def _like(own: Tensor, dims: tuple[int, int], box: Box) -> Tensor:
    shape = list(own.shape)
    for dim, span in zip(dims, box, strict=True):
        shape[dim] = span.size
    return torch.empty(shape, dtype=own.dtype, device=own.device)
