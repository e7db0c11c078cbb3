"""Resampling of a pyramid: exact where the scale is whole, faithful in the mean elsewhere, bounded in memory."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.backends.level_reader import memory_slide
from pipelines.slides import pyramid
from pipelines.slides.geometry import Region, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import PADDING, Pixels

RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (600, 500, 3), np.uint8)
TALL = cv2.GaussianBlur(RNG.integers(0, 256, (6000, 64, 3), np.uint8), (0, 0), 1.5)


class Gradient:
    """A ``LevelReader`` of any size that computes its pixels: column modulo 251, row modulo 241, 7."""

    name = "gradient"

    def __init__(self) -> None:
        self.boxes: list[tuple[int, ...]] = []

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        self.boxes.append((level, l_x, l_y, *out.shape[:2]))
        out[..., 0] = np.arange(l_x, l_x + out.shape[1]) % 251
        out[..., 1] = (np.arange(l_y, l_y + out.shape[0]) % 241)[:, None]
        out[..., 2] = 7

    def close(self) -> None:
        self.boxes.clear()


@given(st.floats(0.5, 20.0), st.integers(0, 255))
def test_a_constant_slide_stays_constant(mpp: float, value: int) -> None:
    whole = np.full((300, 400, 3), value, np.uint8)
    slide = memory_slide([whole, whole[:75, :100]], 0.5)
    size = max(1, int(90 * 0.5 / mpp))
    assert (slide.read(Region(10, 20, size, size, mpp)) == value).all()


@given(st.integers(2, 9), st.integers(-20, 90), st.integers(-20, 90))
def test_a_whole_number_scale_is_the_mean_of_blocks(factor: int, x: int, y: int) -> None:
    slide = memory_slide([NOISE], 0.5)
    padded = np.pad(NOISE, ((100, 100), (100, 100), (0, 0)), constant_values=PADDING)
    height, width = 31, 23
    box = padded[y + 100 : y + 100 + height * factor, x + 100 : x + 100 + width * factor]
    expected = box.reshape(height, factor, width, factor, 3).mean(axis=(1, 3))
    assert np.abs(slide.read(Region(x, y, width, height, 0.5 * factor)) - expected).max() <= 0.5 + 1e-9


@given(st.floats(1.02, 9.0))
def test_a_fractional_scale_keeps_the_mean(factor: float) -> None:
    slide = memory_slide([NOISE], 0.5)
    height, width = int(590 / factor), int(490 / factor)
    got = slide.read(Region(0, 0, width, height, 0.5 * factor))
    covered = NOISE[: round(height * factor), : round(width * factor)]
    np.testing.assert_allclose(got.mean(axis=(0, 1)), covered.mean(axis=(0, 1)), atol=1.5)


@pytest.mark.parametrize("factor", [1.37, 1.5, 1.978, 2, 3, 2.6, 5, 7.4])
def test_bands_give_what_one_piece_gives(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    slide = memory_slide([TALL], 0.5)
    region = Region(0, -5, int(64 / factor), int(6000 / factor), 0.5 * factor)
    whole = slide.read(region)
    monkeypatch.setattr(pyramid, "BAND_BYTES", 90_000)
    difference = np.abs(slide.read(region).astype(int) - whole)
    assert difference.max() <= (0 if factor in (1.5, 2, 3, 5) else 2)
    assert difference.mean() < 0.2


def test_bands_follow_each_other_without_gap_or_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Gradient()
    slide = PyramidSlide(Path("gradient"), reader, levels_from_sizes([(50_000, 50_000)], 0.25))
    monkeypatch.setattr(pyramid, "BAND_BYTES", 1 << 20)
    slide.read(Region(100, 200, 500, 700, 0.25 * 6.3))
    assert len(reader.boxes) > 5
    ends = [y + rows for _, _, y, rows, _ in reader.boxes]
    assert [y for _, _, y, _, _ in reader.boxes] == [200, *ends[:-1]]
    assert ends[-1] == 200 + round(700 * 6.3 / 6) * 6


def test_the_coarsest_level_that_is_fine_enough_is_read() -> None:
    reader = Gradient()
    slide = PyramidSlide(Path("gradient"), reader, levels_from_sizes([(40_000, 40_000), (10_000, 10_000)], 0.25))
    slide.read(Region(4000, 8000, 64, 32, 1.0))
    slide.read(Region(4000, 8000, 64, 32, 0.9))
    assert [(level, x, y) for level, x, y, _, _ in reader.boxes] == [(1, 1000, 2000), (0, 4000, 8000)]


def peak_bytes(slide: PyramidSlide, region: Region) -> int:
    out = np.zeros((region.height, region.width, 3), np.uint8)
    tracemalloc.start()
    try:
        slide.read(region, out=out)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_an_overview_of_a_slide_without_small_levels_stays_small() -> None:
    """20,000 x 20,000 px are 1.2 GB; the overview needs one band."""
    slide = PyramidSlide(Path("gradient"), Gradient(), levels_from_sizes([(20_000, 20_000)], 0.25))
    assert peak_bytes(slide, Region(0, 0, 500, 500, 10.0)) < 80 << 20


def test_a_large_tile_at_a_fractional_scale_costs_its_own_size_again() -> None:
    slide = PyramidSlide(Path("gradient"), Gradient(), levels_from_sizes([(30_000, 30_000)], 0.2528))
    tile_bytes = 6000 * 6000 * 3
    assert peak_bytes(slide, Region(0, 0, 6000, 6000, 0.5)) < 1.2 * tile_bytes


def test_a_native_read_goes_straight_into_the_callers_array() -> None:
    slide = PyramidSlide(Path("gradient"), Gradient(), levels_from_sizes([(30_000, 30_000)], 0.5))
    assert peak_bytes(slide, Region(0, 0, 2000, 2000, 0.5)) < 1 << 20


def test_levels_and_pixels_of_a_memory_slide_are_checked() -> None:
    bad: list[tuple[Any, str]] = [
        ([], "at least one level"),
        ([NOISE.astype(np.float32)], "must be uint8"),
        ([NOISE[..., :2]], "must be uint8"),
        ([NOISE[:100], NOISE], "finest first"),
    ]
    for levels, said in bad:
        with pytest.raises(ValueError, match=said):
            memory_slide(levels, 0.5)
