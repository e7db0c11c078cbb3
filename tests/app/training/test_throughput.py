"""Speeds from the times of steps, by hand: warm-up dropped, and what comes between steps counted where asked for."""

from __future__ import annotations

import pytest

from app.training.outcome import WARM_UP, Throughput


def run_of(steps: list[float], waits: list[float], rests: list[float]) -> Throughput:
    speed = Throughput(8)
    for step_s, wait_s, rest_s in zip(steps, waits, rests, strict=True):
        speed.add(step_s, wait_s)
        speed.rest_s.append(rest_s)
    return speed


def test_no_step_has_no_speed() -> None:
    speed = Throughput(8)
    assert (speed.images_per_second, speed.images_per_second_sustained, speed.data_wait_fraction) == (None, None, None)


def test_the_median_leaves_out_what_comes_between_steps_and_the_sustained_speed_does_not() -> None:
    speed = run_of([100.0, 100.0, 2.0, 2.0, 5.0], [0.0, 0.0, 1.0, 0.0, 0.8], [50.0, 50.0, 0.0, 7.0, 99.0])
    assert WARM_UP == 2
    assert speed.images_per_second == 8 / 2
    assert speed.images_per_second_sustained == 3 * 8 / (2 + 2 + 5 + 7)
    assert speed.data_wait_fraction == pytest.approx(1.8 / 9)


def test_a_run_as_short_as_the_warm_up_has_the_speed_of_its_last_step() -> None:
    speed = run_of([100.0, 4.0], [0.0, 0.0], [3.0, 4.0])
    assert speed.images_per_second == 2
    assert speed.images_per_second_sustained == 2
