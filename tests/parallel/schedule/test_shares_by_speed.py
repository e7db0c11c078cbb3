"""The best shares are the best there are, and shares of a running job change when they should and only then."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parallel.schedule.shares import Rebalancing, best_counts, step_seconds


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


def test_little_is_not_worth_a_change() -> None:
    shares = Rebalancing((50, 50))
    for _ in range(4):
        assert not shares.look([1.0, 1.04])
    assert shares.counts == (50, 50)


@pytest.mark.parametrize("seed", range(20))
def test_noise_changes_shares_once_at_most_in_200_steps(seed: int) -> None:
    """Seconds that vary by 20 % from step to step and rank to rank, as medians of 20 steps."""
    draw = np.random.default_rng(seed)
    shares = Rebalancing((8, 8, 8))
    windows = np.median(draw.lognormal(0, 0.2, (10, 20, 3)), axis=1)
    assert sum(shares.look(seconds) for seconds in windows.tolist()) <= 1
