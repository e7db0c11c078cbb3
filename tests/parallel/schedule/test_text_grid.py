"""The grid of a schedule as text."""

from __future__ import annotations

from parallel.schedule.generators import one_f_one_b
from parallel.schedule.text import format_grid, from_csv


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
