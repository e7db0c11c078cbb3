"""NDPI from its restart segments and MRXS and others through OpenSlide: what is particular to each."""

import numpy as np
import openslide as openslide_library
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.backends import openslide as openslide_backend
from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.backends.tiled import open_ndpi, open_tiled
from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotation_files import AnnotationFiles
from pipelines.labels.annotations import read_annotations
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import NotThisFormat, SlideError, TileReadError
from tests.helpers.drawings import box, write_geojson
from tests.helpers.mrxs_file import write_mrxs
from tests.helpers.ndpi_file import write_ndpi
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.real import NDPI, PYRAMID_TIFF, REAL, SVS
from tests.helpers.tiff_damage import with_bytes

TRITC = REAL / "test3-TRITC-2-560.ndpi"


@settings(max_examples=20, deadline=None)
@given(st.integers(-300, 4100), st.integers(-300, 5000), st.integers(1, 500), st.integers(1, 300))
def test_level_0_of_an_ndpi_of_another_channel_is_openslides(l0_x, l0_y, width, height):
    with open_ndpi(TRITC, mpp=None) as slide:
        ours = slide.read(Region(l0_x, l0_y, width, height, slide.mpp))
    np.testing.assert_array_equal(ours, openslide_pixels(TRITC, l0_x, l0_y, width, height))


@pytest.mark.parametrize(("subsampling", "interval"), [("4:2:2", 8), ("4:4:4", 16), ("4:4:4", 80)])
def test_several_segments_a_row_and_files_above_4_gib(tmp_path, subsampling, interval):
    with open_tiled(SVS, mpp=None) as tissue:
        pixels = tissue.read(Region(800, 900, 640, 512, tissue.mpp))
    read = []
    for hole_bytes in (0, 5 << 30):
        path = tmp_path / f"{hole_bytes}.ndpi"
        write_ndpi(path, pixels, interval=interval, subsampling=subsampling, hole_bytes=hole_bytes)
        assert check_tiff(path) == []
        with open_ndpi(path, mpp=None) as slide:
            assert slide.mpp == 0.5
            read.append(slide.read(Region(0, 0, 640, 512, slide.mpp)))
    np.testing.assert_array_equal(read[0], openslide_pixels(tmp_path / "0.ndpi", 0, 0, 640, 512))
    np.testing.assert_array_equal(read[0], read[1])


def test_what_is_no_ndpi_or_no_plain_tiff_is_left_to_others(tmp_path):
    path = tmp_path / "slide.ndpi"
    write_ndpi(path, np.zeros((64, 128, 3), np.uint8), interval=8, with_starts=False)
    for opener, other, words in (
        (open_ndpi, path, "0 listed starts"),
        (open_ndpi, SVS, "not Hamamatsu"),
        (open_tiled, NDPI, "Hamamatsu"),
    ):
        with pytest.raises(NotThisFormat, match=words):
            opener(other, mpp=None)


def test_a_damaged_segment_is_named_and_the_others_are_read_and_a_cut_is_refused(tmp_path):
    page = read_tiff(NDPI).pages[0]
    start = page.number(Tag.STRIP_OFFSETS, 0) + int(page.array(Tag.NDPI_STARTS_LOW)[100])
    path = with_bytes(NDPI, tmp_path / "slide.ndpi", start, bytes(100))
    with open_ndpi(path, mpp=None) as slide, open_ndpi(NDPI, mpp=None) as whole:
        with pytest.raises(TileReadError, match=rf"slide\.ndpi: level 0, tile column 0, row 100 .* offset {start}\)"):
            slide.read(Region(0, 800, 64, 8, slide.mpp))
        beside = Region(0, 0, 512, 800, slide.mpp)
        np.testing.assert_array_equal(slide.read(beside), whole.read(beside))
    path.write_bytes(NDPI.read_bytes()[:2_000_000])
    with pytest.raises(SlideError, match="cut short"):
        open_ndpi(path, mpp=None)


BOUNDS = Bounds(256 + 20, 12, 256, 256)
RED = (48, 64, 160, 160)
"""Left, top, right and bottom of a red box, from the corner of the scan; along the blocks of the JPEG tiles."""


@pytest.fixture(scope="module")
def mrxs(tmp_path_factory):
    """A scan that begins away from the corner of level 0, and its levels as they were written."""
    pixels = np.full((512, 768, 3), 230, np.uint8)
    left, top, right, bottom = RED
    pixels[BOUNDS.l0_y + top : BOUNDS.l0_y + bottom, BOUNDS.l0_x + left : BOUNDS.l0_x + right] = (200, 30, 30)
    path = tmp_path_factory.mktemp("mrxs") / "case.mrxs"
    return SlideSpec("case", path), write_mrxs(path, pixels, BOUNDS)


def test_mrxs_is_white_where_nothing_was_scanned(mrxs):
    spec, written = mrxs
    with spec.open() as opened:
        assert (opened.backend, opened.mpp, opened.bounds) == ("openslide", 0.25, BOUNDS)
        assert len(opened.levels) == len(written) == 3
        for level, pixels in zip(opened.levels, written, strict=True):
            got = opened.read(Region(-8, -4, level.width + 9, level.height + 6, level.mpp))
            l_x, l_y = (round(px / level.downsample) for px in (8, 4))
            np.testing.assert_array_equal(got[l_y : l_y + level.height, l_x : l_x + level.width], pixels)
            assert (got[:l_y] == 255).all()
            assert (got[:, :l_x] == 255).all()
        assert (written[0][: BOUNDS.l0_y] == 255).all()
        assert not (written[0][BOUNDS.l0_y] == 255).all()


def test_mrxs_data_of_zeros_are_refused(tmp_path):
    """OpenSlide finds no camera position in them, and draws an empty slide."""
    write_mrxs(tmp_path / "case.mrxs", np.full((512, 768, 3), 230, np.uint8), BOUNDS)
    data = tmp_path / "case" / "Data0000.dat"
    data.write_bytes(bytes(data.stat().st_size))
    with pytest.raises(SlideError, match="no scanned area"):
        SlideSpec("case", tmp_path / "case.mrxs").open()


def test_what_qupath_drew_lies_on_what_it_was_drawn_on(mrxs, tmp_path):
    """QuPath counts from the corner of the scan, not of level 0."""
    spec, _ = mrxs
    drawn = write_geojson(tmp_path / "case.geojson", box(*RED, "red"))
    truth = read_annotations(AnnotationFiles({"case": drawn}, (), drawn.name), (spec,), {"case": "case"})
    with spec.open() as opened:
        for mpp, side in ((0.25, 300), (0.5, 150)):
            region = Region(BOUNDS.l0_x - 8, BOUNDS.l0_y + 4, side, side, mpp)
            mask = np.empty((side, side), np.uint8)
            truth.read_mask("case", opened, region, mask)
            pixels = opened.read(region).astype(np.int16)
            red = pixels[..., 0] - pixels[..., 1] > 85
            assert red.any()
            np.testing.assert_array_equal(mask > 0, red)


@given(st.integers(0, 255), st.tuples(*[st.floats(0, 1)] * 3))
def test_premultiplied_argb_onto_white(alpha, colour):
    premultiplied = [round(c * alpha) for c in colour]
    out, argb = np.zeros((2, 3, 3), np.uint8), np.full((2, 3), 0xFF102030, np.uint32)
    argb[1, 1] = alpha << 24 | premultiplied[0] << 16 | premultiplied[1] << 8 | premultiplied[2]
    openslide_backend._rgb_on_white(argb, out)
    assert out[1, 1].tolist() == [c + 255 - alpha for c in premultiplied]
    assert out[0, 0].tolist() == [0x10, 0x20, 0x30]


@pytest.mark.parametrize("band_bytes", [1, 100_000])
def test_bands_give_what_one_piece_gives(monkeypatch, band_bytes):
    monkeypatch.setattr(openslide_backend, "BAND_BYTES", band_bytes)
    with open_slide(SVS, backend="openslide") as slide:
        got = slide.read(Region(101, 203, 700, 900, slide.mpp))
    np.testing.assert_array_equal(got, openslide_pixels(SVS, 101, 203, 700, 900))


def test_levels_that_do_not_divide_evenly_are_at_most_a_quarter_px_off():
    """OpenSlide takes positions in whole level-0 px, and this level's downsample is 2.0003."""
    with open_slide(PYRAMID_TIFF, backend="openslide") as slide:
        level = slide.levels[1]
        expected = openslide_pixels(PYRAMID_TIFF, 0, 0, level.width, level.height, 1)
        for x, y in ((100, 200), (700, 900), (333, 1111)):
            got = slide.read(Region(2 * x, 2 * y, 200, 200, level.mpp))
            difference = np.abs(got.astype(int) - expected[y : y + 200, x : x + 200])
            here = expected[y : y + 201, x : x + 201].astype(int)
            step_to_next_px = sum(np.abs(np.diff(here, axis=axis)).mean() for axis in (0, 1))
            assert difference.mean() < 0.25 * step_to_next_px + 0.5


@pytest.fixture
def with_properties(monkeypatch):
    """Have OpenSlide record other properties than the file's."""

    def change(**changes):
        changed = {f"openslide.{name.replace('_', '-')}": value for name, value in changes.items()}

        def opened(path):
            slide = openslide_library.OpenSlide(path)
            proxy = type("Changed", (), {"__getattr__": lambda self, name: getattr(slide, name)})()
            proxy.properties = dict(slide.properties) | changed
            return proxy

        monkeypatch.setattr(openslide_backend, "OpenSlide", opened)

    return change


def test_bounds_are_those_that_the_file_records(with_properties):
    with_properties(bounds_x="10", bounds_y="20", bounds_width="300", bounds_height="400")
    with open_slide(NDPI, backend="openslide") as slide:
        assert slide.bounds == Bounds(10, 20, 300, 400)
    with_properties()
    with open_slide(NDPI, backend="openslide") as slide:
        assert slide.bounds == Bounds(0, 0, 3968, 4864)


@pytest.mark.parametrize(
    ("mpp_x", "mpp_y", "words"),
    [
        ("0.25", "0.26", None),
        ("0.25", "0.50", r"0\.25 um/px in x and 0\.5 in y; pixels must be square within 5%"),
        ("nan", "nan", "records nan um/px"),
        ("", "0,25", "does not record its um/px"),
    ],
)
def test_mpp_of_both_axes(with_properties, mpp_x, mpp_y, words):
    with_properties(mpp_x=mpp_x, mpp_y=mpp_y)
    if words is None:
        with open_slide(SVS, backend="openslide") as slide:
            assert slide.mpp == pytest.approx(0.255)
    else:
        with pytest.raises(SlideError, match=words):
            open_slide(SVS, backend="openslide")
