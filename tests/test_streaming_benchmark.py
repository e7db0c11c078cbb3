"""The benchmarks of tiles in boxes still run: shortened, and only to their end."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
import torch

from benchmarks.streaming import coverage, exactness, large, lightstream_peer, speed
from benchmarks.tile_reading.slide import SOURCE

pytestmark = pytest.mark.bench


def test_coverage_tells_where_boxes_end() -> None:
    assert coverage.refusals("resnet18") == ("", "")
    assert all("draws a number for each px" in reason for reason in coverage.refusals("torchvision:squeezenet1_1"))


def test_a_cell_of_the_table_passes() -> None:
    subject = exactness.Subject("unet_w4", (48, 32), (32, 24, 16))
    (row,) = exactness.measure(subject, "batch", "float64", lambda box: box == 24)
    assert row.status == "passed"
    assert max(row.loss, row.gradients, row.statistics) <= 1e-10
    assert "(1 of 1)" in exactness.table([row], [subject])


def test_speed_of_a_small_tile() -> None:
    rows = speed.measure("unet_w4", 64, [32], 1)
    assert rows[0]["ratio"] > 0
    assert "unet_w4" in speed.table(rows)


def test_boxes_give_the_gradients_that_lightstream_is_held_against() -> None:
    asked = argparse.Namespace(cell=("resnet18", "frozen", "96", "boxes", "64"), error=True)
    result = lightstream_peer.cell(asked)
    assert result["error"] <= 1e-10
    assert result["live_bytes"] > 0


def test_tissue_is_laid_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(large, "OUT", tmp_path)
    case = large.Case("unet_w4", 512, 128, "segment")
    slides = large.laid_slides(case, SOURCE)
    assert sorted(path.name for path in slides.rglob("*_mask.png")) == ["as_is_mask.png", "turned_mask.png"]
    large.draw_picture(slides, case, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    assert torch.from_numpy(large.pixels(slides / "as_is.tif", 512)).float().std() > 5
