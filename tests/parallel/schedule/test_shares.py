"""Shares of groups: what is read or refused, and how coarse they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.schedule.placement import Placement
from parallel.schedule.registry import build_schedule
from parallel.schedule.shares import CHANGING, coarseness, parse_counts, read_changes, rows_of


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(0.5, 5.0), min_size=2, max_size=4), m=st.integers(4, 64))
def test_steps_are_no_longer_than_coarseness_says(seconds: list[float], m: int) -> None:
    counts = [1] * len(seconds)
    for _ in range(m - len(seconds)):  # the next goes to whoever would be done with it first: no counts end sooner
        counts[min(range(len(seconds)), key=lambda g: (counts[g] + 1) * seconds[g])] += 1
    end = max(n * t for n, t in zip(counts, seconds, strict=True))
    slowest_alone = max(seconds)
    ideal = m / sum(1 / t for t in seconds)
    assert end <= max(slowest_alone, ideal * (1 + coarseness(m, len(seconds)))) * (1 + 1e-12)


def test_counts_and_owners() -> None:
    assert parse_counts("3, 1") == ((0, 1, 2), (3,))
    assert parse_counts("shares.csv") is None
    assert read_changes("microbatch,group\n2,0\n0,1\n1,0\n") == ((0, ((1, 2), (0,))),)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got nothing"),
        ("a,b\n0,0\n", "got a,b"),
        ("microbatch,group\n0,x\n", "got 0,x"),
        ("microbatch,group\n0,0\n0,1\n", "microbatch 0 stands in it twice"),
        ("microbatch,group\n0,0\n2,1\n", "1 is missing"),
        ("microbatch,group\n0,0\n1,2\n", r"got groups \[0, 2\]"),
    ],
)
def test_files_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_changes(text)


def test_shares_that_change() -> None:
    first, then = ((0, 1), (2,)), ((0,), (1, 2))
    lines = [",".join(CHANGING), *(",".join(map(str, row)) for row in (*rows_of(0, first), *rows_of(40, then)))]
    assert read_changes("\n".join(lines)) == ((0, first), (40, then))


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ("1,0,0\n", "begins at step 0"),
        ("0,0,0\n5,0,0\n5,1,0\n", "1 microbatches of 1 groups at step 0, and 2 of 1 at step 5"),
        ("0,0\n", "a line is 3 numbers from 0, step, microbatch, group; got 0,0"),
    ],
)
def test_changes_that_are_refused(rows: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_changes("step,microbatch,group\n" + rows)


def test_schedules_take_shares_that_are_whole() -> None:
    rows = build_schedule("gpipe", Placement(2, 2, 2, 1), 3, ((0, 2), (1,)))
    assert [{action.microbatch for action in rows[rank]} for rank in range(4)] == [{0, 2}, {0, 2}, {1}, {1}]
    with pytest.raises(ValueError, match="each to one"):
        build_schedule("gpipe", Placement(2, 2, 2, 1), 3, ((0, 2), (2,)))
