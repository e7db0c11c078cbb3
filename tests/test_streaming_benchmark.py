"""The benchmarks of tiles in boxes still run: shortened, and only to their end."""

from __future__ import annotations

import pytest

from benchmarks.streaming import coverage, speed

pytestmark = pytest.mark.bench


def test_coverage_tells_where_boxes_end() -> None:
    assert coverage.refusals("resnet18") == ("", "")
    assert all("draws a number for each px" in reason for reason in coverage.refusals("torchvision:squeezenet1_1"))


def test_speed_of_a_small_tile() -> None:
    rows = speed.measure("unet_w4", 64, [32], 1)
    assert all(ratio > 0 for ratio in rows[0]["ratios"])
    assert "unet_w4" in speed.table(rows)
