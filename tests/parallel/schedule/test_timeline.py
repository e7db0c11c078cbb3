"""Step time and bubble of a timeline, wherever its clock begins; traces hold every span of every timeline."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from parallel.schedule.action import COMPUTE, Action, held
from parallel.schedule.passes import lower
from parallel.schedule.registry import build_schedule, mesh_for
from parallel.schedule.simulate import simulate
from parallel.schedule.text import from_csv
from parallel.schedule.timeline import LinkCost, Span, StageCost, Timeline, chrome_trace


def span(text: str, start_s: float, end_s: float) -> Span:
    return Span(Action.parse(text), start_s, end_s)


TIMELINE = Timeline(
    {
        0: (span("0F0", 100, 101), span("0SEND_F0>1", 101, 103), span("0B0", 106, 108), span("0REDUCE", 108, 110)),
        1: (span("1F0", 103, 104), span("1B0", 104, 106)),
    }
)


def test_step_time_counts_from_the_first_action_to_the_end_of_the_last() -> None:
    assert (TIMELINE.start_s, TIMELINE.makespan_s) == (100, 10)


def test_only_compute_is_busy() -> None:
    assert [TIMELINE.busy_s(rank) for rank in (0, 1)] == [3, 3]
    assert TIMELINE.bubble == pytest.approx(1 - 6 / 20)
    assert [str(s.action) for s in TIMELINE.compute(0)] == ["0F0", "0B0"]


def test_empty_step() -> None:
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


def test_every_span_is_there_once(trace: dict[str, Any], timeline: Timeline) -> None:
    got = Counter((e["tid"], e["name"]) for e in trace["traceEvents"] if e["ph"] in "Xb" and e["pid"] == 0)
    assert got == Counter((rank, str(span.action)) for rank, spans in timeline.spans.items() for span in spans)


def test_events_stand_in_order_of_time(trace: dict[str, Any]) -> None:
    times = [event["ts"] for event in trace["traceEvents"] if event["ph"] != "M"]
    assert times == sorted(times)


def test_compute_is_a_slice_in_microseconds(trace: dict[str, Any], timeline: Timeline) -> None:
    slices = {e["name"]: e for e in trace["traceEvents"] if e["ph"] == "X" and e["pid"] == 0}
    span = next(s for s in timeline.spans[3] if str(s.action) == "1:0F1")
    event = slices["1:0F1"]
    assert (event["ts"], event["dur"], event["tid"]) == (span.start_s * 1e6, 1e6, 3)
    assert event["args"] == {"stage": 0, "microbatch": 1, "replica": 1}
    assert all(Action.parse(name).kind in COMPUTE for name in slices)


def test_messages_and_sums_begin_and_end(trace: dict[str, Any]) -> None:
    begun = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "b"}
    ended = {e["id"]: e for e in trace["traceEvents"] if e["ph"] == "e"}
    assert begun.keys() == ended.keys()
    for number, event in begun.items():
        seconds = {"SEND_F": 0.1, "SEND_B": 0.2}.get(Action.parse(event["name"]).kind.value)
        if seconds:
            assert ended[number]["ts"] - event["ts"] == pytest.approx(seconds * 1e6)
            assert event["args"]["peer"] is not None


def test_a_process_for_each_timeline_and_a_thread_for_each_rank(trace: dict[str, Any]) -> None:
    names = {(e["name"], e["pid"], e.get("tid")): e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert names == {
        ("process_name", 0, None): "simulated",
        **{("thread_name", 0, rank): f"rank {rank}" for rank in range(4)},
        ("process_name", 1, None): "measured",
        ("thread_name", 1, 0): "rank 0",
    }


def test_every_timeline_begins_at_zero(trace: dict[str, Any]) -> None:
    (event,) = (e for e in trace["traceEvents"] if e["pid"] == 1 and e["ph"] == "X")
    assert (event["ts"], event["dur"]) == (0, 5e5)
