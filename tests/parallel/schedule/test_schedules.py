"""Schedules by name: right for any mesh, as long as its paper says, with as many activations as its paper says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import Schedule
from parallel.schedule.check import check
from parallel.schedule.dependencies import Links
from parallel.schedule.generators import bidirectional, gpipe, interleaved, master, mp_basic, one_f_one_b, zero_bubble
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, default_microbatches, mesh_for
from parallel.schedule.shares import share_of
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost, Timeline
from tests.golden.regenerate import SCHEDULE_FILES, schedules
from tests.helpers.schedules import meshes, small_mesh, texts

DEPTHS, COUNTS = range(1, 7), range(1, 13)


def step_of(schedule: Schedule) -> Timeline:
    """Return the step of a chain of stages of F = 1 and B = 2 seconds that keep 1 byte; messages take no time."""
    replicas = 1 + max(action.replica for row in schedule.values() for action in row)
    ranks = {action.stage: rank for rank, row in schedule.items() for action in row if not action.replica}
    mesh = Mesh(1, tuple(ranks[stage] for stage in sorted(ranks)), replicas)
    return simulate(schedule, mesh, [StageCost(1.0, 2.0, 1.0, 1.0, 1)] * mesh.stages)


def makespan(schedule: Schedule) -> float:
    return step_of(schedule).makespan_s


def peaks(schedule: Schedule) -> list[int]:
    """Return the most microbatches that each rank keeps activations of at one time, over all its stages."""
    kept = step_of(schedule).peak_bytes
    return [kept[rank] for rank in sorted(kept)]


@given(meshes(), st.booleans())
def test_passes_check_whatever_the_mesh_and_the_skips(mesh: tuple[Schedule, Mesh, Links], recompute: bool) -> None:
    schedule, mesh, links = mesh
    check(schedule, mesh, links)
    check(lower(schedule, mesh, links, recompute=recompute), mesh, links)


@pytest.mark.parametrize("depth", DEPTHS)
def test_step_time_is_that_of_the_paper(depth: int) -> None:
    for m in COUNTS:
        assert makespan(mp_basic(depth, m)) == m * depth * 3
        assert makespan(gpipe(depth, m)) == (m + depth - 1) * 3
        assert makespan(one_f_one_b(depth, m)) == (m + depth - 1) * 3
        assert makespan(master(depth, m)) == m * (depth * 2 + 1) + depth - 1
        if m >= depth:
            assert makespan(zero_bubble(depth, m)) == m * 3 + depth - 1
            for chunks in (2, 3):
                assert makespan(interleaved(depth, m, chunks)) == m * 3 * chunks + (depth - 1) * 3


@pytest.mark.parametrize("depth", DEPTHS)
def test_activations_kept_are_those_of_the_paper(depth: int) -> None:
    for m in COUNTS:
        assert peaks(mp_basic(depth, m)) == [1] * depth
        assert peaks(gpipe(depth, m)) == [m] * depth
        assert peaks(one_f_one_b(depth, m)) == [min(m, depth - k) for k in range(depth)]
        assert peaks(zero_bubble(depth, m)) == [min(m, depth)] * depth
        assert peaks(master(depth, m)) == [1] * depth
        for chunks in (2, 3):
            turn = -(-m // max(1, m // depth))
            assert max(peaks(interleaved(depth, m, chunks))) <= (chunks - 1) * turn + 2 * depth - 1
        if depth > 1:
            assert makespan(zero_bubble(depth, m)) < makespan(one_f_one_b(depth, m))
            assert all(peak <= min(m, depth + 1) for peak in peaks(bidirectional(depth, m)))


@pytest.mark.parametrize("m", [2, 4, 6, 8, 10, 12])
def test_bidirectional_on_two_and_four_ranks_is_as_short_as_can_be(m: int) -> None:
    assert makespan(bidirectional(2, m)) == 3 * m
    assert m < 6 or makespan(bidirectional(4, m)) == 3 * m + 3


@pytest.mark.parametrize("depth", range(2, 9))
def test_bidirectional_is_shorter_than_1f1b(depth: int) -> None:
    for m in range(2, 25):
        bubble = makespan(bidirectional(depth, m)) - 3 * m
        assert bubble < 3 * (depth - 1)
        if m >= depth:
            least = 3 * ((depth - 1) // 2)  # a rank in the middle waits for its first F, and others for its last B
            assert least <= bubble <= least + depth // 2 + m % 2


def test_rows_of_the_papers() -> None:
    assert texts(bidirectional(2, 2)) == ["0F0 1:1F1 1:1B1 0B0", "1:0F1 1F0 1B0 1:0B1"]
    assert texts(interleaved(2, 4, 2)) == [
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    ]


@given(st.sampled_from(sorted(set(SCHEDULES) - {"mast"})), st.integers(1, 3), st.integers(2, 4), st.integers(3, 12))
def test_each_group_computes_its_share(name: str, groups: int, depth: int, m: int) -> None:
    mesh = small_mesh(name, groups, depth)
    schedule = build_schedule(name, mesh, m)
    assert sorted(schedule) == list(range(groups * depth))
    for rank, actions in schedule.items():
        assert {action.microbatch for action in actions} == set(share_of(rank // mesh.depth, groups, m))


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("depth", [2, 3, 4])
def test_default_microbatches_can_be_run(name: str, depth: int) -> None:
    mesh = small_mesh(name, depth=depth)
    assert build_schedule(name, mesh, default_microbatches(name, depth))


@pytest.mark.parametrize(
    ("name", "mesh", "m", "message"),
    [
        ("gpip", (1, 2, 1), 2, "no schedule 'gpip'.*mp-basic.*bidirectional"),
        ("master", (1, 1, 1), 2, "master .* 2 ranks a group, not 1"),
        ("interleaved", (1, 2, 1), 2, "2 or more stages a rank, not 1: ask for 4 stages on 2 ranks, or use 1f1b"),
        ("gpipe", (1, 2, 3), 2, "one stage a rank, not 3: ask for 2 stages, or use interleaved"),
        ("gpipe", (0, 2, 1), 2, "at least one group .* not 0 x 2"),
        ("gpipe", (1, 0, 1), 2, "at least one rank, not 1 x 0"),
        ("mast", (1, 1, 2), 2, "at least 2 ranks.*; .*one stage a rank"),
        ("mast", (2, 2, 1), 3, "2 microbatches a group, 4 in 2 groups, not 3: set --microbatches 4, or use master"),
        ("master", (2, 2, 1), 1, "1 microbatches .* 2 data-parallel groups busy: raise --microbatches to 2"),
        ("1f1b", (2, 2, 1), 0, "0 microbatches cannot keep"),
    ],
)
def test_what_cannot_be_is_refused(name: str, mesh: tuple[int, int, int], m: int, message: str) -> None:
    groups, depth, chunks = mesh
    with pytest.raises(ValueError, match=message):
        build_schedule(name, mesh_for(name, groups=groups, depth=depth, chunks=chunks), m)


def test_golden_schedules_are_todays() -> None:
    kept = {path.name: path.read_text() for path in SCHEDULE_FILES.glob("*.csv")}
    assert schedules() == kept, "a schedule changed: run `make golden` and look at the diff"


def test_members_are_neighbours_and_hold_what_their_team_holds() -> None:
    mesh = Mesh(2, (0, 1), members=4)
    assert (mesh.world, mesh.teams) == (16, 4)
    assert [list(mesh.ranks_of(team)) for team in (0, 3)] == [[0, 1, 2, 3], [12, 13, 14, 15]]
    assert [mesh.team_of(rank) for rank in (0, 3, 4, 15)] == [0, 0, 1, 3]
    assert (mesh.member_of(7), mesh.group_of(7), mesh.group_of(8)) == (3, 0, 1)
    assert mesh.ranks_with(0) == (0, 1, 2, 3, 8, 9, 10, 11)
    assert mesh.rank_at(1) == 4


def test_pairs_of_ranks_that_exchange() -> None:
    """A pair of ranks is a communicator of NCCL; a team of eight had 56 of them, and so had two teams of four."""
    assert Mesh(1, (0, 1, 2)).pairs({(0, 1): True, (1, 2): False, (0, 2): False}) == ((0, 1), (0, 2), (1, 0), (1, 2))
    assert Mesh(2, (0, 1)).pairs({(0, 1): True}) == ((0, 1), (1, 0), (2, 3), (3, 2))
    assert Mesh(1, (0, 1), replicas=2).pairs({(0, 1): False}) == ((0, 1), (1, 0))
    assert Mesh(1, (0, 1, 0, 1)).pairs({(0, 1): False, (1, 2): False, (0, 2): True}) == ((0, 1), (1, 0))
    assert len(Mesh(1, (0,), members=8).pairs({})) == 0
    pairs = Mesh(1, (0, 1), members=4).pairs({(0, 1): True})
    assert set(pairs) == {(p, 4 + p) for p in range(4)} | {(4 + p, p) for p in range(4)}
