"""Idle time before the sum: what a rank waits longer than the one that is last."""

from __future__ import annotations

import pytest

from app.training.outcome import UNKNOWN, WARM_UP, IdleTime


def test_the_published_rows_of_a_cpu_and_two_gpus() -> None:
    """Choi 2019: batches of 1.9 s on average on each of three workers, which end at 2.5, 2.3 and 1.8 s: of 19.8
    seconds of workers 2.7 are idle."""
    idle = IdleTime(3)
    for took in [[9.0, 1.0, 1.0]] * WARM_UP + [[1.9, 2.5, 2.5], [2.3, 1.4, 1.4], [1.5, 1.8, 1.8]]:
        sum_s = 0.25
        waited = [IdleTime.to_microseconds(max(took) - each + sum_s) for each in took]
        idle.add(waited, max(took))
    fractions = idle.fractions
    assert fractions == pytest.approx([0.9 / 6.6, 0.9 / 6.6, 0.9 / 6.6])
    assert sum(fractions) / 3 == pytest.approx(0.1364, abs=1e-4)


def test_what_is_not_known_is_left_out() -> None:
    idle = IdleTime(2)
    for _ in range(WARM_UP + 1):
        idle.add([IdleTime.to_microseconds(None), 5], 1.0)
    assert idle.fractions is None
    idle.add([IdleTime.to_microseconds(0.5), IdleTime.to_microseconds(0.1)], 1.0)
    assert idle.fractions == pytest.approx([0.4, 0.0])
    assert IdleTime.to_microseconds(None) == UNKNOWN


def test_one_rank_waits_for_nobody() -> None:
    alone = IdleTime(1)
    for _ in range(WARM_UP + 2):
        alone.add([3], 1.0)
    assert alone.fractions is None
