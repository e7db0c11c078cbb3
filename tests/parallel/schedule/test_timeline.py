"""Step time and bubble of a timeline, wherever its clock begins."""

from __future__ import annotations

import pytest

from parallel.schedule.action import Action, held
from parallel.schedule.text import from_csv
from parallel.schedule.timeline import Span, Timeline


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
