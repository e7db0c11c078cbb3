"""How often a checkpoint is worth its cost, from seconds that are made up."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.checkpoint.periodic import CHECKPOINTS, FIRST, STEPS, CheckpointInterval
from app.settings.optimization import CheckpointSettings


def after(
    step_s: float, between_s: float = 0.0, blocked_s: float = 0.0, write_s: float = 0.0, overhead: float = 0.035
) -> CheckpointInterval:
    interval = CheckpointInterval(overhead)
    for _ in range(5):
        interval.add_step(step_s, beside=False)
    interval.add_checkpoint(between_s, blocked_s, write_s)
    return interval


def test_before_the_first_checkpoint_nothing_is_tuned() -> None:
    interval = CheckpointInterval(0.035)
    interval.add_step(1.0, beside=False)
    assert (interval.every, interval.cost_s) == (FIRST, None)


@pytest.mark.parametrize(
    ("step_s", "between_s", "blocked_s", "write_s", "k"),
    [
        (1.0, 0.35, 0.0, 0.0, 10),  # 0.35 s in 10 s is 3.5 %
        (1.0, 0.36, 0.0, 0.0, 11),
        (1.0, 0.0, 0.35, 0.0, 10),
        (1.0, 0.0, 0.0, 7.2, 9),  # 8 steps until it is on the disk, and one beside which there is none
        (1.0, 0.70, 0.0, 7.2, 20),
        (1.0, 0.0, 0.0, 0.0, 1),
    ],
)
def test_bound_and_disk_decide(step_s: float, between_s: float, blocked_s: float, write_s: float, k: int) -> None:
    assert after(step_s, between_s, blocked_s, write_s).every == k


def test_steps_that_ran_slower_beside_it_are_its_cost() -> None:
    interval = CheckpointInterval(0.1)
    for _ in range(5):
        interval.add_step(1.0, beside=False)
    for _ in range(3):
        interval.add_step(1.5, beside=True)
    interval.add_checkpoint(0.5, blocked_s=0.2, write_s=4.0)
    assert interval.cost_s == pytest.approx(0.5 + 3 * 0.5)  # what updates waited is among the slower steps
    assert interval.every == 20
    interval.add_step(0.9, beside=True)
    interval.add_checkpoint(0.5, blocked_s=0.2, write_s=4.0)
    assert interval.cost_s == pytest.approx((2.0 + 0.7) / 2)  # a step that was quicker by chance earns nothing


def test_one_that_was_held_up_moves_nothing_and_a_change_that_stays_does() -> None:
    interval = after(1.0, between_s=0.35)
    for between_s in (0.35, 9.0):
        interval.add_checkpoint(between_s, 0.0, 0.0)
    assert interval.every == 10
    for _ in range(CHECKPOINTS):
        interval.add_checkpoint(0.70, 0.0, 0.0)
    assert interval.every == 20
    for _ in range(STEPS):
        interval.add_step(2.0, beside=False)
    assert interval.every == 10


@given(
    step_s=st.floats(1e-3, 1e3),
    cost_s=st.floats(0, 1e3),
    write_s=st.floats(0, 1e4),
    overhead=st.floats(0.001, 1),
)
def test_never_beyond_the_bound_and_never_rarer_than_needed(
    step_s: float, cost_s: float, write_s: float, overhead: float
) -> None:
    k = after(step_s, cost_s, write_s=write_s, overhead=overhead).every
    assert k >= 1
    assert cost_s <= overhead * k * step_s * (1 + 1e-9)
    assert write_s <= (k - 1) * step_s * (1 + 1e-9) or write_s == 0
    if k > 1:
        needed = max(cost_s / (overhead * step_s), write_s / step_s + 1 if write_s else 1)
        assert k <= math.ceil(needed * (1 + 1e-9))


def test_settings_are_checked() -> None:
    assert CheckpointSettings().validate() == []
    assert CheckpointSettings(checkpoint_every=0, checkpoint_overhead=1.0).validate() == []
    (every, overhead) = CheckpointSettings(-1, 0.0).validate()
    assert "--checkpoint-every must be at least 1 step, or 0 to be tuned; got -1" in every
    assert "above 0 to 1; got 0" in overhead
