"""Every schedule is right for any mesh, as long as its paper says, and keeps as many activations as its paper says."""

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
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import StageCost, Timeline
from tests.helpers.schedules import meshes

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
    assert kept is not None
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


def test_step_times_of_the_table() -> None:
    assert makespan(mp_basic(4, 2)) == 24
    assert makespan(master(4, 2)) == 21
    assert makespan(master(4, 4)) == 39
    assert makespan(gpipe(4, 8)) == makespan(one_f_one_b(4, 8)) == 33


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
            assert all(peak <= min(m, depth + 1) for peak in peaks(bidirectional(depth, m)))


@pytest.mark.parametrize("depth", range(2, 7))
def test_zero_bubble_is_shorter_than_1f1b_at_the_same_peak(depth: int) -> None:
    for m in COUNTS:
        assert makespan(zero_bubble(depth, m)) < makespan(one_f_one_b(depth, m))
        assert max(peaks(zero_bubble(depth, m))) <= max(peaks(one_f_one_b(depth, m)))


@pytest.mark.parametrize("m", [2, 4, 6, 8, 10, 12])
def test_bidirectional_on_two_ranks_has_no_bubble(m: int) -> None:
    assert makespan(bidirectional(2, m)) == 3 * m


def test_bidirectional_pair_on_two_ranks_keeps_both_busy() -> None:
    assert {rank: " ".join(map(str, row)) for rank, row in bidirectional(2, 2).items()} == {
        0: "0F0 1:1F1 1:1B1 0B0",
        1: "1:0F1 1F0 1B0 1:0B1",
    }


@pytest.mark.parametrize("m", [6, 8, 10, 12, 24])
def test_bidirectional_on_four_ranks_is_as_short_as_can_be(m: int) -> None:
    assert makespan(bidirectional(4, m)) == 3 * m + 3
    assert makespan(one_f_one_b(4, m)) == 3 * m + 9


@pytest.mark.parametrize("depth", range(2, 9))
def test_bidirectional_is_shorter_than_1f1b(depth: int) -> None:
    for m in range(2, 25):
        bubble = makespan(bidirectional(depth, m)) - 3 * m
        assert bubble < 3 * (depth - 1)
        if m >= depth:
            least = 3 * ((depth - 1) // 2)  # a rank in the middle waits for its first F, and others for its last B
            assert least <= bubble <= least + depth // 2 + m % 2


def test_interleaved_is_the_paper_s_where_depth_divides_m() -> None:
    rows = {rank: " ".join(map(str, row)) for rank, row in interleaved(2, 4, 2).items()}
    assert rows == {
        0: "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3",
        1: "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3",
    }
