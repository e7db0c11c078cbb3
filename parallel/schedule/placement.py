"""Which rank computes which stage: the mesh of data-parallel groups and pipeline ranks, with inverted replicas.

Letters as in the papers: d groups of D ranks; rank = g D + k. Replica 0 has its stage s on rank s mod D of its group
(several chunks a rank when there are more stages than ranks), replica 1 the other way round.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Placement:
    """A mesh of ``groups`` x ``depth`` ranks.

    Attributes:
        groups: data-parallel groups, d.
        depth: ranks of a group, D.
        stages: of the model; ``depth``, or a multiple of it when a rank holds several chunks.
        replicas: copies of the model in a group, 1 or 2; with 2 the second is inverted.
        teams: ranks that sit in the place of each of the D ranks (``seating``); empty: one.
    """

    groups: int
    depth: int
    stages: int
    replicas: int = 1
    teams: tuple[int, ...] = ()

    @property
    def world(self) -> int:
        return self.groups * self.depth

    def rank_of(self, stage: int, replica: int = 0, group: int = 0) -> int:
        """The rank that computes ``stage`` of ``replica`` in ``group``."""
        k = stage % self.depth
        return group * self.depth + (self.depth - 1 - k if replica else k)

    def group_of(self, rank: int) -> int:
        return rank // self.depth

    def rank_beside(self, rank: int, stage: int, replica: int) -> int:
        """The rank that computes ``stage`` of ``replica`` in the group of ``rank``."""
        return self.rank_of(stage, replica, self.group_of(rank))

    def held_by(self, rank: int) -> tuple[tuple[int, int], ...]:
        """(stage, replica) of all that ``rank`` computes, replica 0 first."""
        group = self.group_of(rank)
        return tuple(
            (stage, replica)
            for replica in range(self.replicas)
            for stage in range(self.stages)
            if self.rank_of(stage, replica, group) == rank
        )

    def holders(self, stage: int) -> tuple[int, ...]:
        """Ranks with a copy of ``stage``, in ascending order, each once: its gradients are summed over these."""
        return tuple(
            sorted({self.rank_of(stage, replica, g) for g in range(self.groups) for replica in range(self.replicas)})
        )

    def is_summed(self, stage: int) -> bool:
        """Return whether more than one rank holds a copy of ``stage``."""
        holders = self.holders(stage)
        return len(holders) > 1 or (bool(self.teams) and self.teams[holders[0] % self.depth] > 1)

    def pairs(self, links: Mapping[tuple[int, int], bool]) -> tuple[tuple[int, int], ...]:
        """(sender, receiver) of all ranks between which stages hand something over, in ascending order.

        Args:
            links: (source stage, target stage) -> a gradient comes back.
        """
        ways: set[tuple[int, int]] = set()
        for group in range(self.groups):
            for replica in range(self.replicas):
                for (source, target), back in links.items():
                    sender, receiver = (self.rank_of(stage, replica, group) for stage in (source, target))
                    ways |= {(sender, receiver), (receiver, sender)} if back else {(sender, receiver)}
        return tuple(sorted((sender, receiver) for sender, receiver in ways if sender != receiver))
