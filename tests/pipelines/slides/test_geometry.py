"""Coordinate planes, level choice and read plans."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelines.catalog.failures import FailedSlides
from pipelines.slides.geometry import (
    NATIVE_TOLERANCE,
    Level,
    Region,
    best_level,
    check_mpp,
    l0_from_l,
    l0_from_t,
    l_from_l0,
    levels_from_sizes,
    plan_read,
)
from pipelines.slides.slide import SlideError, printable, printable_values

mpps = st.floats(0.1, 1.0)
pyramids = st.builds(
    lambda width, height, steps, mpp: levels_from_sizes(
        [(max(1, width >> s), max(1, height >> s)) for s in sorted(steps)], mpp
    ),
    st.integers(1000, 200_000),
    st.integers(1000, 200_000),
    st.sets(st.integers(1, 8), max_size=5).map(lambda steps: steps | {0}),
    mpps,
)
regions = st.builds(
    Region,
    st.integers(-10_000, 200_000),
    st.integers(-10_000, 200_000),
    st.integers(1, 20_000),
    st.integers(1, 20_000),
    st.floats(0.1, 200.0),
)


@pytest.mark.parametrize("width", [0, -1])
def test_a_region_without_pixels_is_refused(width: int) -> None:
    with pytest.raises(ValueError, match="at least 1 x 1 px"):
        Region(0, 0, width, 5, 0.5)


def test_levels_from_sizes() -> None:
    fine, coarse = levels_from_sizes([(1000, 600), (250, 150)], 0.25)
    assert fine == Level(0, 1000, 600, 1.0, 0.25)
    assert coarse == Level(1, 250, 150, 4.0, 1.0)


@pytest.mark.parametrize(
    ("mpp", "plausible"),
    [(0.05, True), (100.0, True), (0.0499, False), (100.1, False), (0.0, False), (math.nan, False), (math.inf, False)],
)
def test_plausible_mpp(mpp: float, plausible: bool) -> None:
    assert check_mpp(mpp) is plausible


@given(st.integers(-(10**6), 10**6), st.floats(1.0, 300.0))
def test_a_px_of_a_level_survives_the_way_to_level_0_and_back(l_px: int, downsample: float) -> None:
    assert l_from_l0(l0_from_l(l_px, downsample), downsample) == l_px


@given(st.integers(-(10**6), 10**6), st.floats(1.0, 300.0))
def test_a_level_0_px_comes_back_within_half_a_px_of_the_level(l0_px: int, downsample: float) -> None:
    assert abs(l0_from_l(l_from_l0(l0_px, downsample), downsample) - l0_px) <= downsample / 2 + 1


@pytest.mark.parametrize(
    ("t_px", "t_mpp", "l0_mpp", "l0_px"),
    [(1024, 0.5, 0.25, 2048), (1024, 0.5, 0.499, 1024), (1024, 0.5, 0.2528, 2025), (100, 0.25, 0.2505, 100)],
)
def test_level_0_length_of_a_tile(t_px: int, t_mpp: float, l0_mpp: float, l0_px: int) -> None:
    assert l0_from_t(t_px, t_mpp, l0_mpp) == l0_px


@given(pyramids, st.floats(0.1, 200.0))
def test_best_level_is_the_coarsest_that_is_fine_enough(levels: tuple[Level, ...], mpp: float) -> None:
    limit = mpp * (1 + NATIVE_TOLERANCE)
    if levels[0].mpp > limit:
        with pytest.raises(ValueError, match=r"ask for --mpp .* or coarser"):
            best_level(levels, mpp)
        return
    best = best_level(levels, mpp)
    assert best.mpp <= limit
    assert all(level.mpp <= best.mpp or level.mpp > limit for level in levels)


@given(pyramids, st.data())
def test_within_one_percent_a_level_is_read_as_it_is(levels: tuple[Level, ...], data: st.DataObject) -> None:
    level = data.draw(st.sampled_from(levels))
    mpp = level.mpp * data.draw(st.floats(1 / (1 + NATIVE_TOLERANCE) + 1e-6, 1 + NATIVE_TOLERANCE - 1e-6))
    plan = plan_read(levels, Region(12_345, 678, 512, 300, mpp))
    assert plan.is_native
    assert abs(levels[plan.level].mpp / mpp - 1) <= NATIVE_TOLERANCE + 1e-9
    assert (plan.l_width, plan.l_height) == (512, 300)


@given(pyramids, regions)
def test_a_plan_covers_the_region_and_only_ever_shrinks(levels: tuple[Level, ...], region: Region) -> None:
    if levels[0].mpp > region.mpp * (1 + NATIVE_TOLERANCE):
        with pytest.raises(ValueError, match="cannot be had"):
            plan_read(levels, region)
        return
    plan = plan_read(levels, region)
    level = levels[plan.level]
    scale = region.mpp / level.mpp
    assert plan.out == region.size
    assert plan.l_width % plan.block == plan.l_height % plan.block == 0
    for box, size in ((plan.l_width, region.width), (plan.l_height, region.height)):
        assert box // plan.block >= size  # nothing is enlarged
        assert box // plan.block < 2.05 * size + 1  # the fractional step stays below 2
        assert abs(box - size * scale) <= plan.block / 2 + NATIVE_TOLERANCE * size * scale + 1e-6
    for l_px, l0_px in ((plan.l_x, region.l0_x), (plan.l_y, region.l0_y)):
        assert abs(l_px * level.downsample - l0_px) <= level.downsample / 2 * (1 + 1e-9)


def test_whole_number_scales_are_whole_number_blocks() -> None:
    levels = levels_from_sizes([(100_000, 100_000)], 0.25)
    for factor in (2, 3, 7, 32):
        plan = plan_read(levels, Region(0, 0, 1000, 800, 0.25 * factor))
        assert (plan.block, plan.l_width, plan.l_height) == (factor, 1000 * factor, 800 * factor)


EVIL = ["\x1b[2J", "\x9b31m", "\x07", "\r", "\u202e", "\u2066", "\u2028", "\x7f", "\x00", "\ud800"]


@pytest.mark.parametrize("evil", EVIL)
def test_what_a_terminal_obeys_is_escaped(evil: str, tmp_path: Path) -> None:
    text = f"a{evil}b"
    assert printable(text).isprintable()
    assert printable(printable(text)) == printable(text)
    assert printable_values({text: [text, (text, 1)], "x": None}) == {
        printable(text): [printable(text), (printable(text), 1)],
        "x": None,
    }
    assert evil not in str(SlideError(f"x.svs: {text}\n  tiled: no"))
    assert "\n" in str(SlideError(f"x.svs: {text}\n  tiled: no"))
    failed = FailedSlides(tmp_path / "failed_slides.csv")
    failed.add("s", "open", f"what the file says: {text}")
    assert evil not in failed.path.read_text(errors="surrogateescape")


@pytest.mark.parametrize("text", ["", "Tumor: Positive", "b\u00f6sartig <1%", "\u80bf", "a\u00a0b", "\u0627\u200d"])
def test_other_text_stays(text: str) -> None:
    assert printable(text) == text
