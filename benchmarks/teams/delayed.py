"""A communicator whose messages take longer: each is handed on a while after it was sent, by a thread that sleeps, so
that no processor time goes into it.

Takes any communicator; gives one, and when messages were sent and asked for.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel.comm.communicator import Communicator, Work


class Delayed:
    """``inner``, whose messages and sums take ``delay_s`` longer.

    Attributes:
        delay_s: of what is sent from now on; changed only where nothing is under way.
        sums: that were begun.
        noted: what is sent and received now counts.
        sent: by peer: when each message was sent, on the clock of all processes of a machine.
        asked: by peer: when each message was first waited for, in the order of receives.
    """

    def __init__(self, inner: Communicator, delay_s: float) -> None:
        self.rank, self.world, self.noted, self.sums = inner.rank, inner.world, True, 0
        self.sent: dict[int, list[float]] = defaultdict(list)
        self.asked: dict[int, list[float]] = defaultdict(list)
        self._inner, self.delay_s = inner, delay_s
        self._under_way: queue.SimpleQueue[tuple[float, Callable[[], Work], _Late]] = queue.SimpleQueue()
        threading.Thread(target=self._hand_on, name="delayed messages", daemon=True).start()

    exchange = Communicator.exchange

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send; ``tensor`` is a copy that nobody changes."""
        if self.noted:
            self.sent[peer].append(time.perf_counter())
        return self._later(lambda: self._inner.isend(tensor, peer, tag))

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        if not self.noted:
            return self._inner.irecv(tensor, peer, tag)
        number = len(self.asked[peer])
        self.asked[peer].append(0.0)
        return _Watched(self._inner.irecv(tensor, peer, tag), self.asked[peer], number)

    def iall_reduce(self, tensor: Tensor) -> Work:
        self.sums += 1
        return self._later(lambda: self._inner.iall_reduce(tensor))

    def all_reduce(self, tensor: Tensor) -> None:
        self.iall_reduce(tensor).wait()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def _later(self, begin: Callable[[], Work]) -> Work:
        if not self.delay_s:
            return begin()
        late = _Late()
        self._under_way.put((time.perf_counter() + self.delay_s, begin, late))
        return late

    def _hand_on(self) -> None:
        while True:
            due, begin, late = self._under_way.get()
            if (rest := due - time.perf_counter()) > 0:
                time.sleep(rest)
            late.work = begin()
            late.begun.set()


class _Late:
    work: Work

    def __init__(self) -> None:
        self.begun = threading.Event()

    def wait(self) -> None:
        self.begun.wait()
        self.work.wait()

    def done(self) -> bool:
        return self.begun.is_set() and self.work.done()


class _Watched:
    def __init__(self, work: Work, asked: list[float], number: int) -> None:
        self._work, self._asked, self._number = work, asked, number

    def wait(self) -> None:
        self._asked[self._number] = self._asked[self._number] or time.perf_counter()
        self._work.wait()

    def done(self) -> bool:
        return self._work.done()


def shown_s(sent: list[float], asked: list[float], delay_s: float) -> float:
    """Return the seconds of travel during which the receiver did nothing but wait.

    Args:
        sent, asked: of the same messages in the same order.
    """
    assert len(sent) == len(asked)
    return sum(max(0.0, posted + delay_s - max(posted, wanted)) for posted, wanted in zip(sent, asked, strict=True))
