"""What a member of a team waits for within a pass, told to whoever watches its rank.

A rank that waits for its neighbours in the midst of an action would look like one that is stuck there; once this is
told, the one that keeps the others waiting is the one that is named.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from parallel.comm.communicator import Work

Told = Callable[[str | None], None]
"""Is given what is waited for, and None once it is there."""


class Talk(Protocol):
    """As much of a communicator as the members of a team need."""

    rank: int
    world: int

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work: ...

    def iall_reduce(self, tensor: Tensor) -> Work: ...

    def all_reduce(self, tensor: Tensor) -> None: ...


class ToldWaits:
    """A team's communicator, which tells what its rank waits for.

    Args:
        talk: of the team alone, members in order.
        ranks: numbers that the members have in the run.

    Attributes:
        told: is told; None: nobody is.
    """

    def __init__(self, talk: Talk, ranks: Sequence[int]) -> None:
        self.rank, self.world = talk.rank, talk.world
        self.told: Told | None = None
        self._talk, self._ranks = talk, ranks
        others = [str(rank) for member, rank in enumerate(ranks) if member != talk.rank]
        self._others = f"rank{'s' * (len(others) > 1)} {', '.join(others)}"

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._talk.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        work = self._talk.irecv(tensor, peer, tag)
        return _ToldWork(work, self, f"a piece {tuple(tensor.shape)} of a map or sum, from rank {self._ranks[peer]}")

    def iall_reduce(self, tensor: Tensor) -> Work:
        work = self._talk.iall_reduce(tensor)
        return _ToldWork(work, self, f"a sum {tuple(tensor.shape)} with {self._others}")

    def all_reduce(self, tensor: Tensor) -> None:
        self.iall_reduce(tensor).wait()


class _ToldWork:
    def __init__(self, work: Work, waits: ToldWaits, what: str) -> None:
        self._work, self._waits, self._what = work, waits, what

    def wait(self) -> None:
        told = self._waits.told
        if told is None or self._work.done():
            self._work.wait()
            return
        told(self._what)
        self._work.wait()  # where it fails, the run is over, and what it waited for stays told
        told(None)

    def done(self) -> bool:
        return self._work.done()
