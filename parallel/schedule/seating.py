"""Which ranks sit on which seat: schedules place stages on seats, and on each seat sits one rank, or a team of several.

Letters as in ``placement``: d groups of D seats; seat = g D + k. Ranks are numbered seat by seat, the members of a team
one after the other: all that answer to a seat are neighbours.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from parallel.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Seating:
    """Ranks on the seats of ``placement``, which says how many there are on each."""

    placement: Placement

    @property
    def teams(self) -> tuple[int, ...]:
        """Ranks on each of the D seats of a group."""
        return self.placement.teams or (1,) * self.placement.depth

    @property
    def world(self) -> int:
        return self.placement.groups * sum(self.teams)

    @property
    def together(self) -> bool:
        """On some seat there is more than one rank."""
        return max(self.teams) > 1

    def ranks_on(self, seat: int) -> range:
        """Return the ranks on a seat, member 0 first."""
        group, k = divmod(seat, self.placement.depth)
        first = group * sum(self.teams) + sum(self.teams[:k])
        return range(first, first + self.teams[k])

    def seat_of(self, rank: int) -> int:
        group, left = divmod(rank, sum(self.teams))
        k = 0
        while left >= self.teams[k]:
            left -= self.teams[k]
            k += 1
        return group * self.placement.depth + k

    def member_of(self, rank: int) -> int:
        """Return the number of a rank in its team."""
        return rank - self.ranks_on(self.seat_of(rank)).start

    def group_of(self, rank: int) -> int:
        return self.placement.group_of(self.seat_of(rank))

    def rank_of(self, stage: int, replica: int = 0, group: int = 0) -> int:
        """Return member 0 of the team that computes ``stage`` of ``replica`` in ``group``."""
        return self.ranks_on(self.placement.rank_of(stage, replica, group)).start

    def holders(self, stage: int) -> tuple[int, ...]:
        """Return the ranks with a copy of ``stage``, in ascending order: its gradients are summed over these."""
        return tuple(rank for seat in self.placement.holders(stage) for rank in self.ranks_on(seat))

    def pairs(self, links: Mapping[tuple[int, int], bool]) -> tuple[tuple[int, int], ...]:
        """Return (sender, receiver) of all ranks between which stages may hand something over.

        Of two teams alike, a member sends its part of a map to the member with the same part, and whole values come
        from and go to member 0. Within a team, members exchange through a communicator of their own.

        Args:
            links: (source stage, target stage) -> a gradient comes back.
        """
        pairs = []
        for one, other in self.placement.pairs(links):
            senders, receivers = self.ranks_on(one), self.ranks_on(other)
            for p, q in itertools.product(range(len(senders)), range(len(receivers))):
                if p == q or 0 in (p, q) or len(senders) != len(receivers):
                    pairs.append((senders[p], receivers[q]))
        return tuple(sorted(pairs))
