"""Tissue that is pale, small, or beside something strongly stained; and glass that must stay glass."""

import cv2
import numpy as np
import pytest

from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.slide import SlideError
from pipelines.tiles.index import build_index
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.tissue import Overview, find_tissue, read_overview, segment_tissue
from tests.helpers.real import SVS
from tests.pipelines.tiles.test_tissue import MPP, disc, glass, overlap, stained

PALE_HE = (238, 222, 232), (200, 180, 215)
IHC = (215, 218, 228), (120, 80, 50)
IHC_NEGATIVE = (215, 218, 230), (120, 135, 180)


def nuclei_on(where, picture, ground, nucleus, seed=0):
    """Tissue with some 4,000 nuclei a mm2, each smaller than a px of 8 um, more in some places than in others."""
    rng = np.random.default_rng(seed)
    shape = picture.shape[:2]
    density = cv2.resize(rng.uniform(0, 0.6, (shape[0] // 6, shape[1] // 6)), shape[::-1])
    part = np.minimum(0.5 * rng.poisson(density), 1)[..., None]
    mixed = (1 - part) * np.array(ground) + part * np.array(nucleus) + rng.integers(-4, 5, (*shape, 3))
    picture[where] = mixed.clip(0, 255).round().astype(np.uint8)[where]
    return picture


def found_in(picture, mpp=MPP):
    return find_tissue(Overview(picture, 0, 0, mpp / 0.5, mpp, np.zeros(picture.shape[:2], bool)))


@pytest.mark.parametrize("stain", [PALE_HE, IHC, IHC_NEGATIVE], ids=["he", "ihc", "ihc-negative"])
@pytest.mark.parametrize("tint", [(245, 245, 245), (243, 241, 236), (228, 231, 231)])
@pytest.mark.parametrize("radius", [40, 80, 110])
def test_pale_tissue_is_found(stain, tint, radius):
    ground, nucleus = (np.array(rgb) * np.array(tint) / 245 for rgb in stain)
    picture = nuclei_on(disc(radius=radius), glass(tint), ground, nucleus)
    assert overlap(segment_tissue(picture, MPP), disc(radius=radius)) > 0.9


@pytest.fixture(scope="module")
def real() -> Overview:
    with open_slide(SVS) as slide:
        return read_overview(slide, MPP, threads=1)


@pytest.mark.parametrize("strength", [1.0, 0.5, 0.3, 0.2, 0.15, 0.1, 0.07])
def test_a_real_slide_is_found_however_pale_its_stain(real, strength):
    tint = np.array((245, 243, 243))
    paler = (tint * (real.pixels / tint) ** strength).round().astype(np.uint8)
    expected = segment_tissue(real.pixels, real.mpp)
    assert expected.mean() == pytest.approx(0.373, abs=0.002)  # as before thresholds were chosen for each slide
    assert overlap(segment_tissue(paler, real.mpp), expected) > 0.85


def test_a_strongly_stained_control_does_not_hide_pale_tissue():
    picture = nuclei_on(disc(), glass(), *IHC_NEGATIVE)
    control = disc(270, 60, 25)
    picture = stained(control, picture, (120, 70, 60))
    assert overlap(segment_tissue(picture, MPP), disc() | control) > 0.9


@pytest.mark.parametrize("ink", [(30, 60, 190), (20, 140, 70)], ids=["blue", "green"])
@pytest.mark.parametrize("stain", [PALE_HE, IHC, ((235, 205, 222), (200, 160, 205))])
def test_pen_beside_pale_tissue_is_not_tissue(ink, stain):
    picture = nuclei_on(disc(), glass(), *stain)
    cv2.line(picture, (250, 20), (290, 220), ink, 12, cv2.LINE_AA)
    found = segment_tissue(picture, MPP)
    assert not found[:, 215:].any()
    assert overlap(found[:, :215], disc()[:, :215]) > 0.9


def bubbles(picture):
    light = np.ones(picture.shape[:2], np.float32)
    for x, y, radius in (80, 80, 40), (200, 150, 60):
        cv2.circle(light, (x, y), radius, 0.7, 3, cv2.LINE_AA)
        cv2.circle(light, (x, y), radius - 5, 0.9, 2, cv2.LINE_AA)
    picture[:] = picture * light[..., None]


def coverslip(picture):
    picture[:, 150:] = glass((243, 241, 234))[:, 150:]


def shade(picture):
    fall = np.linspace(1, 0.9, picture.shape[1])[None, :, None]
    picture[:] = picture * fall * (1, 1, 0.98)


def dust(picture):
    for x, y in np.random.default_rng(3).integers(5, 230, (40, 2)):
        cv2.circle(picture, (int(x), int(y)), 2, (150, 150, 160), -1)


def jpeg(picture):
    _, data = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 40])
    picture[:] = cv2.imdecode(data, cv2.IMREAD_COLOR)


@pytest.mark.parametrize("drawn", [bubbles, coverslip, shade, dust, jpeg])
@pytest.mark.parametrize("tint", [(243, 243, 243), (240, 238, 222), (225, 232, 240)])
def test_glass_has_no_tissue_whatever_lies_on_it(drawn, tint):
    picture = glass(tint)
    if drawn is not coverslip:
        drawn(picture)
    elif tint == (243, 243, 243):
        coverslip(picture)
    assert not segment_tissue(picture, MPP).any()


@pytest.mark.parametrize(("radius", "is_kept"), [(3, False), (6, True), (20, True)])
def test_small_tissue_counts_where_it_is_all_there_is(radius, is_kept):
    assert found_in(stained(disc(radius=radius), glass())).mask.any() == is_kept
    # Beside a large piece it is debris, as ever.
    beside = found_in(stained(disc() | disc(270, 60, min(radius, 6)), glass())).mask
    assert not beside[:, 230:].any()


def test_what_was_found_is_said():
    tissue = found_in(stained(disc(radius=3), glass()))
    assert "saturation above" in tissue.found
    assert "of at least 4,000" in tissue.found
    black = found_in(np.random.default_rng(6).integers(0, 4, (60, 60, 3)).astype(np.uint8))
    assert "fluorescence brighter than" in black.found


@pytest.mark.parametrize(("radius", "words"), [(12, "saturation above"), (60, "--min-tissue 0.")])
def test_a_slide_without_tiles_names_the_setting_that_keeps_it(tmp_path, radius, words):
    path = tmp_path / "slide.png"
    pixels = np.full((1200, 1200, 3), 243, np.uint8)
    pixels[disc(600, 600, radius, 1200, 1200)] = (180, 120, 190)
    cv2.imwrite(str(path), pixels)
    settings = IndexSettings(tile=512)
    with pytest.raises(SlideError, match=words) as fault:
        build_index([SlideSpec("slide", path, mpp=0.5)], settings, tmp_path / "out", workers=1)
    assert "nothing on the slide is stained" not in str(fault.value)
