"""Who sums gradients with whom: every copy of a stage once, nobody else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.rank_program import StageGroups
from parallel.schedule.mesh import Mesh


def sums(mesh: Mesh) -> list[dict[int, float]]:
    """Of each rank: the sum of 2 ** rank over those it shares a stage with, by stage."""

    def rank(communicator: Communicator, _: Any) -> dict[int, float]:
        found: dict[int, float] = {}
        for stage, ranks in sorted(StageGroups(communicator, mesh).of_stage.items()):
            number = torch.tensor([2.0**communicator.rank])
            ranks.all_reduce(number)
            found[stage] = number.item()
        return found

    return run_on_threads(mesh.teams, rank, timeout_s=20)


@pytest.mark.parametrize(
    "mesh",
    [Mesh(1, (0, 1, 2)), Mesh(2, (0, 1, 0, 1)), Mesh(1, (0, 1, 2), 2), Mesh(1, (0, 1, 2, 3), 2), Mesh(2, (0, 1, 2), 2)],
    ids=str,
)
def test_every_rank_meets_all_copies_of_its_stages(mesh: Mesh) -> None:
    for rank, found in enumerate(sums(mesh)):
        expected = {stage: sum(2.0**r for r in mesh.teams_with(stage)) for stage, _ in mesh.held_by(rank)}
        assert found == expected


def test_the_same_ranks_share_one_communicator() -> None:
    """Each subgroup costs a communicator of the backend, and all ranks take part in making it."""

    class Counting:
        def __init__(self, inner: Communicator) -> None:
            self.inner, self.rank, self.made = inner, inner.rank, 0

        def subgroup(self, ranks: tuple[int, ...]) -> Communicator | None:
            self.made += 1
            return self.inner.subgroup(ranks)

    def rank(communicator: Communicator, _: Any) -> tuple[int, int]:
        counting: Any = Counting(communicator)
        holders = StageGroups(counting, Mesh(1, (0, 1, 2, 3), 2))
        return counting.made, len({id(each) for each in holders.of_stage.values()})

    assert run_on_threads(4, rank, timeout_s=20) == [(2, 1)] * 4
