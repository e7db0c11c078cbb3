from __future__ import annotations

import cv2
import numpy as np
import pytest

from pipelines.backends.level_reader import memory_slide
from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import Pixels, Slide, SlideError, TileReadError
from pipelines.tiles.index import build_index
from pipelines.tiles.index_settings import IndexSettings
from pipelines.tiles.tissue import Overview, find_tissue, is_fluorescence, read_overview, segment_tissue
from tests.helpers.real import SVS

MPP = 8.0
H, W = 240, 320


def glass(tint=(243, 243, 243), h=H, w=W):
    noise = np.random.default_rng(0).integers(-4, 5, (h, w, 3))
    return (np.array(tint) + noise).clip(0, 255).astype(np.uint8)


def disc(x=110, y=120, radius=80, h=H, w=W):
    yy, xx = np.mgrid[:h, :w]
    return (xx - x) ** 2 + (yy - y) ** 2 <= radius**2


def stained(where, picture, rgb=(190, 120, 180)):
    noise = np.random.default_rng(1).integers(-25, 26, picture.shape)
    picture[where] = (np.array(rgb) + noise).clip(0, 255).astype(np.uint8)[where]
    return picture


def overlap(a, b):
    return (a & b).sum() / (a | b).sum()


@pytest.mark.parametrize("rgb", [(190, 120, 180), (235, 190, 215), (110, 60, 140), (150, 100, 60)])
def test_stained_tissue_on_glass_is_found(rgb):
    assert overlap(segment_tissue(stained(disc(), glass(), rgb), MPP), disc()) > 0.93


@pytest.mark.parametrize("tint", [(243, 243, 243), (240, 238, 222), (225, 232, 240), (255, 255, 255)])
def test_glass_has_no_tissue_whatever_its_tint(tint):
    assert not segment_tissue(glass(tint), MPP).any()


def test_tissue_is_found_on_tinted_glass():
    assert overlap(segment_tissue(stained(disc(), glass((240, 238, 222))), MPP), disc()) > 0.93


def test_a_slide_full_of_tissue_is_not_split_into_pale_and_dark():
    picture = stained(np.ones((H, W), bool), glass(), (230, 180, 210))
    picture = stained(disc(), picture, (120, 60, 150))
    assert segment_tissue(picture, MPP).mean() > 0.99


@pytest.mark.parametrize("ink", [(30, 60, 190), (20, 140, 70), (35, 33, 36)], ids=["blue", "green", "black"])
def test_pen_is_not_tissue(ink):
    picture = stained(disc(), glass())
    cv2.line(picture, (250, 20), (290, 220), ink, 12, cv2.LINE_AA)
    found = segment_tissue(picture, MPP)
    assert not found[:, 215:].any()
    assert overlap(found[:, :215], disc()[:, :215]) > 0.93


def test_a_green_and_blue_stain_is_not_taken_for_pen():
    picture = stained(disc(), glass(), (90, 150, 190))
    assert overlap(segment_tissue(picture, MPP), disc()) > 0.93


def test_black_border_is_not_tissue():
    picture = stained(disc(), glass())
    picture[:, 260:] = np.random.default_rng(2).integers(0, 25, (H, W - 260, 3))
    found = segment_tissue(picture, MPP)
    assert not found[:, 230:].any()
    assert overlap(found[:, :230], disc()[:, :230]) > 0.93


def test_a_scan_that_is_mostly_black_border_is_not_taken_for_fluorescence():
    picture = np.random.default_rng(3).integers(0, 20, (H, W, 3)).astype(np.uint8)
    picture[60:180, 40:180] = stained(disc(70, 60, 40, 120, 140), glass(h=120, w=140))
    expected = np.zeros((H, W), bool)
    expected[60:180, 40:180] = disc(70, 60, 40, 120, 140)
    assert not is_fluorescence(picture)
    assert overlap(segment_tissue(picture, MPP), expected) > 0.9


@pytest.mark.parametrize("rgb", [(0, 0, 220), (40, 0, 0), (0, 180, 60)])
def test_fluorescence_on_black_is_found(rgb):
    picture = np.random.default_rng(4).integers(0, 4, (H, W, 3)).astype(np.uint8)
    picture[disc()] += np.array(rgb, np.uint8)
    assert overlap(segment_tissue(picture, MPP), disc()) > 0.9


def test_faint_tissue_between_bright_nuclei_counts():
    rng = np.random.default_rng(5)
    picture = rng.integers(0, 4, (H, W, 3)).astype(np.uint8)
    picture[disc(), 2] += 12
    nuclei = disc() & (rng.random((H, W)) < 0.05)
    picture[nuclei, 2] = 220
    assert overlap(segment_tissue(picture, MPP), disc()) > 0.85


def test_black_has_no_tissue():
    assert not segment_tissue(np.zeros((H, W, 3), np.uint8), MPP).any()
    assert not segment_tissue(np.random.default_rng(6).integers(0, 4, (H, W, 3)).astype(np.uint8), MPP).any()


def test_specks_go_and_small_holes_are_filled():
    speck, hole, lumen = disc(250, 60, 5), disc(110, 120, 8), disc(110, 170, 24)
    found = segment_tissue(stained((disc() & ~hole & ~lumen) | speck, glass()), MPP)
    assert not (found & speck).any()
    assert found[hole].all()
    assert not found[disc(110, 170, 18)].any()


@pytest.mark.parametrize("shape", [(1, 1), (1, 40), (50, 2)])
def test_tiny_pictures_have_a_mask(shape):
    assert segment_tissue(np.full((*shape, 3), 255, np.uint8), 29.0).shape == shape


def blocks(height, width):
    """A picture whose 16 x 16 means are exact, so that an overview can be compared to the byte."""
    coarse = np.random.default_rng(7).integers(0, 256, (height // 16, width // 16, 3)).astype(np.uint8)
    return coarse, coarse.repeat(16, 0).repeat(16, 1)


def test_overview_read_in_blocks_has_no_seam():
    coarse, pixels = blocks(4800, 9600)
    overview = read_overview(memory_slide([pixels], 0.5), 8.0, threads=3)
    assert (overview.downsample, overview.mpp) == (16, 8.0)
    np.testing.assert_array_equal(overview.pixels, coarse)


def test_overview_takes_the_nearest_level_and_whole_steps():
    coarse, pixels = blocks(3200, 3200)
    finer = np.zeros_like(pixels)
    overview = read_overview(memory_slide([finer, pixels[::4, ::4]], 0.23), 8.0, threads=1)
    assert overview.downsample == 4 * 9  # 0.92 um/px of level 1, 8.7 of them
    overview = read_overview(memory_slide([finer, pixels[::4, ::4]], 0.5), 8.0, threads=1)
    np.testing.assert_array_equal(overview.pixels, coarse)


def test_overview_covers_the_bounds_only():
    coarse, pixels = blocks(3200, 4800)
    slide = memory_slide([pixels], 0.5, bounds=Bounds(160, 320, 1600, 800))
    overview = read_overview(slide, 8.0, threads=1)
    assert (overview.l0_x, overview.l0_y) == (160, 320)
    np.testing.assert_array_equal(overview.pixels, coarse[20:70, 10:110])


def test_overview_of_a_coarse_slide_is_its_level_0():
    pixels = np.random.default_rng(8).integers(0, 256, (70, 90, 3)).astype(np.uint8)
    overview = read_overview(memory_slide([pixels], 29.0), 8.0, threads=1)
    assert overview.mpp == 29.0
    np.testing.assert_array_equal(overview.pixels, pixels)


def test_overview_is_coarser_when_it_would_be_too_large(monkeypatch):
    monkeypatch.setattr("pipelines.tiles.tissue.OVERVIEW_PX", 10_000)
    overview = read_overview(memory_slide([np.zeros((4000, 4000, 3), np.uint8)], 0.5), 8.0, threads=1)
    assert overview.pixels.shape == (100, 100, 3)
    assert overview.mpp == 20.0
    # Level 1 alone would have 40,000 px; two of its px are nearer to what was asked, three are within the limit.
    pixels = np.zeros((500, 500, 3), np.uint8)
    overview = read_overview(memory_slide([pixels, pixels[::2, ::2]], 0.5), 1.0, threads=1)
    assert overview.pixels.shape == (83, 83, 3)


class Damaged:
    """A slide of which the square from (``x``, ``y``) on cannot be read."""

    def __init__(self, slide: Slide, x: int, y: int, side: int) -> None:
        self._slide = slide
        self._box = (x, y, x + side, y + side)
        self.levels, self.bounds, self.mpp = slide.levels, slide.bounds, slide.mpp

    def read(self, region: Region, out: Pixels) -> Pixels:
        reach = round(region.mpp / self.mpp)
        x, y = region.l0_x, region.l0_y
        x0, y0, x1, y1 = self._box
        if x < x1 and x0 < x + region.width * reach and y < y1 and y0 < y + region.height * reach:
            raise TileReadError("damaged here")
        return self._slide.read(region, out)


def test_a_damaged_place_is_left_out_and_the_rest_is_read() -> None:
    pixels = np.full((2048, 3072, 3), 240, np.uint8)
    pixels[200:1900, 300:2800] = (200, 90, 160)
    whole = memory_slide([pixels], 1.0)
    overview = read_overview(Damaged(whole, 1024, 512, 256), 8.0, 2)  # type: ignore[arg-type]  # what is read is there
    assert overview.unreadable.sum() == (256 // 8) ** 2
    assert overview.unreadable[512 // 8 : 768 // 8, 1024 // 8 : 1280 // 8].all()
    elsewhere = ~overview.unreadable
    assert np.array_equal(overview.pixels[elsewhere], read_overview(whole, 8.0, 2).pixels[elsewhere])
    assert not find_tissue(overview).mask[overview.unreadable].any()


def test_a_slide_that_is_mostly_damaged_is_a_fault() -> None:
    slide = Damaged(memory_slide([np.full((1024, 1024, 3), 240, np.uint8)], 1.0), 0, 0, 900)
    with pytest.raises(TileReadError, match="damaged here"):
        read_overview(slide, 8.0, 1)  # type: ignore[arg-type]  # what is read is there


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
