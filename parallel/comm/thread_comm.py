"""Ranks as threads of one process: for checking a strategy without a launcher, and for tests.

``run_on_threads(world, function)`` calls ``function(communicator, argument)`` once per rank and gives the results in
order of rank. A send and its receive meet: whichever comes second copies, and both are done. The threads share what a
process has one of, such as torch's random number generator and the standard streams.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator, Work
from parallel.comm.objects import in_memory_order

Result = TypeVar("Result")


class ThreadGroup:
    """The messages and sums under way between the threads of a group, and whether the group is broken.

    Args:
        timeout_s: how long an operation waits for the other ranks before it fails.
    """

    def __init__(self, world: int, timeout_s: float) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.changed = threading.Condition()
        self.broken: str | None = None
        """Why no rank can go on."""
        self._waiting: dict[tuple[Hashable, bool], collections.deque[ThreadWork]] = {}
        """Sends (True) and receives that the other rank has not come to."""
        self._meetings: dict[Hashable, dict[int, ThreadWork]] = collections.defaultdict(dict)

    def communicator(self, rank: int) -> ThreadCommunicator:
        """Return the communicator of ``rank``."""
        return ThreadCommunicator(self, (), rank, self.world, rank)

    def fail(self, reason: str) -> None:
        """Have every rank that waits, now or later, raise; the first reason stands."""
        with self.changed:
            self.broken = self.broken or reason
            self.changed.notify_all()

    def post(self, key: Hashable, work: ThreadWork, *, sends: bool) -> None:
        """Begin to send or to receive the message ``key``; whichever comes second copies."""
        with self.changed:
            waiting = self._waiting.get((key, not sends))
            if not waiting:
                self._waiting.setdefault((key, sends), collections.deque()).append(work)
                return
            other = waiting.popleft()
            if not waiting:
                del self._waiting[key, not sends]  # tags are many
        send, receive = (work, other) if sends else (other, work)
        _copy(send, receive)
        self._finish([work, other])

    def meet(
        self, key: Hashable, rank: int, world: int, work: ThreadWork, last: Callable[[list[Tensor]], None]
    ) -> None:
        """Join the collective operation ``key``; the last of ``world`` ranks to come calls ``last`` with the tensors of
        all in order of rank."""
        with self.changed:
            joined = self._meetings[key]
            joined[rank] = work
            if len(joined) < world:
                return
            del self._meetings[key]
        works = [joined[number] for number in range(world)]
        last([each.tensor for each in works])
        self._finish(works)

    def _finish(self, works: Sequence[ThreadWork]) -> None:
        with self.changed:
            for work in works:
                work.finished = True
            self.changed.notify_all()


class ThreadWork:
    """An operation under way on one rank; holds its tensor."""

    def __init__(self, group: ThreadGroup, tensor: Tensor, what: str) -> None:
        self._group = group
        self._what = what
        self.tensor = tensor
        self.finished = False

    def wait(self) -> None:
        group = self._group
        with group.changed:
            met = group.changed.wait_for(lambda: self.finished or group.broken, group.timeout_s)
        if self.finished:
            return
        reason = group.broken if met else f"no answer for {group.timeout_s:g} s"
        raise CommunicationError(f"{self._what} failed: {reason}")

    def done(self) -> bool:
        return self.finished


class ThreadCommunicator(Communicator):
    """One rank of a ``ThreadGroup``, or of a subgroup of it.

    Args:
        path: of the subgroup: keeps its messages apart from those of others.
        rank: in this communicator; ``thread`` is the number of the thread.
    """

    def __init__(self, group: ThreadGroup, path: tuple[int, ...], rank: int, world: int, thread: int) -> None:
        self.rank = rank
        self.world = world
        self.local_rank = thread
        self._group = group
        self._path = path
        self._collectives = 0
        self._subgroups = 0

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = self._work(tensor, f"isend of {_described(tensor)} to rank {peer}, tag {tag}")
        self._group.post((self._path, self.rank, peer, tag), work, sends=True)
        return work

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = self._work(tensor, f"irecv of {_described(tensor)} from rank {peer}, tag {tag}")
        self._group.post((self._path, peer, self.rank, tag), work, sends=False)
        return work

    def iall_reduce(self, tensor: Tensor) -> Work:
        return self._collective(tensor, f"all_reduce of {_described(tensor)}", _sum)

    def all_gather(self, tensor: Tensor) -> Tensor:
        table = tensor.detach().new_empty((self.world, *tensor.shape))
        table[self.rank] = tensor.detach()

        def gather(flat_tables: list[Tensor]) -> None:
            tables = [flat.view(self.world, tensor.numel()) for flat in flat_tables]
            for number, source in enumerate(tables):
                for each in tables:
                    each[number] = source[number]

        self._collective(table, f"all_gather of {_described(tensor)}", gather).wait()
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        def spread(tensors: list[Tensor]) -> None:
            for number, each in enumerate(tensors):
                if number != source:
                    each.copy_(tensors[source])

        self._collective(tensor, f"broadcast of {_described(tensor)} from rank {source}", spread).wait()

    def barrier(self) -> None:
        self._collective(torch.empty(0), "barrier", lambda _: None).wait()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        self._subgroups += 1
        if self.rank not in ranks:
            return None
        path = (*self._path, self._subgroups)
        return ThreadCommunicator(self._group, path, list(ranks).index(self.rank), len(ranks), self.local_rank)

    def abort(self) -> None:
        self._group.fail(f"rank {self.local_rank} asked all to stop")

    def _work(self, tensor: Tensor, what: str) -> ThreadWork:
        name = f"rank {self.rank} of {self.world}"
        return ThreadWork(self._group, in_memory_order(tensor.detach()), f"{name}: {what}")

    def _collective(self, tensor: Tensor, what: str, last: Callable[[list[Tensor]], None]) -> ThreadWork:
        self._collectives += 1
        work = self._work(tensor, what)
        self._group.meet((self._path, self._collectives), self.rank, self.world, work, last)
        return work


def run_on_threads(
    world: int, function: Callable[[Communicator, Any], Result], argument: Any = None, *, timeout_s: float = 60
) -> list[Result]:
    """Return the results of ``function(communicator, argument)`` on each of ``world`` threads, in order of rank.

    Args:
        timeout_s: how long an operation waits for the other ranks; also how long a thread may go on after another has
            failed.

    Raises:
        CommunicationError: ranks waited for each other in vain, or one still computes long after another failed.
        BaseException: what the first failing rank raised.
    """
    group = ThreadGroup(world, timeout_s)
    results: dict[int, Result] = {}
    faults: list[BaseException] = []
    ended = threading.Semaphore(0)

    def run(rank: int) -> None:
        try:
            results[rank] = function(group.communicator(rank), argument)
        except BaseException as fault:
            faults.append(fault)  # before the others are told: theirs come after it
            group.fail(f"rank {rank} failed: {type(fault).__name__}: {fault}")
        finally:
            ended.release()

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank {rank}", daemon=True) for rank in range(world)]
    for thread in threads:
        thread.start()
    for _ in threads:
        while not ended.acquire(timeout=timeout_s):
            if faults:
                busy = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
                message = f"ranks {busy} still compute {timeout_s:g} s after another rank failed: {faults[0]}"
                raise CommunicationError(message) from faults[0]
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    return [results[rank] for rank in range(world)]


def _copy(send: ThreadWork, receive: ThreadWork) -> None:
    assert send.tensor.dtype == receive.tensor.dtype, f"{send.tensor.dtype} is sent, {receive.tensor.dtype} expected"
    assert len(send.tensor) == len(receive.tensor), f"{len(send.tensor)} numbers sent, {len(receive.tensor)} expected"
    receive.tensor.copy_(send.tensor)


def _sum(tensors: list[Tensor]) -> None:
    """Add up in order of rank, so that the result does not depend on who came last."""
    total = tensors[0]
    for tensor in tensors[1:]:
        total.add_(tensor)
    for tensor in tensors[1:]:
        tensor.copy_(total)


def _described(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
