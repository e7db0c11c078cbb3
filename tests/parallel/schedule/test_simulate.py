"""The simulation against the formulas of the papers, against itself, and by hand where links and sums take time."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import Kind
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import Device, simulate
from parallel.schedule.timeline import LinkCost, StageCost, Timeline
from tests.helpers.schedules import PAIR, TWO_RANKS, rows, small_mesh


def units(*activation_bytes: int) -> list[StageCost]:
    """Stages of F = 1 and B = 2 seconds."""
    return [StageCost(1.0, 2.0, 1.0, 1.0, kept) for kept in activation_bytes]


def step(name: str, depth: int, m: int, *activation_bytes: int) -> Timeline:
    mesh = mesh_for(name, groups=1, depth=depth)
    costs = units(*(activation_bytes or (1,) * depth))
    return simulate(build_schedule(name, mesh, m), mesh, costs)


@pytest.mark.parametrize(
    ("name", "m", "expected_s"),
    [
        ("mp-basic", 2, 24),
        ("mast", 2, 21),
        ("master", 4, 39),
        ("gpipe", 8, 33),
        ("1f1b", 8, 33),
        ("zero-bubble", 8, 27),
    ],
)
def test_step_times_of_four_stages(name: str, m: int, expected_s: float) -> None:
    assert step(name, 4, m).makespan_s == expected_s


@given(st.integers(2, 6), st.integers(1, 9), st.floats(0.1, 2), st.floats(0, 2))
def test_formulas(depth: int, m: int, forward_s: float, longer_s: float) -> None:
    backward_s = forward_s + longer_s
    costs = [StageCost(forward_s, backward_s, 0, 0, 1)] * depth
    round_s = forward_s + backward_s
    expected_s = {
        "mp-basic": m * depth * round_s,
        "gpipe": (m + depth - 1) * round_s,
        "1f1b": (m + depth - 1) * round_s,
        "master": m * (depth * backward_s + forward_s) + (depth - 1) * forward_s,
    }
    for name, seconds in expected_s.items():
        mesh = mesh_for(name, groups=1, depth=depth)
        assert simulate(build_schedule(name, mesh, m), mesh, costs).makespan_s == pytest.approx(seconds)


def test_bubble_of_a_bidirectional_pipeline() -> None:
    assert step("bidirectional", 4, 8).bubble == pytest.approx((4 - 2) / (2 * 8 + 4 - 2))


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_peak_bytes(m: int) -> None:
    kept = (1000, 100, 30, 7)
    assert step("gpipe", 4, m, *kept).peak_bytes == {k: m * kept[k] for k in range(4)}
    assert step("1f1b", 4, m, *kept).peak_bytes == {k: min(m, 4 - k) * kept[k] for k in range(4)}
    assert step("mp-basic", 4, m, *kept).peak_bytes == dict(enumerate(kept))


def test_peak_bytes_of_a_pair_are_those_of_the_larger_stage() -> None:
    assert step("mast", 4, 2, 1000, 100, 30, 7).peak_bytes == {0: 1000, 1: 100, 2: 100, 3: 1000}
    assert step("master", 4, 8, 7, 30, 100, 1000).peak_bytes == {0: 1000, 1: 100, 2: 100, 3: 1000}


def test_recomputation_costs_a_forward_pass_and_keeps_one_microbatch() -> None:
    mesh = mesh_for("gpipe", groups=1, depth=1)
    schedule = build_schedule("gpipe", mesh, 5)
    plain = simulate(schedule, mesh, units(10))
    again = simulate(lower(schedule, mesh, {}, recompute=True), mesh, units(10))
    assert (plain.makespan_s, plain.peak_bytes) == (15, {0: 50})
    assert (again.makespan_s, again.peak_bytes) == (20, {0: 10})


def test_bytes_of_a_split_backward_pass_are_kept_until_its_second_half() -> None:
    schedule = rows("0F0 0I0 0F1 0I1 0W0 0W1")
    assert simulate(schedule, Mesh(1, (0,)), units(10)).peak_bytes == {0: 20}


def test_microbatches_of_different_sizes() -> None:
    schedule = rows("0F0 0F1 0B0 0B1")
    timeline = simulate(schedule, Mesh(1, (0,)), units(10), weights=[1.0, 0.5])
    assert [(str(s.action), s.start_s, s.end_s) for s in timeline.spans[0]] == [
        ("0F0", 0, 1),
        ("0F1", 1, 1.5),
        ("0B0", 1.5, 3.5),
        ("0B1", 3.5, 4.5),
    ]
    assert timeline.peak_bytes == {0: 15}


def test_messages_of_small_microbatches_travel_faster() -> None:
    timeline = simulate(rows("0F0 0B0", "1F0 1B0"), TWO_RANKS, units(1, 1), {(0, 1): LinkCost(4, 2)}, weights=[0.5])
    assert [span.duration_s for rank in (0, 1) for span in timeline.spans[rank]] == [0.5, 2, 1, 0.5, 1, 1]


@pytest.mark.parametrize("lowered", [False, True])
def test_messages_travel_one_at_a_time(lowered: bool) -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    if lowered:
        schedule = lower(schedule, TWO_RANKS, {(0, 1): True})
    links = {(0, 1): LinkCost(forward_s=3.0, backward_s=0.5)}
    timeline = simulate(schedule, TWO_RANKS, units(1, 1), links)
    sends = {
        str(s.action): (s.start_s, s.end_s)
        for spans in timeline.spans.values()
        for s in spans
        if s.action.peer is not None
    }
    assert sends == {"0SEND_F0>1": (1, 4), "0SEND_F1>1": (4, 7), "1SEND_B0>0": (10, 10.5), "1SEND_B1>0": (12, 12.5)}
    assert timeline.makespan_s == 14.5


def test_message_waits_until_its_receive_is_announced() -> None:
    late = rows("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")
    ahead = rows("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1RECV_F1<0 1F0 1F1")
    links = {(0, 1): LinkCost(1.0, None)}
    costs = [StageCost(1, 0, 0, 0, 0), StageCost(2, 0, 0, 0, 0)]
    assert simulate(late, TWO_RANKS, costs, links).makespan_s == 1 + 1 + 2 + 1 + 2
    assert simulate(ahead, TWO_RANKS, costs, links).makespan_s == 1 + 1 + 2 + 2


def test_links_without_gradients_hold_up_nothing() -> None:
    schedule = rows("0F0 0B0", "1F0 1B0")
    timeline = simulate(schedule, TWO_RANKS, units(1, 1), {(0, 1): LinkCost(1.0, None)})
    assert [(s.start_s, s.end_s) for s in timeline.compute(0)] == [(0, 1), (1, 3)]


def test_skip_is_waited_for() -> None:
    mesh = Mesh(1, (0, 1, 2))
    links = {(0, 1): LinkCost(0, 0), (1, 2): LinkCost(0, 0), (0, 2): LinkCost(5.0, 5.0)}
    timeline = simulate(build_schedule("mp-basic", mesh, 1), mesh, units(1, 1, 1), links)
    assert timeline.compute(2)[0].start_s == 6
    assert timeline.compute(0)[1].start_s == 6 + 3 + 5


def test_sums_run_beside_compute_and_end_the_step() -> None:
    schedule = rows("0F0 0B0 0REDUCE 1:1F1 1:1B1 1:1REDUCE", "1:0F1 1:0B1 1:0REDUCE 1F0 1B0 1REDUCE")
    timeline = simulate(schedule, PAIR, units(1, 1), {(0, 1): LinkCost(0, None)}, {0: 5.0, 1: 1.0})
    sums = [(s.action.stage, s.start_s, s.end_s) for s in timeline.spans[0] if s.action.kind is Kind.REDUCE]
    assert sums == [(0, 3, 8), (1, 8, 9)]  # ranks compute until 6
    assert timeline.makespan_s == 9
    assert timeline.busy_s(0) == 6
    assert timeline.bubble == pytest.approx(1 - 6 / 9)


def test_sum_begins_with_the_last_rank() -> None:
    mesh = Mesh(2, (0,))
    schedule = rows("0F0 0B0 0REDUCE", "0F1 0B1 0F2 0B2 0REDUCE")
    timeline = simulate(schedule, mesh, units(1), reduce_s={0: 2.0})
    assert [(s.start_s, s.end_s) for r in (0, 1) for s in timeline.spans[r] if s.action.kind is Kind.REDUCE] == [
        (6, 8)
    ] * 2


@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 2),
    st.integers(2, 5),
    st.integers(1, 10),
    st.lists(st.sampled_from([0.5, 1.0, 2.0, 3.5]), min_size=10, max_size=10),
)
def test_messages_that_cost_nothing_change_nothing(
    name: str, groups: int, depth: int, m: int, seconds: list[float]
) -> None:
    mesh = small_mesh(name, groups, depth)
    schedule = build_schedule(name, mesh, 2 * groups if name == "mast" else max(m, groups))
    costs = [StageCost(s, 2 * s, s, s, stage + 1) for stage, s in enumerate(seconds[: mesh.stages])]
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)} | {(0, mesh.stages - 1): True}
    free = dict.fromkeys(links, LinkCost(0.0, 0.0))
    plain = simulate(schedule, mesh, costs, free)
    lowered = simulate(lower(schedule, mesh, links), mesh, costs, free)
    assert {r: plain.compute(r) for r in schedule} == {r: lowered.compute(r) for r in schedule}
    assert plain.peak_bytes == lowered.peak_bytes


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        (("0B0 0F0", "1F0 1B0"), "rank 0 at 0B0"),
        (("0F0 0B0", "1B0 1F0"), "rank 1 at 1B0"),
        (("0F0 0B0", "1F0"), "rank 0 at 0B0"),
        (("0F0 0W0 0I0", "1F0 1B0"), "rank 0 at 0W0"),
        (("0F0 0SEND_F0>1", "1F0"), "0SEND_F0>1, which another rank does not wait for"),
        (("0F0", "1RECV_F0<0 1F0"), "rank 1 at 1F0"),
    ],
)
def test_schedule_that_cannot_finish(texts: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ValueError, match="the schedule cannot finish") as error:
        simulate(rows(*texts), TWO_RANKS, units(1, 1))
    assert expected in str(error.value)


def test_sums_in_different_orders_never_end() -> None:
    schedule = rows("0F0 0B0 0REDUCE 1:1REDUCE", "1F0 1B0 1REDUCE 1:0REDUCE")
    with pytest.raises(ValueError, match="0REDUCE, which another rank does not wait for"):
        simulate(schedule, PAIR, units(1, 1))


@pytest.mark.parametrize("depth", [2, 3])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sums_that_wait_for_the_end_of_everything_hide_behind_nothing(name: str, depth: int) -> None:
    mesh = small_mesh(name, 2, depth)
    schedule = build_schedule(name, mesh, 4 if name == "mast" else 12)
    costs = units(*(1,) * mesh.stages)
    links = {(stage, stage + 1): True for stage in range(mesh.stages - 1)}
    sums = dict.fromkeys(range(mesh.stages), 2.0)
    plain_s = simulate(schedule, mesh, costs).makespan_s
    early_s, late_s = (
        simulate(lower(schedule, mesh, links, reduce_at_end=late), mesh, costs, reduce_s=sums).makespan_s
        for late in (False, True)
    )
    assert plain_s <= early_s <= late_s
    # The last rank to end sums all that it holds after that.
    assert late_s >= plain_s + 2.0 * max(len({stage for stage, _ in mesh.held_by(rank)}) for rank in range(2 * depth))


COST = StageCost(1.0, 2.0, 1.0, 1.0, 10)
LINKS = {(stage, stage + 1): LinkCost(0.01, 0.01) for stage in range(7)}


def case(name: str, depth: int, m: int) -> Any:
    mesh = small_mesh(name, depth=depth)
    links = {pair: cost for pair, cost in LINKS.items() if pair[1] < mesh.stages}
    schedule = lower(build_schedule(name, mesh, m), mesh, dict.fromkeys(links, True))
    return schedule, mesh, [COST] * mesh.stages, links


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_lane_for_every_rank_is_a_device_of_its_own(name: str) -> None:
    given = case(name, 4, 2 if name == "mast" else 8)
    shared = simulate(*given, devices=[Device((0, 1, 2, 3), 4)])
    alone = simulate(*given)
    assert shared.makespan_s == pytest.approx(alone.makespan_s)
    assert shared.peak_bytes == alone.peak_bytes


@pytest.mark.parametrize("name", SCHEDULES)
def test_one_lane_does_all_the_work_one_after_the_other(name: str) -> None:
    m = 2 if name == "mast" else 8
    schedule, mesh, costs, links = case(name, 4, m)
    shared = simulate(schedule, mesh, costs, links, devices=[Device((0, 1, 2, 3), 1)])
    work = m * mesh.stages * 3.0
    assert work * 0.999 <= shared.makespan_s <= work + 0.2 * m


def test_two_ranks_at_once_take_twice_as_long() -> None:
    """gpipe on two ranks, two microbatches: rank 0 computes alone for 1 s, then both share."""
    schedule, mesh, costs, _ = case("gpipe", 2, 2)
    shared = simulate(schedule, mesh, costs, {(0, 1): LinkCost(0, 0)}, devices=[Device((0, 1), 1)])
    first = [span for span in shared.spans[0] if str(span.action) == "0F1"]
    assert (first[0].start_s, first[0].end_s) == (1.0, 3.0)


def test_devices_do_not_share_with_each_other() -> None:
    given = case("1f1b", 4, 8)
    apart = simulate(*given, devices=[Device((k,), 1) for k in range(4)])
    assert apart.makespan_s == pytest.approx(simulate(*given).makespan_s)
