"""Schedules survive being written and read; a cell that is no action is named by row and column; grids as text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import PER_PEER, Action, Kind, Schedule
from parallel.schedule.generators import one_f_one_b
from parallel.schedule.text import format_grid, from_csv, to_csv

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


def test_text_is_one_row_a_rank() -> None:
    schedule = {1: [Action(Kind.FORWARD, 1, 0)], 0: [Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0, 1)]}
    assert to_csv(schedule) == "0F0,1:0B0\n1F0\n"


def test_empty_cells_blanks_quotes_and_a_spreadsheets_mark_mean_nothing() -> None:
    plain = from_csv("0F0,0B0\n1F0,1B0\n")
    assert from_csv('\ufeff0F0, ,,0B0\r\n,"1F0", 1B0 ,\r\n') == plain


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


def test_columns_are_aligned() -> None:
    assert format_grid(from_csv("0F0,0F10,0B0\n1:1F0,1B0\n")).splitlines() == [
        "rank 0 | 0F0   0F10 0B0",
        "rank 1 | 1:1F0 1B0",
    ]


def test_marked_cell() -> None:
    assert format_grid(one_f_one_b(2, 2), mark=(1, 2)).splitlines() == [
        "rank 0 | 0F0 0F1 0B0     0B1",
        "rank 1 | 1F0 1B0 >>1F1<< 1B1",
    ]


def test_only_columns_around_the_mark() -> None:
    assert format_grid(one_f_one_b(2, 4), mark=(0, 3), around=1).splitlines() == [
        "rank 0 | ... 0B0 >>0F2<< 0B1 ...",
        "rank 1 | ... 1F1 1B1     1F2 ...",
    ]


def test_no_cut_where_nothing_is_left_out() -> None:
    assert format_grid(one_f_one_b(1, 2), mark=(0, 1), around=2) == "rank 0 | 0F0 >>0B0<< 0F1 0B1"


def test_short_row_far_from_the_mark() -> None:
    assert format_grid(from_csv("0F0\n1F0,1F1,1F2,1F3\n"), mark=(1, 3), around=0).splitlines() == [
        "rank 0 | ...",
        "rank 1 | ... >>1F3<<",
    ]


def test_start_of_the_schedule_without_a_mark() -> None:
    assert format_grid(one_f_one_b(1, 2), around=1) == "rank 0 | 0F0 0B0 ..."


def test_rank_numbers_are_aligned() -> None:
    assert [line.index("|") for line in format_grid(one_f_one_b(11, 1)).splitlines()] == [8] * 11


def test_rank_without_actions() -> None:
    assert format_grid({0: [], 1: []}) == "rank 0 |\nrank 1 |"
