"""Mesh of ranks: data-parallel groups x pipeline x members of a team, and the stages that each team computes.

Letters as in the papers: d groups of D teams; team = g D + k. A schedule has a row of actions for each team. A team is
one rank, or several that divide each tile among them. Ranks are numbered team by team: members of a team are
neighbours, and where teams have one member, team t is rank t.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Mesh:
    """Mesh of ``groups`` x ``depth`` teams.

    Attributes:
        stage_teams: k of the team of a group that computes each stage of replica 0. Where a team computes several
            stages of a replica, it holds several chunks of the model.
        replicas: copies of the model in a group, 1 or 2; with 2 the second is inverted.
        members: ranks of a team.
    """

    groups: int
    stage_teams: tuple[int, ...]
    replicas: int = 1
    members: int = 1

    @cached_property
    def depth(self) -> int:
        """Teams of a group, D."""
        return max(self.stage_teams, default=-1) + 1

    @property
    def stages(self) -> int:
        """Stages of the model."""
        return len(self.stage_teams)

    @property
    def teams(self) -> int:
        """Teams of all groups."""
        return self.groups * self.depth

    @property
    def world(self) -> int:
        """Ranks of all teams."""
        return self.teams * self.members

    def team_at(self, stage: int, replica: int = 0, group: int = 0) -> int:
        """Return the team that computes ``stage`` of ``replica`` in ``group``."""
        k = self.stage_teams[stage]
        return group * self.depth + (self.depth - 1 - k if replica else k)

    def peer_team(self, team: int, stage: int, replica: int) -> int:
        """Return the team that computes ``stage`` of ``replica`` in the group of ``team``."""
        return self.team_at(stage, replica, team // self.depth)

    def held_by(self, team: int) -> tuple[tuple[int, int], ...]:
        """Return (stage, replica) of all that ``team`` computes, replica 0 first."""
        return tuple(self._held[team % self.depth])

    @cached_property
    def _held(self) -> list[list[tuple[int, int]]]:
        held: list[list[tuple[int, int]]] = [[] for _ in range(self.depth)]
        for replica, stage in itertools.product(range(self.replicas), range(self.stages)):
            held[self.team_at(stage, replica)].append((stage, replica))
        return held

    def teams_with(self, stage: int) -> tuple[int, ...]:
        """Return the teams with a copy of ``stage``, in ascending order, each once."""
        both = itertools.product(range(self.groups), range(self.replicas))
        return tuple(sorted({self.team_at(stage, replica, group) for group, replica in both}))

    def ranks_of(self, team: int) -> range:
        """Return the ranks of a team, member 0 first."""
        return range(team * self.members, (team + 1) * self.members)

    def team_of(self, rank: int) -> int:
        """Return the team of a rank."""
        return rank // self.members

    def member_of(self, rank: int) -> int:
        """Return the number of a rank in its team."""
        return rank % self.members

    def group_of(self, rank: int) -> int:
        """Return the data-parallel group of a rank."""
        return self.team_of(rank) // self.depth

    def rank_at(self, stage: int) -> int:
        """Return member 0 of the team that computes ``stage`` of replica 0 in the first group."""
        return self.members * self.team_at(stage)

    def ranks_with(self, stage: int) -> tuple[int, ...]:
        """Return the ranks with a copy of ``stage``, in ascending order: its gradients are summed over these."""
        return tuple(rank for team in self.teams_with(stage) for rank in self.ranks_of(team))

    def pairs(self, links: Mapping[tuple[int, int], bool]) -> tuple[tuple[int, int], ...]:
        """Return (sender, receiver) of all ranks between which stages hand something over; ``links`` as of ``check``.

        A member sends its part of a map to the member of the same number, and member 0 sends to member 0 what it alone
        has. What every member has is small, and goes to the others through host memory.
        """
        ways: set[tuple[int, int]] = set()
        for group, replica in itertools.product(range(self.groups), range(self.replicas)):
            for (source, target), back in links.items():
                way = self.team_at(source, replica, group), self.team_at(target, replica, group)
                ways |= {way, way[::-1]} if back else {way}
        teams = [(self.ranks_of(one), self.ranks_of(other)) for one, other in ways if one != other]
        return tuple(sorted(pair for senders, receivers in teams for pair in zip(senders, receivers, strict=True)))
