"""Shares of groups: what is read or refused, how coarse they are, the best there are, and when a running job changes
them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.engine.step import microbatch_seed
from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import build_schedule
from parallel.schedule.shares import (
    CHANGING,
    Rebalancing,
    best_counts,
    coarseness,
    parse_counts,
    read_changes,
    rows_of,
    share_of,
    split_batch,
    step_seconds,
)


@settings(max_examples=60, deadline=None)
@given(seconds=st.lists(st.floats(0.5, 5.0), min_size=2, max_size=4), m=st.integers(4, 64))
def test_steps_are_no_longer_than_coarseness_says(seconds: list[float], m: int) -> None:
    end = step_seconds(best_counts(m, seconds), seconds)
    slowest_alone = max(seconds)
    ideal = m / sum(1 / t for t in seconds)
    assert end <= max(slowest_alone, ideal * (1 + coarseness(m, len(seconds)))) * (1 + 1e-12)


def test_counts_and_owners() -> None:
    assert parse_counts("3, 1") == ((0, 1, 2), (3,))
    assert parse_counts("shares.csv") is None
    assert read_changes("microbatch,group\n2,0\n0,1\n1,0\n") == ((0, ((1, 2), (0,))),)
    first, then = ((0, 1), (2,)), ((0,), (1, 2))
    lines = [",".join(CHANGING), *(",".join(map(str, row)) for row in (*rows_of(0, first), *rows_of(40, then)))]
    assert read_changes("\n".join(lines)) == ((0, first), (40, then))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "got nothing"),
        ("a,b\n0,0\n", "got a,b"),
        ("microbatch,group\n0,x\n", "got 0,x"),
        ("microbatch,group\n0,0\n0,1\n", "microbatch 0 stands in it twice"),
        ("microbatch,group\n0,0\n2,1\n", "1 is missing"),
        ("microbatch,group\n0,0\n1,2\n", r"got groups \[0, 2\]"),
        ("step,microbatch,group\n1,0,0\n", "begins at step 0"),
        ("step,microbatch,group\n0,0,0\n5,0,0\n5,1,0\n", "1 microbatches of 1 groups at step 0, and 2 of 1 at step 5"),
        ("step,microbatch,group\n0,0\n", "3 numbers .*got 0,0"),
    ],
)
def test_files_that_are_refused(text: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        read_changes(text)


@given(world=st.integers(1, 16), m=st.integers(1, 64))
def test_every_microbatch_has_one_rank(world: int, m: int) -> None:
    if m < world:
        with pytest.raises(ValueError, match="cannot keep"):
            share_of(0, world, m)
    else:
        assert [i for rank in range(world) for i in share_of(rank, world, m)] == list(range(m))


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


def test_seeds_differ_by_seed_step_and_microbatch() -> None:
    seeds = {microbatch_seed(seed, step, i) for seed in range(5) for step in range(5) for i in range(5)}
    assert len(seeds) == 125
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert microbatch_seed(1, 2, 3) == microbatch_seed(1, 2, 3)


@settings(max_examples=80, deadline=None)
@given(
    workers=st.lists(st.tuples(st.floats(0.1, 5.0), st.floats(0.0, 3.0)), min_size=1, max_size=3),
    extra=st.integers(0, 9),
)
def test_no_other_counts_end_sooner(workers: list[tuple[float, float]], extra: int) -> None:
    seconds, fixed = zip(*workers, strict=True)
    m = len(workers) + extra
    best = best_counts(m, seconds, fixed)
    assert sum(best) == m
    every = (n for n in itertools.product(range(1, m + 1), repeat=len(workers)) if sum(n) == m)
    assert step_seconds(best, seconds, fixed) <= min(step_seconds(n, seconds, fixed) for n in every) * (1 + 1e-12)


def test_shares_in_proportion_to_speed() -> None:
    assert best_counts(11, [1.0, 2.0, 3.0]) == (6, 3, 2)
    assert best_counts(128, [1 / 48, 1 / 48, 1 / 32]) == (48, 48, 32)  # the batch of 128 of a CPU and two GPUs
    assert step_seconds((3, 1), [1.0, 2.0], [0.5, 0.0]) == pytest.approx(3.5)


def test_two_windows_have_to_agree() -> None:
    shares = Rebalancing((8, 8, 8))
    assert not shares.look([1, 1, 2])
    assert not shares.look([1, 1, 1]), "that was a passing delay"
    assert not shares.look([1, 1, 2])
    assert shares.look([1, 1, 2])
    assert step_seconds(shares.counts, [1, 1, 2]) == 10
    assert not shares.look([1, 1, 2])
    assert not shares.look([1, 1, 2]), "nothing is better now"
    shares = Rebalancing((50, 50))
    assert not any(shares.look([1.0, 1.04]) for _ in range(4)), "little is not worth a change"
    assert shares.counts == (50, 50)


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_shares_once_at_most_in_200_steps(seed: int) -> None:
    """Seconds that vary by 20 % from step to step and rank to rank, as medians of 20 steps."""
    draw = np.random.default_rng(seed)
    shares = Rebalancing((8, 8, 8))
    windows = np.median(draw.lognormal(0, 0.2, (10, 20, 3)), axis=1)
    assert sum(shares.look(seconds) for seconds in windows.tolist()) <= 1
