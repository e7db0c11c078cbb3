"""Ranks as threads of one process: for checking a strategy without a launcher, for tests, and for a run of one rank.

A send and its receive meet: whichever comes second copies, and both are done. The threads share what a process has one
of, such as torch's random number generator and the standard streams.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel.comm.communicator import RECEIVE, SEND, CommunicationError, Communicator, Message, Operation, Work
from parallel.comm.objects import in_memory_order

Result = TypeVar("Result")


class ThreadGroup:
    """The messages and sums under way between the threads of a group, and whether the group is broken."""

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.broken: str | None = None
        """Why no rank can go on."""
        self.waiting: dict[Hashable, collections.deque[ThreadWork]] = {}
        """Sends and receives that the other rank has not come to."""
        self.meetings: dict[Hashable, dict[int, ThreadWork]] = collections.defaultdict(dict)
        """Collective operations that not all ranks have come to."""

    def fail(self, reason: str) -> None:
        """Raise on every rank that waits, now or later; the first reason stands."""
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()


@dataclass(eq=False, slots=True)
class ThreadWork:
    """An operation under way on one rank; holds its tensor."""

    group: ThreadGroup
    tensor: Tensor
    operation: Operation
    finished: bool = False

    def wait(self) -> None:
        group, end_s = self.group, time.monotonic() + self.group.timeout_s
        with group.changed:
            while not self.finished and not group.broken:
                if not group.changed.wait(end_s - time.monotonic()):
                    raise self.operation.lost(f"no answer for {group.timeout_s:g} s")
        if not self.finished:
            raise self.operation.lost(str(group.broken))

    def done(self) -> bool:
        return self.finished


class ThreadCommunicator(Communicator):
    """One rank of a ``ThreadGroup``, or of a subgroup of it, whose ``path`` keeps its messages apart from others'."""

    def __init__(self, group: ThreadGroup, path: tuple[int, ...], rank: int, world: int) -> None:
        self.rank = rank
        self.world = world
        self._group = group
        self._path = path
        self._collectives = 0
        self._subgroups = 0

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self.exchange([(peer, tensor)], [], tag)[0][0]

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self.exchange([], [(peer, tensor)], tag)[1][0]

    def exchange(
        self, sends: Sequence[Message], receives: Sequence[Message], tag: int
    ) -> tuple[list[Work], list[Work]]:
        leaving: list[Work] = []
        arriving: list[Work] = []
        group, messages = self._group, ((True, sends, leaving), (False, receives, arriving))
        with group.changed:
            for sending, chosen, works in messages:
                text = SEND if sending else RECEIVE
                for peer, tensor in chosen:
                    operation = Operation(self.rank, self.world, text, (tensor.shape, tensor.dtype, peer, tag))
                    work = ThreadWork(group, tensor.detach(), operation)
                    key = (self._path, self.rank, peer, tag) if sending else (self._path, peer, self.rank, tag)
                    other = group.waiting.get((key, not sending))
                    if other is None:
                        group.waiting.setdefault((key, sending), collections.deque()).append(work)
                    else:
                        there = other.popleft()
                        source, target = (work.tensor, there.tensor) if sending else (there.tensor, work.tensor)
                        if source.shape != target.shape or source.stride() != target.stride():
                            source, target = in_memory_order(source), in_memory_order(target)
                        assert source.dtype == target.dtype, f"{source.dtype} is sent, {target.dtype} expected"
                        assert source.numel() == target.numel(), (
                            f"{source.numel()} numbers sent, {target.numel()} expected"
                        )
                        target.copy_(source)
                        work.finished = there.finished = True
                        if not other:
                            del group.waiting[key, not sending]  # tags are many
                    works.append(work)
            group.changed.notify_all()
        return leaving, arriving

    def iall_reduce(self, tensor: Tensor) -> Work:
        return self._collective(tensor, "all_reduce of {} {}", _sum)

    def ireduce_scatter(self, rows: Tensor) -> Work:
        def scatter(tables: list[Tensor]) -> None:
            for number in range(len(tables)):
                total, *others = (table.view(len(tables), -1)[number] for table in tables)
                for other in others:  # in order of rank, as ``_sum`` adds
                    total.add_(other)
                [total, *others][number].copy_(total)

        return self._collective(rows, "reduce_scatter of {} {}", scatter)

    def all_gather(self, tensor: Tensor) -> Tensor:
        table = tensor.detach().new_empty((self.world, *tensor.shape))
        table[self.rank] = tensor.detach()

        def gather(flat_tables: list[Tensor]) -> None:
            tables = [flat.view(self.world, tensor.numel()) for flat in flat_tables]
            for number, source in enumerate(tables):
                for each in tables:
                    each[number] = source[number]

        self._collective(table, "all_gather into {} {}", gather).wait()
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        def spread(tensors: list[Tensor]) -> None:
            for number, each in enumerate(tensors):
                if number != source:
                    each.copy_(tensors[source])

        self._collective(tensor, "broadcast of {} {} from rank {}", spread, source).wait()

    def barrier(self) -> None:
        self._collective(torch.empty(0), "barrier", lambda _: None).wait()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._subgroups += 1
        if self.rank not in ranks:
            return None
        path = (*self._path, self._subgroups)
        return ThreadCommunicator(self._group, path, list(ranks).index(self.rank), len(ranks))

    def abort(self) -> None:
        self._group.fail(f"rank {self.rank} asked all to stop")

    def _collective(self, tensor: Tensor, text: str, last: Callable[[list[Tensor]], None], *values: int) -> ThreadWork:
        """Join a collective operation; the last rank to come calls ``last`` with the tensors of all in their order."""
        self._collectives += 1
        group, key = self._group, (self._path, self._collectives)
        operation = Operation(self.rank, self.world, text, (tensor.shape, tensor.dtype, *values))
        work = ThreadWork(group, in_memory_order(tensor.detach()), operation)
        with group.changed:
            joined = group.meetings[key]
            joined[self.rank] = work
            if len(joined) == self.world:
                del group.meetings[key]
                last([joined[rank].tensor for rank in range(self.world)])
                for each in joined.values():
                    each.finished = True
                group.changed.notify_all()
        return work


def run_on_threads(
    world: int, function: Callable[[Communicator, Any], Result], argument: Any = None, *, timeout_s: float = 60
) -> list[Result]:
    """Return the results of ``function(communicator, argument)`` on each of ``world`` threads, in order of rank.

    Args:
        timeout_s: how long an operation waits for the other ranks, and a thread may go on after another has failed.

    Raises:
        CommunicationError: ranks waited for each other in vain, or one still computes long after another failed.
        BaseException: what the first failing rank raised.
    """
    group = ThreadGroup(timeout_s)
    results: list[Future[Result]] = [Future() for _ in range(world)]
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            results[rank].set_result(function(ThreadCommunicator(group, (), rank, world), argument))
        except BaseException as fault:
            faults.append(fault)  # before the others are told: theirs come after it
            group.fail(f"rank {rank} failed: {type(fault).__name__}: {fault}")
            results[rank].set_exception(fault)

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    wait(results, return_when=FIRST_EXCEPTION)
    if faults and wait(results, timeout_s).not_done:
        busy = [rank for rank, result in enumerate(results) if not result.done()]
        message = f"ranks {busy} still compute {timeout_s:g} s after another rank failed: {faults[0]}"
        raise CommunicationError(message) from faults[0]
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return [result.result() for result in results]


def _sum(tensors: list[Tensor]) -> None:
    """Add up in order of rank, so that the result does not depend on who came last."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    for tensor in tensors[1:]:
        tensor.copy_(total)


class LocalCommunicator(ThreadCommunicator):
    """Rank 0 of 1."""

    def __init__(self) -> None:
        super().__init__(ThreadGroup(timeout_s=0), (), 0, 1)
