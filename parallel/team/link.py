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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType

import torch
from torch import Tensor

from parallel.comm.communicator import Work
from parallel.space.team import Box, Exchange, is_told
from parallel.streaming.narrowing import narrowed
from parallel.team.tape import Tape
from parallel.team.told_waits import Talk

TAGS = 32767
NO_PIECES: Mapping[int, Tensor] = MappingProxyType({})


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
    """A sum whose parts are on their way; added in the order of members, to the same bits on each.

    Args:
        parts: of all members.
        beside: pieces of a map that come with them; they follow the sum.
    """

    def __init__(self, parts: Sequence[Tensor], works: Sequence[Work], beside: Sequence[Tensor] = ()) -> None:
        super().__init__(parts, works)
        self._beside = beside

    def wait(self) -> list[Tensor]:
        first, *others = super().wait()
        self._tensors = [functools.reduce(torch.add, others, first)]
        return [*self._tensors, *self._beside]


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
            parts, works, _ = self._tell(own)
            return Halos(parts, works).wait()
        table = own.new_zeros((self.members, *own.shape))
        table[self.member] = own
        return list(self.sum_back(table))

    def gather_and_fetch(
        self, value: Tensor, exchange: Exchange, own: Tensor, dims: tuple[int, int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return (what ``gather`` gives of ``value``, what ``fetch`` gives of ``own``), in a message from each member;
        of a forward pass.

        ``value`` must be one that is told (``tells``).
        """
        if self.tape is not None:
            found: tuple[list[Tensor], list[Tensor]] = self.tape.word(
                lambda: self._gather_and_fetch(value, exchange, own, dims)
            )
            return found
        return self._gather_and_fetch(value, exchange, own, dims)

    def _gather_and_fetch(
        self, value: Tensor, exchange: Exchange, own: Tensor, dims: tuple[int, int]
    ) -> tuple[list[Tensor], list[Tensor]]:
        at = exchange.owned[self.member]
        leaving = {target: dense(cut(own, dims, box, at)) for target, box in exchange.leaving(self.member)}
        arriving = {piece.owner: _like(own, dims, piece.box) for piece in exchange.arriving(self.member)}
        parts, works, pieces = self._tell(dense(value), leaving, arriving)
        return Halos(parts, works).wait(), pieces

    def begin_sum_and_give_back(
        self, value: Tensor, exchange: Exchange, gradients: Sequence[Tensor], like: Tensor, dims: tuple[int, int]
    ) -> Halos:
        """Begin ``begin_sum_back`` and ``give_back`` at once, in a message to each member: the sum arrives, and behind
        it what ``give_back`` gives."""
        pieces = exchange.arriving(self.member)
        leaving = {piece.owner: dense(gradient) for piece, gradient in zip(pieces, gradients, strict=True)}
        arriving = {target: _like(like, dims, box) for target, box in exchange.leaving(self.member)}
        return _Sum(*self._tell(dense(value), leaving, arriving))

    def tells(self, own: Tensor) -> bool:
        """Return whether ``own`` goes to the others as a message to each, in place of a sum over all."""
        return is_told(own.nbytes, self.members) and not own.is_cuda

    def _tell(
        self, own: Tensor, leaving: Mapping[int, Tensor] = NO_PIECES, arriving: Mapping[int, Tensor] = NO_PIECES
    ) -> tuple[list[Tensor], list[Work], list[Tensor]]:
        """Begin to send ``own`` to all others, and with it what is ``leaving`` to some of them.

        Args:
            arriving: by member, a tensor as that which comes with its own.

        Returns:
            What each member has, in order; what to wait for; what arrived, in the order of ``arriving``.
        """
        parts, pieces, messages, places = [], dict(arriving), [], []
        for member in range(self.members):
            if member == self.member:
                parts.append(own)
                continue
            messages.append((member, _packed(own, leaving[member]) if member in leaving else own))
            place = torch.empty_like(own)
            if member in arriving:
                whole = own.new_empty(own.nbytes + pieces[member].nbytes, dtype=torch.uint8)
                place, pieces[member] = _unpacked(whole, own, pieces[member])
                places.append((member, whole))
            else:
                places.append((member, place))
            parts.append(place)
        self.sent_bytes += sum(piece.nbytes for piece in leaving.values())
        return parts, self._swap(messages, places, counted=False), list(pieces.values())

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


def _packed(first: Tensor, second: Tensor) -> Tensor:
    """One message of two dense tensors."""
    return torch.cat([each.flatten().view(torch.uint8) for each in (first, second)])


def _unpacked(message: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    """Views of a message, in the forms of what it was packed of."""
    parts = message[: first.nbytes], message[first.nbytes :]
    one, other = (part.view(form.dtype).view(form.shape) for part, form in zip(parts, (first, second), strict=True))
    return one, other


def _like(own: Tensor, dims: tuple[int, int], box: Box) -> Tensor:
    shape = list(own.shape)
    for dim, span in zip(dims, box, strict=True):
        shape[dim] = span.size
    return torch.empty(shape, dtype=own.dtype, device=own.device)
