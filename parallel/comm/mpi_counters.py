"""Counters of ranks that talk over MPI: rank 0 keeps them, and a thread of it answers whoever adds.

Two messages an addition, on a communicator of their own. MPI's one-sided operations would need no thread, but an MPI is
free to make no progress with them while rank 0 computes.
"""

from __future__ import annotations

import threading
import time

import torch

from parallel.comm.communicator import Communicator, Work

QUESTION, ANSWER = 0, 1
"""Tags."""
LEAVING = -1
"""In place of a counter's number: no addition of this rank follows."""
PAUSE_S = 0.0005
"""Between two looks for questions."""


class MpiCounters:
    """Kept by rank 0 of a communicator.

    Args:
        communicator: that nothing else is sent on.
        count: how many counters there are.
    """

    def __init__(self, communicator: Communicator, count: int) -> None:
        self._communicator = communicator
        self._sums = [0] * count
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        if communicator.rank == 0:
            self._thread = threading.Thread(target=self._serve, name="counters", daemon=True)
            self._thread.start()

    def add(self, counter: int, amount: int) -> int:
        if self._communicator.rank == 0:
            return self._add(counter, amount)
        answer = torch.zeros(1, dtype=torch.int64)
        arrives = self._communicator.irecv(answer, 0, ANSWER)
        self._communicator.isend(torch.tensor([counter, amount]), 0, QUESTION).wait()
        arrives.wait()
        return int(answer)

    def close(self) -> None:
        if self._thread is not None:
            self._thread.join()  # until all others have left
        else:
            self._communicator.isend(torch.tensor([LEAVING, 0]), 0, QUESTION).wait()

    def _add(self, counter: int, amount: int) -> int:
        with self._lock:
            self._sums[counter] += amount
            return self._sums[counter]

    def _serve(self) -> None:
        """Answer until every other rank has left."""
        asked = {peer: self._listen(peer) for peer in range(1, self._communicator.world)}
        while asked:
            for peer, (question, work) in list(asked.items()):
                if not work.done():
                    continue
                work.wait()
                counter, amount = question.tolist()
                if counter == LEAVING:
                    del asked[peer]
                    continue
                asked[peer] = self._listen(peer)
                self._communicator.isend(torch.tensor([self._add(counter, amount)]), peer, ANSWER).wait()
            time.sleep(PAUSE_S)

    def _listen(self, peer: int) -> tuple[torch.Tensor, Work]:
        question = torch.zeros(2, dtype=torch.int64)
        return question, self._communicator.irecv(question, peer, QUESTION)
