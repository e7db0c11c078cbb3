"""Teams on the teams of schedules: loss, gradients, running statistics, updates and predictions of the plain step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from parallel.memory.policy import ActivationPolicy
from parallel.schedule.mesh import Mesh
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.engine_runs import LR, SEED, SGD, assert_equal, net, on_threads, plain, steps_of
from tests.helpers.plain_step import plain_run
from tests.helpers.small_nets import ALL_NETS, batch_of

STRIPS, COLUMNS, QUARTERS = Grid(2, 1), Grid(1, 2), Grid(2, 2)


def of_teams(
    schedule: str, grid: Grid, depth: int = 2, groups: int = 1, m: int = 4, policy: ActivationPolicy | None = None
) -> Strategy:
    depth = 1 if schedule == "spatial" else depth
    chunks = 2 if schedule == "interleaved" else 1
    ranks = groups * depth * grid.members
    return Strategy(schedule, ranks, depth, m, chunks, grid=grid, policy=policy or ActivationPolicy())


CASES = [
    ("skips", of_teams("spatial", STRIPS)),
    ("skips", of_teams("spatial", QUARTERS)),
    ("skips", of_teams("spatial", COLUMNS, groups=2)),
    ("skips", of_teams("1f1b", STRIPS)),
    pytest.param("skips", of_teams("gpipe", QUARTERS), marks=pytest.mark.long),
    ("skips", of_teams("interleaved", STRIPS)),
    ("skips", of_teams("master", COLUMNS)),
    ("skips", of_teams("bidirectional", STRIPS, 3)),
    ("skips", of_teams("spatial", STRIPS, policy=ActivationPolicy("block"))),
    pytest.param("skips", of_teams("1f1b", COLUMNS, policy=ActivationPolicy("stage")), marks=pytest.mark.long),
    ("skips", of_teams("1f1b", STRIPS, policy=ActivationPolicy("block", offload="overlap", smallest=0))),
    pytest.param("two-outputs", of_teams("spatial", STRIPS), marks=pytest.mark.long),
    ("two-outputs", of_teams("mp-basic", STRIPS)),
    pytest.param("two-outputs", of_teams("mast", QUARTERS, m=2), marks=pytest.mark.long),
]


@pytest.mark.parametrize(("net", "strategy"), CASES, ids=lambda value: str(value).replace(" ", "-"))
def test_every_schedule_of_teams_gives_the_plain_step(net: str, strategy: Strategy) -> None:
    assert_equal(on_threads(net, strategy, steps_of(strategy.m)), plain(net, strategy.m), torch.float64)


def test_tiles_of_another_size_in_a_later_step() -> None:
    strategy, sizes = of_teams("1f1b", COLUMNS), (12, 16)
    steps = [batch_of([2] * 4, px, px, torch.float64) for px in sizes]
    model, loss = net("skips", torch.float64), ALL_NETS["skips"][1]
    expected = plain_run(model, loss, SGD, steps, seed=SEED, lr=LR)
    assert_equal(on_threads("skips", strategy, steps), expected, torch.float64)


def test_members_are_neighbours_and_hold_what_their_team_holds() -> None:
    mesh = Mesh(2, (0, 1), members=4)
    assert (mesh.world, mesh.teams) == (16, 4)
    assert [list(mesh.ranks_of(team)) for team in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [mesh.team_of(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 3]
    assert (mesh.member_of(7), mesh.group_of(7), mesh.group_of(8)) == (3, 0, 1)
    assert mesh.ranks_with(0) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert mesh.rank_at(1, group=1) == 12


def test_a_run_of_eight_ranks_connects_those_that_exchange() -> None:
    """A pair of ranks is a communicator of NCCL; a team of eight had 56 of them, and so had two teams of four."""
    assert len(Mesh(1, (0,), members=8).pairs({})) == 0
    pairs = Mesh(1, (0, 1), members=4).pairs({(0, 1): True})
    assert set(pairs) == {(p, 4 + p) for p in range(4)} | {(4 + p, p) for p in range(4)}


@pytest.mark.parametrize(
    ("strategy", "reason"),
    [
        (of_teams("zero-bubble", STRIPS), "splits the backward pass"),
        (Strategy("spatial", 2, 1, 2), "say how"),
        (dataclasses.replace(of_teams("1f1b", STRIPS), schedule_csv=""), "schedule file is of single ranks"),
    ],
)
def test_what_teams_cannot_do_is_refused_by_name(strategy: Strategy, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        _ = strategy.mesh
