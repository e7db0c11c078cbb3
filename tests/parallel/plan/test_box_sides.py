"""The sides of boxes are searched by the memory of the device: the search finds what trying all of them does."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.out_of_core.problem import planner
from parallel.plan.search import Planner
from parallel.strategy import Strategy

MIB = 2**20


@pytest.mark.parametrize("model", ["resnet18", "unet"])
def test_the_largest_boxes_that_fit_are_found(model: str) -> None:
    """And no larger box needs more of the host."""
    made = planner(model, 512, 1, 1000 * MIB, 1)
    candidate, cluster = Strategy("single", 1, 1, 1), dataclasses.replace(made.cluster, kind="cuda", host_bytes=2**40)
    made = Planner(made.task, cluster)
    rows = {side: made.forecast(candidate.under(stream=side)) for side in made.stages.box_sides(candidate)}
    host, peaks = ([getattr(row, name) for row in rows.values()] for name in ("host_bytes", "peak_bytes"))
    assert len(rows) > 3
    assert host == sorted(host, reverse=True)
    assert peaks == sorted(peaks)
    limits = [peaks[0][0] - 1, *(peak for (peak,) in peaks)]
    for limit in limits + limits[::-1]:
        memory = cluster.needed_bytes(limit)
        on_gpu = Planner(made.task, dataclasses.replace(cluster, memory_bytes=memory))
        row = on_gpu.in_boxes(candidate)  # whatever was found before
        assert row is not None
        fitting = [side for side, peak in zip(rows, peaks, strict=True) if peak[0] <= on_gpu.cluster.usable_bytes]
        assert row.strategy.policy.stream == max(fitting, default=min(rows))
        assert row.fits == bool(fitting)
