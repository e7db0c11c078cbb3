"""Numbers that the ranks of a group add to, one rank at a time: what microbatches are drawn from.

Takes amounts; gives sums. No other rank has to be at a certain place for it, unlike the sums of a ``Communicator``.
Ranks that share a process share them here; ``torch_counters`` and ``mpi_counters`` keep them for processes.
"""

from __future__ import annotations

import threading
from typing import Protocol


class Counters(Protocol):
    """Whole numbers of 64 bits, 0 at first, under the numbers 0, 1, ..."""

    def add(self, counter: int, amount: int) -> int:
        """Add ``amount`` to a counter and return the sum; no other rank's addition comes between the two.

        Raises:
            CommunicationError: who keeps the counters is gone, or did not answer in time.
        """
        ...

    def close(self) -> None:
        """No addition of this rank follows."""
        ...


class MemoryCounters:
    """Of one process, for all of its threads.

    Args:
        count: how many there are.
    """

    def __init__(self, count: int) -> None:
        self._sums = [0] * count
        self._lock = threading.Lock()

    def add(self, counter: int, amount: int) -> int:
        with self._lock:
            self._sums[counter] += amount
            return self._sums[counter]

    def close(self) -> None:
        """Nothing is held."""
