"""Schedules survive being written and read; a cell that is no action is named by row and column."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parallel.schedule.action import PER_PEER, Action, Kind, Schedule
from parallel.schedule.text import from_csv, to_csv

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
        from_csv("0F0,0X0\n\n1F0,,1SEND_F0\n", "my.csv")
    first, second = str(error.value).splitlines()
    assert first.startswith("my.csv: row 1 (rank 0), column 2: '0X0' is no action")
    assert second.startswith("my.csv: row 3 (rank 2), column 3: '1SEND_F0' is no action")


@pytest.mark.parametrize("text", ["", "\n", ",,\n"])
def test_file_without_actions(text: str) -> None:
    with pytest.raises(ValueError, match=r"my\.csv: no actions: write one row for each rank"):
        from_csv(text, "my.csv")
