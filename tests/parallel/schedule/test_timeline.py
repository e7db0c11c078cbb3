"""Simulated steps and their costs; a timeline written down and read back: as a trace, as text, as a grid."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import COMPUTE, PER_PEER, Action, Kind, Schedule, held
from parallel.schedule.generators import one_f_one_b
from parallel.schedule.mesh import Mesh
from parallel.schedule.passes import lower
from parallel.schedule.registry import SCHEDULES, build_schedule, mesh_for
from parallel.schedule.simulate import Device, simulate
from parallel.schedule.text import format_grid, from_csv, to_csv
from parallel.schedule.timeline import LinkCost, Span, StageCost, Timeline, chrome_trace
from tests.helpers.schedules import PAIR, TWO_RANKS, rows, small_mesh


def span(text: str, start_s: float, end_s: float) -> Span:
    return Span(Action.parse(text), start_s, end_s)


TIMELINE = Timeline(
    {
        0: (span("0F0", 100, 101), span("0SEND_F0>1", 101, 103), span("0B0", 106, 108), span("0REDUCE", 108, 110)),
        1: (span("1F0", 103, 104), span("1B0", 104, 106)),
    }
)


def test_step_time_and_bubble() -> None:
    """From the first action to the end of the last; only compute is busy."""
    assert (TIMELINE.start_s, TIMELINE.makespan_s) == (100, 10)
    assert [TIMELINE.busy_s(rank) for rank in (0, 1)] == [3, 3]
    assert TIMELINE.bubble == pytest.approx(1 - 6 / 20)
    assert [str(s.action) for s in TIMELINE.compute(0)] == ["0F0", "0B0"]
    empty = Timeline({0: ()})
    assert (empty.makespan_s, empty.bubble) == (0, 0)


def test_what_is_held_before_and_after_each_action() -> None:
    (rows,) = from_csv("0F0,0F1,0SEND_F0>1,0R0,0B0,0I1,0W1").values()
    changes = [f"{action} {before.name} {after.name}" for action, before, after in held(rows)]
    assert changes == [
        "0F0 NOTHING INPUTS",
        "0F1 NOTHING ACTIVATIONS",
        "0R0 INPUTS ACTIVATIONS",
        "0B0 ACTIVATIONS NOTHING",
        "0I1 ACTIVATIONS ACTIVATIONS",
        "0W1 ACTIVATIONS NOTHING",
    ]


@pytest.fixture(scope="module")
def timeline() -> Timeline:
    mesh = mesh_for("bidirectional", groups=1, depth=4)
    links = {(stage, stage + 1): LinkCost(0.1, 0.2) for stage in range(3)}
    schedule = lower(build_schedule("bidirectional", mesh, 8), mesh, dict.fromkeys(links, True))
    return simulate(schedule, mesh, [StageCost(1, 2, 1, 1, 1)] * 4, links, {0: 1.0})


@pytest.fixture(scope="module")
def trace(timeline: Timeline) -> dict[str, Any]:
    measured = Timeline({0: (Span(Action.parse("0F0"), 1000.0, 1000.5),)})
    made: dict[str, Any] = json.loads(json.dumps(chrome_trace({"simulated": timeline, "measured": measured})))
    return made


def test_every_span_is_there_once_in_order_of_time(trace: dict[str, Any], timeline: Timeline) -> None:
    events = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert [event["ts"] for event in events] == sorted(event["ts"] for event in events)
    got = Counter((e["tid"], e["name"]) for e in events if e["ph"] in "Xb" and e["pid"] == 0)
    assert got == Counter((rank, str(span.action)) for rank, spans in timeline.spans.items() for span in spans)
    (measured,) = (event for event in events if event["pid"] == 1)
    assert (measured["ts"], measured["dur"]) == (0, 5e5)
    names = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    threads = {("thread_name", 0, rank): f"rank {rank}" for rank in range(4)} | {("thread_name", 1, 0): "rank 0"}
    assert names == {("process_name", 0, None): "simulated", ("process_name", 1, None): "measured"} | threads


def test_compute_is_a_slice_in_microseconds(trace: dict[str, Any], timeline: Timeline) -> None:
    slices = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0}
    span = next(s for s in timeline.spans[3] if str(s.action) == "1:0F1")
    event = slices["1:0F1"]
    assert (event["ts"], event["dur"], event["tid"]) == (span.start_s * 1e6, 1e6, 3)
    assert event["args"] == {"stage": 0, "microbatch": 1, "replica": 1}
    assert all(Action.parse(name).kind in COMPUTE for name in slices)


def test_messages_and_sums_begin_and_end(trace: dict[str, Any]) -> None:
    begun, ended = ({e["id"]: e for e in trace["traceEvents"] if e["ph"] == phase} for phase in "be")
    assert begun.keys() == ended.keys()
    for number, event in begun.items():
        seconds = {"SEND_F": 0.1, "SEND_B": 0.2}.get(Action.parse(event["name"]).kind.value)
        if seconds:
            assert ended[number]["ts"] - event["ts"] == pytest.approx(seconds * 1e6)
            assert event["args"]["peer"] is not None


NUMBERS = st.integers(min_value=0, max_value=120)


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind = draw(st.sampled_from(Kind))
    microbatch = None if kind is Kind.REDUCE else draw(NUMBERS)
    return Action(kind, draw(NUMBERS), microbatch, draw(NUMBERS), draw(NUMBERS) if kind in PER_PEER else None)


@given(rows=st.lists(st.lists(actions(), max_size=5), min_size=1, max_size=5).filter(any))
def test_round_trip_is_exact(rows: list[list[Action]]) -> None:
    schedule: Schedule = dict(enumerate(rows))
    assert from_csv(to_csv(schedule)) == schedule


def test_empty_cells_blanks_quotes_and_a_spreadsheets_mark_mean_nothing() -> None:
    plain = from_csv("0F0,0B0\n1F0,1B0\n")
    assert from_csv('\ufeff0F0, ,,0B0\r\n,"1F0", 1B0 ,\r\n') == plain
    assert to_csv(dict(reversed(plain.items()))) == "0F0,0B0\n1F0,1B0\n"  # one row a rank, in their order


def test_errors_name_row_and_column_all_at_once() -> None:
    with pytest.raises(ValueError, match="is no action") as error:
        from_csv("0F0,0X0\n\n1F0,,1SEND_F0\n")
    first, second = str(error.value).splitlines()
    assert first.startswith("schedule: row 1 (rank 0), column 2: '0X0' is no action")
    assert second.startswith("schedule: row 3 (rank 2), column 3: '1SEND_F0' is no action")


@pytest.mark.parametrize("text", ["", "\n", ",,\n"])
def test_file_without_actions(text: str) -> None:
    with pytest.raises(ValueError, match="schedule: no actions: write one row for each rank"):
        from_csv(text)


GRIDS = {
    "columns are aligned": (from_csv("0F0,0F10,0B0\n1:1F0,1B0\n"), {}, "0F0   0F10 0B0", "1:1F0 1B0"),
    "a marked cell": (one_f_one_b(2, 2), {"mark": (1, 2)}, "0F0 0F1 0B0     0B1", "1F0 1B0 >>1F1<< 1B1"),
    "columns around the mark": (
        one_f_one_b(2, 4), {"mark": (0, 3), "around": 1}, "... 0B0 >>0F2<< 0B1 ...", "... 1F1 1B1     1F2 ..."),
    "nothing is left out": (one_f_one_b(1, 2), {"mark": (0, 1), "around": 2}, "0F0 >>0B0<< 0F1 0B1"),
    "a short row far from the mark": (
        from_csv("0F0\n1F0,1F1,1F2,1F3\n"), {"mark": (1, 3), "around": 0}, "...", "... >>1F3<<"),
    "the start, without a mark": (one_f_one_b(1, 2), {"around": 1}, "0F0 0B0 ..."),
}  # fmt: skip


@pytest.mark.parametrize("case", GRIDS)
def test_grids(case: str) -> None:
    schedule, how, *expected = GRIDS[case]
    assert format_grid(schedule, **how).splitlines() == [f"rank {rank} | {row}" for rank, row in enumerate(expected)]


def test_ranks_of_a_grid() -> None:
    assert [line.index("|") for line in format_grid(one_f_one_b(11, 1)).splitlines()] == [8] * 11
    assert format_grid({0: [], 1: []}) == "rank 0 |\nrank 1 |"


def units(*activation_bytes: int) -> list[StageCost]:
    """Stages of F = 1 and B = 2 seconds."""
    return [StageCost(1.0, 2.0, 1.0, 1.0, kept) for kept in activation_bytes]


def step(name: str, depth: int, m: int, *activation_bytes: int) -> Timeline:
    mesh = mesh_for(name, groups=1, depth=depth)
    costs = units(*(activation_bytes or (1,) * depth))
    return simulate(build_schedule(name, mesh, m), mesh, costs)


@pytest.mark.parametrize("m", [1, 2, 3, 8])
def test_peak_bytes(m: int) -> None:
    kept = (1000, 100, 30, 7)
    assert step("gpipe", 4, m, *kept).peak_bytes == {k: m * kept[k] for k in range(4)}
    assert step("1f1b", 4, m, *kept).peak_bytes == {k: min(m, 4 - k) * kept[k] for k in range(4)}
    assert step("mp-basic", 4, m, *kept).peak_bytes == dict(enumerate(kept))
    for name in ("mast", "master"):  # those of the larger stage of a pair
        assert step(name, 4, 2 * m if name == "master" else 2, *kept).peak_bytes == {0: 1000, 1: 100, 2: 100, 3: 1000}
    split = rows("0F0 0I0 0F1 0I1 0W0 0W1")  # kept until the second half of the backward pass
    assert simulate(split, Mesh(1, (0,)), units(10)).peak_bytes == {0: 20}


def test_microbatches_of_different_sizes() -> None:
    timeline = simulate(rows("0F0 0F1 0B0 0B1"), Mesh(1, (0,)), units(10), weights=[1.0, 0.5])
    spans = [(str(s.action), s.start_s, s.end_s) for s in timeline.spans[0]]
    assert spans == [("0F0", 0, 1), ("0F1", 1, 1.5), ("0B0", 1.5, 3.5), ("0B1", 3.5, 4.5)]
    assert timeline.peak_bytes == {0: 15}
    timeline = simulate(rows("0F0 0B0", "1F0 1B0"), TWO_RANKS, units(1, 1), {(0, 1): LinkCost(4, 2)}, weights=[0.5])
    assert [span.duration_s for rank in (0, 1) for span in timeline.spans[rank]] == [0.5, 2, 1, 0.5, 1, 1]


def test_recomputation_costs_a_forward_pass_and_keeps_one_microbatch() -> None:
    mesh = mesh_for("gpipe", groups=1, depth=1)
    schedule = build_schedule("gpipe", mesh, 5)
    for recompute, expected in ((False, (15, {0: 50})), (True, (20, {0: 10}))):
        step = simulate(lower(schedule, mesh, {}, recompute=recompute), mesh, units(10))
        assert (step.makespan_s, step.peak_bytes) == expected


def test_skips_and_the_last_rank_of_a_sum_are_waited_for() -> None:
    mesh = Mesh(1, (0, 1, 2))
    links = {(0, 1): LinkCost(0, 0), (1, 2): LinkCost(0, 0), (0, 2): LinkCost(5.0, 5.0)}
    timeline = simulate(build_schedule("mp-basic", mesh, 1), mesh, units(1, 1, 1), links)
    assert timeline.compute(2)[0].start_s == 6
    assert timeline.compute(0)[1].start_s == 6 + 3 + 5
    timeline = simulate(rows("0F0 0B0 0REDUCE", "0F1 0B1 0F2 0B2 0REDUCE"), Mesh(2, (0,)), units(1), reduce_s={0: 2.0})
    sums = [(s.start_s, s.end_s) for r in (0, 1) for s in timeline.spans[r] if s.action.kind is Kind.REDUCE]
    assert sums == [(6, 8)] * 2


@pytest.mark.parametrize("lowered", [False, True])
def test_messages_travel_one_at_a_time(lowered: bool) -> None:
    schedule = rows("0F0 0F1 0B0 0B1", "1F0 1F1 1B0 1B1")
    if lowered:
        schedule = lower(schedule, TWO_RANKS, {(0, 1): True})
    links = {(0, 1): LinkCost(forward_s=3.0, backward_s=0.5)}
    timeline = simulate(schedule, TWO_RANKS, units(1, 1), links)
    spans = (span for each in timeline.spans.values() for span in each)
    sends = {str(s.action): (s.start_s, s.end_s) for s in spans if s.action.peer is not None}
    assert sends == {"0SEND_F0>1": (1, 4), "0SEND_F1>1": (4, 7), "1SEND_B0>0": (10, 10.5), "1SEND_B1>0": (12, 12.5)}
    assert timeline.makespan_s == 14.5


def test_sums_run_beside_compute_and_end_the_step() -> None:
    schedule = rows("0F0 0B0 0REDUCE 1:1F1 1:1B1 1:1REDUCE", "1:0F1 1:0B1 1:0REDUCE 1F0 1B0 1REDUCE")
    timeline = simulate(schedule, PAIR, units(1, 1), {(0, 1): LinkCost(0, None)}, {0: 5.0, 1: 1.0})
    sums = [(s.action.stage, s.start_s, s.end_s) for s in timeline.spans[0] if s.action.kind is Kind.REDUCE]
    assert sums == [(0, 3, 8), (1, 8, 9)]  # ranks compute until 6
    assert timeline.makespan_s == 9
    assert timeline.busy_s(0) == 6
    assert timeline.bubble == pytest.approx(1 - 6 / 9)


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


def test_messages_wait_until_their_receive_is_announced_and_gradients_only_where_they_flow() -> None:
    late = rows("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1F0 1RECV_F1<0 1F1")
    ahead = rows("0F0 0SEND_F0>1 0F1 0SEND_F1>1", "1RECV_F0<0 1RECV_F1<0 1F0 1F1")
    links = {(0, 1): LinkCost(1.0, None)}
    costs = [StageCost(1, 0, 0, 0, 0), StageCost(2, 0, 0, 0, 0)]
    assert simulate(late, TWO_RANKS, costs, links).makespan_s == 1 + 1 + 2 + 1 + 2
    assert simulate(ahead, TWO_RANKS, costs, links).makespan_s == 1 + 1 + 2 + 2
    timeline = simulate(rows("0F0 0B0", "1F0 1B0"), TWO_RANKS, units(1, 1), links)
    assert [(s.start_s, s.end_s) for s in timeline.compute(0)] == [(0, 1), (1, 3)]


@pytest.mark.parametrize(
    ("texts", "mesh", "expected"),
    [
        (("0B0 0F0", "1F0 1B0"), TWO_RANKS, "rank 0 at 0B0"),
        (("0F0 0B0", "1B0 1F0"), TWO_RANKS, "rank 1 at 1B0"),
        (("0F0 0B0", "1F0"), TWO_RANKS, "rank 0 at 0B0"),
        (("0F0 0W0 0I0", "1F0 1B0"), TWO_RANKS, "rank 0 at 0W0"),
        (("0F0 0SEND_F0>1", "1F0"), TWO_RANKS, "0SEND_F0>1, which another rank does not wait for"),
        (("0F0", "1RECV_F0<0 1F0"), TWO_RANKS, "rank 1 at 1F0"),
        (("0F0 0B0 0REDUCE 1:1REDUCE", "1F0 1B0 1REDUCE 1:0REDUCE"), PAIR, "0REDUCE, which another rank"),
    ],
)
def test_schedule_that_cannot_finish(texts: tuple[str, ...], mesh: Mesh, expected: str) -> None:
    with pytest.raises(ValueError, match=f"the schedule cannot finish(.|\\n)*{expected}"):
        simulate(rows(*texts), mesh, units(1, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_share_the_lanes_of_their_device_and_no_others(name: str) -> None:
    m, mesh = 2 if name == "mast" else 8, small_mesh(name, depth=4)
    links = {(stage, stage + 1): LinkCost(0.01, 0.01) for stage in range(mesh.stages - 1)}
    schedule = lower(build_schedule(name, mesh, m), mesh, dict.fromkeys(links, True))
    given = schedule, mesh, units(*[10] * mesh.stages), links
    alone = simulate(*given)
    for devices in ([Device((0, 1, 2, 3), 4)], [Device((k,), 1) for k in range(4)]):
        shared = simulate(*given, devices=devices)
        assert shared.makespan_s == pytest.approx(alone.makespan_s)
        assert shared.peak_bytes == alone.peak_bytes
    # One lane does all the work, one after the other: of two ranks at once each takes twice as long.
    work = m * mesh.stages * 3.0
    assert work * 0.999 <= simulate(*given, devices=[Device((0, 1, 2, 3), 1)]).makespan_s <= work + 0.2 * m
