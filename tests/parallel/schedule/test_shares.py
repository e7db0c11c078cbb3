"""Shares of groups: what is read or refused, and how coarse they are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import build_schedule
from parallel.schedule.shares import (
    CHANGING,
    coarseness,
    microbatch_seed,
    parse_counts,
    read_changes,
    rows_of,
    share_of,
    split_batch,
)


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
    rows = build_schedule("gpipe", Mesh(2, (0, 1), 1), 3, ((0, 2), (1,)))
    assert [{action.microbatch for action in rows[rank]} for rank in range(4)] == [{0, 2}, {0, 2}, {1}, {1}]
    with pytest.raises(ValueError, match="each to one"):
        build_schedule("gpipe", Mesh(2, (0, 1), 1), 3, ((0, 2), (2,)))


@given(batch=st.integers(1, 200), m=st.integers(1, 200))
def test_every_tile_is_in_one_microbatch_and_sizes_differ_by_at_most_one(batch: int, m: int) -> None:
    if m > batch:
        with pytest.raises(ValueError, match="raise --batch or lower --microbatches"):
            split_batch(batch, m)
        return
    parts = split_batch(batch, m)
    assert [tile for part in parts for tile in part] == list(range(batch))
    sizes = [len(part) for part in parts]
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)


@given(world=st.integers(1, 16), m=st.integers(1, 64))
def test_every_microbatch_has_one_rank(world: int, m: int) -> None:
    if m < world:
        with pytest.raises(ValueError, match="cannot keep"):
            share_of(0, world, m)
        return
    assert [i for rank in range(world) for i in share_of(rank, world, m)] == list(range(m))


def test_seeds_differ_by_seed_step_and_microbatch() -> None:
    seeds = {microbatch_seed(seed, step, i) for seed in range(5) for step in range(5) for i in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert microbatch_seed(1, 2, 3) == microbatch_seed(1, 2, 3)
