"""A communicator whose messages and sums take longer: a thread that sleeps hands each on a while after it was sent.

Takes any communicator; gives one. No processor time goes into the delay.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from parallel.comm.communicator import Communicator, Work


class Delayed:
    """Communicator ``inner`` with slower links.

    Attributes:
        delay_s: of what is sent from now on; changed only where nothing is under way.
        sums: number of sums begun.
    """

    exchange = Communicator.exchange

    def __init__(self, inner: Communicator, delay_s: float) -> None:
        self.rank, self.world, self.sums, self.delay_s = inner.rank, inner.world, 0, delay_s
        self._inner = inner
        self._under_way: queue.SimpleQueue[tuple[float, Callable[[], Work], _Late]] = queue.SimpleQueue()
        threading.Thread(target=self._hand_on, name="delayed messages", daemon=True).start()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        """Begin to send; ``tensor`` is a copy that nobody changes."""
        return self._later(lambda: self._inner.isend(tensor, peer, tag))

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
