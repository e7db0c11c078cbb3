"""Communicators between the ranks that hold copies of the same stage."""

from __future__ import annotations

from collections.abc import Sequence

from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.schedule.mesh import Mesh


class StageGroups:
    """Communicators of the ranks that hold copies of this rank's stages. Every rank makes one at the same time.

    Args:
        pairs: also make those of each pair of inverse ranks.

    Attributes:
        of_stage: communicator of all ranks that hold a stage, by stage.
        pairs: of the two ranks of this group that do, by stage; not where one rank holds both replicas.
        team: of the ranks of this rank's team.
    """

    def __init__(self, communicator: Communicator, mesh: Mesh, *, pairs: bool) -> None:
        self._communicator = communicator
        self._made: dict[tuple[int, ...], Communicator | None] = {}
        self.of_stage: dict[int, Communicator] = {}
        self.pairs: dict[int, Communicator] = {}
        self.team: Communicator = LocalCommunicator()
        self._alone = mesh.depth == 1 and mesh.members == 1  # no message meets a sum
        for stage in range(mesh.stages):
            ranks = self._among(mesh.ranks_with(stage))
            if ranks is not None:
                self.of_stage[stage] = ranks
            for group in range(mesh.groups) if pairs else ():
                pair = sorted(mesh.rank_at(stage, replica, group) for replica in (0, 1))
                ranks = self._among(pair) if pair[0] != pair[1] else None
                if ranks is not None:
                    self.pairs[stage] = ranks

        for team in range(mesh.teams if mesh.members > 1 else 0):
            # Its own, where it is also that of a stage: sums of gradients come between those of passes.
            ranks = communicator.subgroup(tuple(mesh.ranks_of(team)))
            if ranks is not None:
                self.team = ranks

    def _among(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator of ``ranks``; made once, by all ranks of the run, also by those outside it."""
        key = tuple(ranks)
        if key not in self._made:
            inside = self._communicator.rank in key
            if self._alone and len(key) == self._communicator.world:
                self._made[key] = self._communicator
            elif len(key) > 1:
                self._made[key] = self._communicator.subgroup(key)
            else:
                self._made[key] = LocalCommunicator() if inside else None
        return self._made[key]
