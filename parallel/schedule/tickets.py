"""Microbatches drawn while a step runs: whoever is free takes the next one.

Takes counters that all ranks add to; gives each rank the microbatches it is to compute, one at a time. A rank takes
those of its own equal share in order, which it has read ahead, and then, from the last on, those that another has not
begun: the one with most left. So no rank rests while a microbatch is left to begin, and a step ends at most one
microbatch later than the best there is, whatever drifts (Graham 1966, Bounds for certain multiprocessing anomalies).
One number a rank says all: how many are taken from the front, and ``FROM_BACK`` for each that is taken from the back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from parallel.schedule.microbatch import share_of

FROM_FRONT, FROM_BACK = 1, 1 << 32


class Tickets:
    """What one rank draws, step after step. All ranks make as many steps, and end each with a sum over all of them.

    Args:
        add: (counter, amount) -> sum: adds to one of ``counters_for(world)`` numbers that all ranks share, 0 at first.
        rank, world: of the group.
        m: microbatches of a step.
    """

    def __init__(self, add: Callable[[int, int], int], rank: int, world: int, m: int) -> None:
        self._add = add
        self._rank = rank
        self._shares = [tuple(share_of(each, world, m)) for each in range(world)]
        self._odd = 0

    @staticmethod
    def counters_for(world: int) -> int:
        """How many counters a group needs: for every other step the same ones."""
        return 2 * world

    def of_step(self) -> Iterator[int]:
        """Yield the microbatches that this rank computes in its next step, each once it is asked for."""
        world = len(self._shares)
        self._odd = 1 - self._odd
        # Of the step before and the one after: that one is over for all, and none can be at this one yet.
        idle = (1 - self._odd) * world + self._rank
        self._add(idle, -self._add(idle, 0))
        while (i := self._take(self._rank, FROM_FRONT)) is not None:
            yield i
        while (owner := self._slowest()) is not None:
            if (i := self._take(owner, FROM_BACK)) is not None:
                yield i

    def _take(self, owner: int, end: int) -> int | None:
        """Take the microbatch at one end of what ``owner`` has not begun; None: there is none."""
        share, (back, front) = self._shares[owner], self._taken(owner, end)
        if front + back > len(share):
            return None
        return share[front - 1] if end == FROM_FRONT else share[len(share) - back]

    def _slowest(self) -> int | None:
        """The rank with most left to begin; None: nothing is left."""
        left = {owner: len(share) - sum(self._taken(owner, 0)) for owner, share in enumerate(self._shares)}
        owner = max(left, key=left.__getitem__)
        return owner if left[owner] > 0 else None

    def _taken(self, owner: int, more: int) -> tuple[int, int]:
        """How many of the microbatches of ``owner`` are taken from the back and from the front, with ``more``."""
        return divmod(self._add(self._odd * len(self._shares) + owner, more), FROM_BACK)
