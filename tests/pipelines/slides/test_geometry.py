"""Coordinate planes, level choice, read plans, and resampling: exact where the scale is whole, bounded in memory."""

import tracemalloc
from pathlib import Path

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.catalog.table import FailedSlides
from pipelines.slides import pyramid
from pipelines.slides.geometry import (
    NATIVE_TOLERANCE,
    Level,
    Region,
    Size,
    best_level,
    l0_from_l,
    l0_step,
    l_from_l0,
    levels_from_sizes,
    plan_read,
)
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import PADDING, SlideError, printable, printable_values
from tests.helpers.memory_slide import memory_slide

pyramids = st.builds(
    lambda width, height, steps, mpp: levels_from_sizes(
        [(max(1, width >> s), max(1, height >> s)) for s in sorted(steps | {0})], mpp
    ),
    st.integers(1000, 200_000),
    st.integers(1000, 200_000),
    st.sets(st.integers(1, 8), max_size=5),
    st.floats(0.1, 1.0),
)
places, lengths = st.integers(-10_000, 200_000), st.integers(1, 20_000)
regions = st.builds(Region, places, places, lengths, lengths, st.floats(0.1, 200.0))


def test_levels_from_sizes_and_a_region_without_pixels():
    fine, coarse = levels_from_sizes([(1000, 600), (250, 150)], 0.25)
    assert fine == Level(0, 1000, 600, 1.0, 0.25)
    assert coarse == Level(1, 250, 150, 4.0, 1.0)
    for width in (0, -1):
        with pytest.raises(ValueError, match="at least 1 x 1 px"):
            Region(0, 0, width, 5, 0.5)


@pytest.mark.parametrize("factor", [2, 3, 7, 32])
def test_whole_number_scales_are_whole_number_blocks(factor):
    plan = plan_read(levels_from_sizes([(100_000, 100_000)], 0.25), Region(0, 0, 1000, 800, 0.25 * factor))
    assert (plan.block, plan.l_width, plan.l_height) == (factor, 1000 * factor, 800 * factor)


@given(st.integers(-(10**6), 10**6), st.floats(1.0, 300.0))
def test_px_of_a_level_and_of_level_0_come_back(px, downsample):
    assert l_from_l0(l0_from_l(px, downsample), downsample) == px
    assert abs(l0_from_l(l_from_l0(px, downsample), downsample) - px) <= downsample / 2 + 1


@pytest.mark.parametrize(
    ("t_px", "t_mpp", "l0_mpp", "l0_px"),
    [
        *((1024, 0.5, 0.25, 2048), (1024, 0.5, 0.499, 1024), (1024, 0.5, 0.2487, 2048), (100, 0.25, 0.2505, 100)),
        *((1024, 0.5, 0.2, 2560), (4, 64.0, 0.25, 1024), (4, 64.2, 0.25, 1028)),
    ],
)
def test_level_0_length_of_a_tile_is_what_is_read(t_px, t_mpp, l0_mpp, l0_px):
    assert t_px * l0_step(levels_from_sizes([(10**5, 10**5)], l0_mpp), t_px, t_mpp) == pytest.approx(l0_px)


@given(pyramids, st.floats(0.1, 200.0))
def test_best_level_is_the_coarsest_that_is_fine_enough(levels, mpp):
    limit = mpp * (1 + NATIVE_TOLERANCE)
    if levels[0].mpp > limit:
        with pytest.raises(ValueError, match=r"ask for --mpp .* or coarser; app\.predict takes the --mpp of training"):
            best_level(levels, mpp)
        return
    best = best_level(levels, mpp)
    assert best.mpp <= limit
    assert all(level.mpp <= best.mpp or level.mpp > limit for level in levels)


@given(pyramids, st.data())
def test_within_one_percent_a_level_is_read_as_it_is(levels, data):
    level = data.draw(st.sampled_from(levels))
    mpp = level.mpp * data.draw(st.floats(1 / (1 + NATIVE_TOLERANCE) + 1e-6, 1 + NATIVE_TOLERANCE - 1e-6))
    plan = plan_read(levels, Region(12_345, 678, 512, 300, mpp))
    assert plan.is_native
    assert abs(levels[plan.level].mpp / mpp - 1) <= NATIVE_TOLERANCE + 1e-9
    assert (plan.l_width, plan.l_height) == (512, 300)


@given(pyramids, regions)
def test_a_plan_covers_the_region_and_only_ever_shrinks(levels, region):
    if levels[0].mpp > region.mpp * (1 + NATIVE_TOLERANCE):
        with pytest.raises(ValueError, match="cannot be had"):
            plan_read(levels, region)
        return
    plan = plan_read(levels, region)
    level = levels[plan.level]
    scale = region.mpp / level.mpp
    assert plan.out == Size(region.width, region.height)
    assert plan.l_width % plan.block == plan.l_height % plan.block == 0
    for box, size in ((plan.l_width, region.width), (plan.l_height, region.height)):
        assert box // plan.block >= size  # nothing is enlarged
        assert box // plan.block < 2.05 * size + 1  # the fractional step stays below 2
        assert abs(box - size * scale) <= plan.block / 2 + NATIVE_TOLERANCE * size * scale + 1e-6
    for l_px, l0_px in ((plan.l_x, region.l0_x), (plan.l_y, region.l0_y)):
        assert abs(l_px * level.downsample - l0_px) <= level.downsample / 2 * (1 + 1e-9)


EVIL = ["\x1b[2J", "\x9b31m", "\x07", "\r", "\u202e", "\u2066", "\u2028", "\x7f", "\x00", "\ud800"]


@pytest.mark.parametrize("evil", EVIL)
def test_what_a_terminal_obeys_is_escaped(evil, tmp_path):
    text = f"a{evil}b"
    clean = printable(text)
    assert clean.isprintable()
    assert printable(clean) == clean
    assert printable_values({text: [text, (text, 1)], "x": None}) == {clean: [clean, (clean, 1)], "x": None}
    error = str(SlideError(f"x.svs: {text}\n  tiled: no"))
    assert evil not in error
    assert "\n" in error
    failed = FailedSlides(tmp_path / "failed_slides.csv")
    failed.add("s", "open", f"what the file says: {text}")
    assert evil not in failed.path.read_text(errors="surrogateescape")


@pytest.mark.parametrize("text", ["", "Tumor: Positive", "b\u00f6sartig <1%", "\u80bf", "a\u00a0b", "\u0627\u200d"])
def test_other_text_stays(text):
    assert printable(text) == text


RNG = np.random.default_rng(0)
NOISE = RNG.integers(0, 256, (600, 500, 3), np.uint8)
TALL = cv2.GaussianBlur(RNG.integers(0, 256, (6000, 64, 3), np.uint8), (0, 0), 1.5)


class Gradient:
    """A ``LevelReader`` of any size that computes its pixels: column modulo 251, row modulo 241, 7."""

    name = "gradient"

    def __init__(self):
        self.boxes = []

    def read_level(self, level, l_x, l_y, out):
        self.boxes.append((level, l_x, l_y, *out.shape[:2]))
        out[..., 0] = np.arange(l_x, l_x + out.shape[1]) % 251
        out[..., 1] = (np.arange(l_y, l_y + out.shape[0]) % 241)[:, None]
        out[..., 2] = 7

    def close(self):
        self.boxes.clear()


@given(st.floats(0.5, 20.0), st.integers(0, 255))
def test_a_constant_slide_stays_constant(mpp, value):
    whole = np.full((300, 400, 3), value, np.uint8)
    slide = memory_slide([whole, whole[:75, :100]], 0.5)
    size = max(1, int(90 * 0.5 / mpp))
    assert (slide.read(Region(10, 20, size, size, mpp)) == value).all()


@given(st.integers(2, 9), st.integers(-20, 90), st.integers(-20, 90))
def test_a_whole_number_scale_is_the_mean_of_blocks(factor, x, y):
    slide = memory_slide([NOISE], 0.5)
    padded = np.pad(NOISE, ((100, 100), (100, 100), (0, 0)), constant_values=PADDING)
    height, width = 31, 23
    box = padded[y + 100 : y + 100 + height * factor, x + 100 : x + 100 + width * factor]
    expected = box.reshape(height, factor, width, factor, 3).mean(axis=(1, 3))
    assert np.abs(slide.read(Region(x, y, width, height, 0.5 * factor)) - expected).max() <= 0.5 + 1e-9


@given(st.floats(1.02, 9.0))
def test_a_fractional_scale_keeps_the_mean(factor):
    slide = memory_slide([NOISE], 0.5)
    height, width = int(590 / factor), int(490 / factor)
    got = slide.read(Region(0, 0, width, height, 0.5 * factor))
    covered = NOISE[: round(height * factor), : round(width * factor)]
    np.testing.assert_allclose(got.mean(axis=(0, 1)), covered.mean(axis=(0, 1)), atol=1.5)


@pytest.mark.parametrize("factor", [1.37, 1.5, 1.978, 2, 3, 2.6, 5, 7.4])
def test_bands_give_what_one_piece_gives(monkeypatch, factor):
    slide = memory_slide([TALL], 0.5)
    region = Region(0, -5, int(64 / factor), int(6000 / factor), 0.5 * factor)
    whole = slide.read(region)
    monkeypatch.setattr(pyramid, "BAND_BYTES", 90_000)
    difference = np.abs(slide.read(region).astype(int) - whole)
    assert difference.max() <= (0 if factor in (1.5, 2, 3, 5) else 2)
    assert difference.mean() < 0.2


def test_bands_follow_each_other_without_gap_or_overlap(monkeypatch):
    reader = Gradient()
    slide = PyramidSlide(Path("gradient"), reader, levels_from_sizes([(50_000, 50_000)], 0.25))
    monkeypatch.setattr(pyramid, "BAND_BYTES", 1 << 20)
    slide.read(Region(100, 200, 500, 700, 0.25 * 6.3))
    assert len(reader.boxes) > 5
    ends = [y + rows for _, _, y, rows, _ in reader.boxes]
    assert [y for _, _, y, _, _ in reader.boxes] == [200, *ends[:-1]]
    assert ends[-1] == 200 + round(700 * 6.3 / 6) * 6


def test_the_coarsest_level_that_is_fine_enough_is_read():
    reader = Gradient()
    slide = PyramidSlide(Path("gradient"), reader, levels_from_sizes([(40_000, 40_000), (10_000, 10_000)], 0.25))
    slide.read(Region(4000, 8000, 64, 32, 1.0))
    slide.read(Region(4000, 8000, 64, 32, 0.9))
    assert [(level, x, y) for level, x, y, _, _ in reader.boxes] == [(1, 1000, 2000), (0, 4000, 8000)]


@pytest.mark.parametrize(
    ("side", "level_mpp", "read_side", "mpp", "most_bytes"),
    [
        (12_000, 0.25, 300, 10.0, 80 << 20),  # an overview of 432 MB needs one band
        (30_000, 0.2528, 6000, 0.5, 1.2 * 6000 * 6000 * 3),  # a large tile at a fractional scale: its size again
        (30_000, 0.5, 2000, 0.5, 1 << 20),  # a native read goes straight into the caller's array
    ],
)
def test_memory_of_a_read_is_bounded(side, level_mpp, read_side, mpp, most_bytes):
    slide = PyramidSlide(Path("gradient"), Gradient(), levels_from_sizes([(side, side)], level_mpp))
    out = np.zeros((read_side, read_side, 3), np.uint8)
    tracemalloc.start()
    slide.read(Region(0, 0, read_side, read_side, mpp), out=out)
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak_bytes < most_bytes
