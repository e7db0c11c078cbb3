"""Blur and pen marks on a real slide, made worse by hand: found where they are, and not where they are not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict

import cv2
import numpy as np
import pytest

from pipelines.backends.level_reader import memory_slide
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.quality import SHARP, Quality, pen_of, sharpness_of, slide_quality
from pipelines.tiles.slide_index import find_tiles
from pipelines.tiles.tissue import read_overview
from tests.helpers.real import NDPI, SVS

SETTINGS = IndexSettings(tile=512)


@pytest.fixture(scope="module")
def real() -> Iterator[Pixels]:
    """A small slide, whole, at 0.5 um/px."""
    with SlideSpec("real", SVS).open() as slide:
        level = slide.levels[0]
        yield slide.read(Region(0, 0, level.width, level.height, slide.mpp))


def quality_of(pixels: Pixels) -> Quality:
    slide = memory_slide([pixels], mpp=0.5)
    overview = read_overview(slide, 8.0, 1)
    l0_x, l0_y = (grid.ravel() for grid in np.meshgrid(np.arange(0, 1700, 512), np.arange(0, 2400, 512)))
    return slide_quality(slide, overview, l0_x, l0_y, (512, 512))


def test_the_index_judges_a_slide() -> None:
    source = find_tiles(SlideSpec("a", SVS), SETTINGS, 1, judged=True).source
    assert source.tissue_share == pytest.approx(0.37, abs=0.01)
    assert source.quality.flags == ()
    assert asdict(source.quality) == {
        "sharpness": pytest.approx(2.4, abs=0.3),
        "blurred": 0.0,
        "pen_mm2": 0.0,
    }
    assert find_tiles(SlideSpec("b", NDPI), SETTINGS, 1, judged=True).source.quality == Quality()  # fluorescence


@pytest.mark.parametrize(("sigma_um", "blurred"), [(0.5, 0.0), (1.0, 0.0), (2.0, 1.0), (8.0, 1.0)])
def test_blur_of_two_um_is_flagged_and_of_one_is_not(real: Pixels, sigma_um: float, blurred: float) -> None:
    quality = quality_of(cv2.GaussianBlur(real, (0, 0), sigma_um / 0.5).astype(np.uint8))
    assert quality.blurred == blurred
    assert quality.flags == (("blur",) if blurred else ())


def test_a_pale_stain_is_not_blur(real: Pixels) -> None:
    pale = (255 - 0.4 * (255 - real.astype(np.float32))).astype(np.uint8)
    assert quality_of(pale).blurred == 0
    before, after = quality_of(real).sharpness, quality_of(pale).sharpness
    assert before is not None
    assert after is not None
    assert 0.5 < after / before < 2  # the variance alone falls to a sixth


@pytest.mark.parametrize("ink", [(30, 60, 190), (20, 140, 70), (35, 33, 36), (205, 25, 40)], ids=str)
@pytest.mark.parametrize("on_tissue", [True, False])
def test_a_pen_stroke_is_found_with_its_area(real: Pixels, ink: tuple[int, int, int], on_tissue: bool) -> None:
    drawn = real.copy()
    x = 1150 if on_tissue else 250
    cv2.line(drawn, (x, 1000), (x, 2600), ink, 300, cv2.LINE_AA)
    quality = quality_of(drawn)
    assert "pen" in quality.flags
    assert quality.pen_mm2 == pytest.approx((1600 * 300 + np.pi * 150**2) * 0.25e-6, rel=0.15)


def test_what_is_no_pen() -> None:
    picture = np.full((200, 200, 3), 240, np.uint8)
    picture[50:150, 50:150] = (190, 120, 180)
    assert not pen_of(picture, 8.0).any()
    bordered = picture.copy()
    bordered[:, :30] = 5  # what was not scanned
    assert not pen_of(bordered, 8.0).any()
    green = np.where((picture == (190, 120, 180)).all(2)[..., None], np.array((70, 150, 110), np.uint8), picture)
    assert not pen_of(green, 8.0).any()  # all of it: a stain
    cv2.line(bordered, (60, 20), (190, 20), (40, 90, 200), 2)
    assert not pen_of(bordered[:, 40:], 2.0).any()  # smaller than a stroke


def test_glass_is_not_judged() -> None:
    assert sharpness_of(np.full((64, 64, 3), 240, np.uint8)) is None
    coarse = memory_slide([np.full((64, 64, 3), 200, np.uint8)], mpp=4.0)
    none = np.zeros(1, np.int64)
    assert slide_quality(coarse, read_overview(coarse, 8.0, 1), none, none, (8, 8)) == Quality(pen_mm2=0.0)
    assert SHARP < 0.1
