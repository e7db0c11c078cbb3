"""Messages between the ranks of a spatial team within a forward or backward pass: pieces of maps, and sums.

Every rank comes to the same exchanges and sums in the same order. A forward pass that is recomputed finds on a
``ReplayLog`` what the first one received, and sends nothing.

L is the sum of what each member computes of it. So the gradient of a sum is the sum of the members' gradients of it.

Messages go through the team's own communicator, between GPUs as one operation for each exchange. Its first operation is
a sum: NCCL connects a group when all of its ranks come to one operation.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from parallel.comm.communicator import TAGS, Communicator, Work
from parallel.offload.rng import drawing
from parallel.space.team import small_sum_bytes

if TYPE_CHECKING:
    from parallel.team.halo_exchange import BoundExchange
    from parallel.team.team_plan import TeamPlan

Report = Callable[[str | None], None]
"""Is given what the rank waits for, and None once it is there."""
Recv = tuple[int | None, Tensor, Work]
"""Member that a tensor comes from, None for a sum with all; the tensor; the operation."""
Wait = Callable[[], list[Tensor]]
"""Waits for tensors on their way to this rank; returns pieces of a map in the order of ``Exchange.recvs``, or a sum."""


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
        self._small_bytes = small_sum_bytes(self.members)
        self._ranks = range(self.members) if ranks is None else ranks
        self._sends: collections.deque[Work] = collections.deque()

    @contextmanager
    def on(self, log: ReplayLog) -> Iterator[None]:
        """Record the block on ``log``, or replay it from there if it is recorded."""
        before, self.log = self.log, log
        try:
            with log.replayed() if log.entries else nullcontext():
                yield
        finally:
            self.log = before

    def fetch(self, exchange: BoundExchange, own: Tensor, record: bool = True) -> Wait:
        """Begin to fetch what this member needs of the map of which it has ``own``, and to send what others need."""
        if record and self.log is not None:
            halos: Wait = self.log.record_or_replay(lambda: self.fetch(exchange, own, False))
            return halos
        own, sends = own.detach(), []
        for peer, part, _ in exchange.sends:
            sends.append((peer, own[part]))
        return self._swap_pieces(sends, exchange.recvs, exchange.dims, own)

    def send_halo_grads(self, exchange: BoundExchange, gradients: Sequence[Tensor], like: Tensor) -> Wait:
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
    ) -> Wait:
        """Begin to send copies of tensors, contiguous whatever their layout, which may differ between two members."""
        shape, copies, places, tensors = list(like.shape), [], [], []
        for peer, piece in sends:
            copies.append((peer, piece.detach().clone(memory_format=torch.contiguous_format)))
        for peer, _, sizes in recvs:
            shape[dims[0]], shape[dims[1]] = sizes
            tensors.append(like.new_empty(shape))
            places.append((peer, tensors[-1]))
        return functools.partial(self._wait, tensors, self._swap(copies, places))

    def swap(self, sends: Sequence[tuple[int, Tensor]], recvs: Sequence[tuple[int, Tensor]]) -> Wait:
        """Begin to send (target, pieces) and to receive (owner, places), as one exchange."""
        return functools.partial(self._wait, [tensor for _, tensor in recvs], self._swap(sends, recvs))

    def all_reduce(self, value: Tensor, record: bool = True) -> Tensor:
        """Return the sum over the members, the same bits on each.

        Args:
            record: in a forward pass, which may be recomputed.
        """
        if record and self.log is not None:
            summed: Tensor = self.log.record_or_replay(lambda: self.all_reduce(value, False))
            return summed
        return self.all_reduce_async(value)()[0]

    def all_reduce_async(self, value: Tensor, sums: bool = True) -> Wait:
        """Begin to sum over the members, in a backward pass; the sum arrives.

        Args:
            sums: False, for a small value on a CPU: the members' values arrive, in order.
        """
        own = value.detach().clone(memory_format=torch.contiguous_format)
        if own.nbytes <= self._small_bytes and not own.is_cuda:  # a message to each, in place of a sum over all
            parts, sends, recvs = [], [], []
            for member in range(self.members):
                parts.append(own if member == self.member else torch.empty_like(own))
                if member != self.member:
                    sends.append((member, own))
                    recvs.append((member, parts[-1]))
            return functools.partial(self._wait, parts, self._swap(sends, recvs, counted=False), sums)
        works: list[Recv] = [(None, own, self._communicator.iall_reduce(own))] if self.members > 1 else []
        return functools.partial(self._wait, [own], works)

    def all_gather(self, value: Tensor, record: bool = True) -> list[Tensor]:
        """Return what each member has, in order; all have values of one shape and type. ``record``: as above."""
        if record and self.log is not None:
            gathered: list[Tensor] = self.log.record_or_replay(lambda: self.all_gather(value, False))
            return gathered
        if value.nbytes <= self._small_bytes and not value.is_cuda:
            return self.all_reduce_async(value, sums=False)()
        own = value.detach().clone(memory_format=torch.contiguous_format)
        if self.report is not None:
            self.report(self.describe(None, own))
        gathered = list(self._communicator.all_gather(own))
        if self.report is not None:
            self.report(None)
        return gathered

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

    def _wait(self, tensors: list[Tensor], works: list[Recv], sums: bool = False) -> list[Tensor]:
        """Return ``tensors`` once they have arrived; with ``sums`` their sum in the order of members, bit for bit."""
        for peer, tensor, work in works:
            if self.report is None or work.done():
                work.wait()
                continue
            self.report(self.describe(peer, tensor))
            work.wait()  # where it fails, the run is over, and what it waited for stays reported
            self.report(None)
        works.clear()
        return [functools.reduce(torch.add, tensors)] if sums else tensors

    def describe(self, peer: int | None, tensor: Tensor) -> str:
        """Return in words what this rank waits for."""
        shape = tuple(tensor.shape)
        if peer is not None:
            return f"a piece {shape} of a map or sum, from rank {self._ranks[peer]}"
        others = [str(rank) for member, rank in enumerate(self._ranks) if member != self.member]
        return f"a sum {shape} with rank{'s' * (len(others) > 1)} {', '.join(others)}"


@dataclass
class ForwardContext:
    """One forward pass of one microbatch on one member.

    Attributes:
        random: seed or state that the next number is drawn from.
    """

    plan: TeamPlan
    comm: TeamComm
    device: torch.device
    random: int | Tensor = 0

    @property
    def end(self) -> Tensor:
        """Return the state that the next stage draws from."""
        if isinstance(self.random, Tensor):
            return self.random
        with drawing(self.random, self.device) as draws:
            pass
        return draws.end

    def run_with_rng(self, draw: Callable[[], Any]) -> Any:
        """Return what ``draw`` gives, which draws as the plain model would."""
        start = self.random
        if (log := self.comm.log) is not None:
            start = log.record_or_replay(lambda: start)
        with drawing(start, self.device) as draws:
            value = draw()
        self.random = draws.end
        return value

    def broadcast_rng_from_rank0(self) -> None:
        """Set the RNG state to member 0's, which has drawn numbers that the others have not."""
        state = self.end.to("cpu", torch.int32)  # from host to host: no device is waited for
        state = self.comm.all_reduce(state if self.comm.member == 0 else torch.zeros_like(state))
        self.random = state.to(torch.uint8)


def all_reduce_sum(comm: TeamComm, value: Tensor) -> Tensor:
    """Return the sum of all members' values."""
    total: Tensor = _Total.apply(value, comm.all_reduce(value), comm)
    return total


def identity_fwd_all_reduce_bwd(comm: TeamComm, value: Tensor) -> Tensor:
    """Return ``value``, which is replicated; backward all-reduces its gradient."""
    echo: Tensor = _Total.apply(value, value, comm)
    return echo


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, total: Tensor, comm: TeamComm) -> Tensor:
        ctx.comm = comm
        return total.clone()  # what follows may change it in place, as dropout does, and a log keeps it

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.comm.all_reduce(gradients[0], False), None, None


def empty_with_zero_grad(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return an empty tensor that depends on ``tensors``: backward gives them zeros, so that this member visits the
    same sums and exchanges as member 0."""
    if not tensors:
        return torch.empty(0, device=device)
    nothing: Tensor = _Empty.apply(*tensors)
    return nothing


class _Empty(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *tensors: Tensor) -> Tensor:
        ctx.forms = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors]
        return torch.empty(0, dtype=tensors[0].dtype, device=tensors[0].device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.forms)
