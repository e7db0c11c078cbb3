"""NDPI from its restart segments: the pixels of OpenSlide, above 4 GiB too, and damage confined to its segment."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import openslide
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.backends.ndpi import open_ndpi
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.backends.tiled import open_tiled
from pipelines.slides.geometry import Region
from pipelines.slides.slide import NotThisFormat, SlideError, TileReadError
from tests.helpers.ndpi_file import write_ndpi
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.real import NDPI, REAL, SVS
from tests.helpers.tiff_damage import with_bytes

TRITC = REAL / "test3-TRITC-2-560.ndpi"


@pytest.mark.parametrize("path", [NDPI, TRITC], ids=lambda path: path.name)
@settings(max_examples=20, deadline=None)
@given(
    l0_x=st.integers(-300, 4100),
    l0_y=st.integers(-300, 5000),
    width=st.integers(1, 500),
    height=st.integers(1, 300),
)
def test_level_0_is_openslides_byte_for_byte(path: Path, l0_x: int, l0_y: int, width: int, height: int) -> None:
    with open_ndpi(path, mpp=None) as slide:
        ours = slide.read(Region(l0_x, l0_y, width, height, slide.mpp))
    np.testing.assert_array_equal(ours, openslide_pixels(path, l0_x, l0_y, width, height))


def test_every_recorded_level_is_openslides_byte_for_byte() -> None:
    with open_ndpi(NDPI, mpp=None) as slide, openslide.OpenSlide(NDPI) as reference:
        assert [level.width for level in slide.levels] == [3968, 1984, 992, 496]
        assert slide.mpp == pytest.approx(float(reference.properties["openslide.mpp-x"]))
        for level in slide.levels:
            ours = slide.read(Region(0, 0, level.width, level.height, level.mpp))
            theirs = openslide_pixels(NDPI, 0, 0, level.width, level.height, level.index)
            np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize(("subsampling", "interval"), [("4:2:2", 8), ("4:4:4", 16), ("4:4:4", 80)])
def test_several_segments_a_row_and_files_above_4_gib(tmp_path: Path, subsampling: str, interval: int) -> None:
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


def test_a_stream_without_listed_segments_is_left_to_openslide(tmp_path: Path) -> None:
    path = tmp_path / "slide.ndpi"
    write_ndpi(path, np.zeros((64, 128, 3), np.uint8), interval=8, with_starts=False)
    with pytest.raises(NotThisFormat, match="0 listed starts"):
        open_ndpi(path, mpp=None)


def test_other_tiffs_are_not_ndpi_and_ndpi_is_no_plain_tiff() -> None:
    with pytest.raises(NotThisFormat, match="not Hamamatsu"):
        open_ndpi(SVS, mpp=None)
    with pytest.raises(NotThisFormat, match="Hamamatsu"):
        open_tiled(NDPI, mpp=None)


def test_a_damaged_segment_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    page = read_tiff(NDPI).pages[0]
    start = page.number(Tag.STRIP_OFFSETS, 0) + int(page.array(Tag.NDPI_STARTS_LOW)[100])
    path = with_bytes(NDPI, tmp_path / "slide.ndpi", start, bytes(100))
    with open_ndpi(path, mpp=None) as slide, open_ndpi(NDPI, mpp=None) as whole:
        with pytest.raises(TileReadError, match=rf"slide\.ndpi: level 0, tile column 0, row 100 .* offset {start}\)"):
            slide.read(Region(0, 800, 64, 8, slide.mpp))
        beside = Region(0, 0, 512, 800, slide.mpp)
        np.testing.assert_array_equal(slide.read(beside), whole.read(beside))


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "slide.ndpi"
    path.write_bytes(NDPI.read_bytes()[:2_000_000])
    with pytest.raises(SlideError, match="cut short"):
        open_ndpi(path, mpp=None)
