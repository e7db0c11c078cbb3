"""The formula of sums over CPU and GPU ranks, and that the sweep runs."""

from __future__ import annotations

import pytest

from benchmarks.workers.all_reduce_model import WAYS, Machine, crossings, fit_stand_ins
from tests.helpers.benchmark_run import assert_runs

SIZES = [4 << 10, 1 << 20, 64 << 20]


def test_two_speeds_and_three_latencies_are_found_again() -> None:
    speeds = {"copy": 4e9, "host": 4e9, "gpu": 4e9, "network": 1e9, "ring": 1e9}
    latency_s = {"flat": 1e-3, "host": 3e-3, "device": 2e-3}
    machine = Machine(2, 1, speeds, latency_s)
    assert machine.seconds("flat", 1e9) == pytest.approx(1e-3 + 1.5)
    assert machine.seconds("host", 1e9) == pytest.approx(3e-3 + 5 / 4 + 1)
    assert machine.seconds("device", 1e9) == pytest.approx(2e-3 + 3 / 4 + 1)
    found = fit_stand_ins(2, 1, [(way, size, machine.seconds(way, size)) for way in WAYS for size in SIZES])
    assert found.speeds == pytest.approx(speeds)
    assert found.latency_s == pytest.approx(latency_s)


def test_no_speed_is_negative() -> None:
    measured = [
        (way, size, {"flat": 3.0, "host": 1.0, "device": 1.0}[way] * size / 1e9) for way in WAYS for size in SIZES
    ]
    found = fit_stand_ins(2, 1, measured)
    assert all(speed > 0 for speed in found.speeds.values())
    assert all(seconds >= 0 for seconds in found.latency_s.values())


def test_more_gpus_cross_the_host_more_often_and_the_ring_is_longer() -> None:
    assert crossings("host", 2, 2) == {"copy": 2.0, "host": 4.0, "network": 1.0}
    assert crossings("device", 2, 2) == {"copy": 2.0, "gpu": 1.0, "ring": 1.5}


@pytest.mark.bench
def test_the_sweep_runs() -> None:
    assert_runs("benchmarks.workers.all_reduce --largest 1 --rounds 2", "By the formula alone, for 100 MB")
