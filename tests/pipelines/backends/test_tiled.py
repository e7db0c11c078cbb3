"""Direct decode of tiled TIFF: the pixels of OpenSlide, its refusals in words, and damage confined to its tile."""

from __future__ import annotations

import os
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import openslide
import psutil
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pipelines.backends.registry import open_slide
from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiled import open_tiled
from pipelines.slides.geometry import Region
from pipelines.slides.slide import NotThisFormat, SlideError, TileReadError
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.tiff_damage import tile_extent, with_bit_rot, with_bytes, with_tile_entry

REAL = Path(__file__).parents[3] / "data" / "real"
SVS = REAL / "CMU-1-Small-Region.svs"
PYRAMID = REAL / "cmu-small_pyramid_jpeg.tif"
OME = REAL / "cmu-small.ome.tif"
RESOLUTION: dict[str, Any] = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}


def tissue(width: int = 600, height: int = 500) -> NDArray[np.uint8]:
    with open_tiled(SVS, mpp=None) as slide:
        return slide.read(Region(800, 900, width, height, slide.mpp))


def read_all(path: Path, mpp: float | None = None) -> NDArray[np.uint8]:
    with open_tiled(path, mpp=mpp) as slide:
        level = slide.levels[0]
        return slide.read(Region(0, 0, level.width, level.height, slide.mpp))


@pytest.mark.parametrize("path", [SVS, PYRAMID, OME], ids=lambda path: path.name)
@settings(max_examples=40, deadline=None)
@given(
    l0_x=st.integers(-300, 2300),
    l0_y=st.integers(-300, 3000),
    width=st.integers(1, 700),
    height=st.integers(1, 700),
)
def test_level_0_is_openslides_byte_for_byte(path: Path, l0_x: int, l0_y: int, width: int, height: int) -> None:
    with open_tiled(path, mpp=None) as slide:
        ours = slide.read(Region(l0_x, l0_y, width, height, slide.mpp))
    np.testing.assert_array_equal(ours, openslide_pixels(path, l0_x, l0_y, width, height))


def test_every_level_is_openslides_byte_for_byte() -> None:
    with open_tiled(PYRAMID, mpp=None) as slide, openslide.OpenSlide(PYRAMID) as reference:
        assert tuple((level.width, level.height) for level in slide.levels) == reference.level_dimensions
        for level in slide.levels:
            ours = slide.read(Region(0, 0, level.width, level.height, level.mpp))
            theirs = openslide_pixels(PYRAMID, 0, 0, level.width, level.height, level.index)
            np.testing.assert_array_equal(ours, theirs)


def test_label_macro_and_thumbnail_of_an_svs_are_no_levels() -> None:
    with open_tiled(SVS, mpp=None) as slide:
        assert [(level.width, level.height) for level in slide.levels] == [(2220, 2967)]
        assert slide.mpp == 0.499


def test_ome_pyramid_in_sub_ifds_is_seen_where_openslide_sees_one_level() -> None:
    with open_tiled(OME, mpp=None) as slide, openslide.OpenSlide(OME) as reference:
        assert reference.level_count == 1
        assert [level.width for level in slide.levels] == [2220, 1110, 555, 277]
        assert slide.mpp == pytest.approx(0.499)
        for index, level in enumerate(slide.levels):
            ours = slide.read(Region(0, 0, level.width, level.height, level.mpp))
            np.testing.assert_array_equal(ours, tifffile.imread(OME, level=index))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"compression": "deflate"},
        {"compression": "deflate", "predictor": 2},
        {"compression": "lzw", "predictor": 2, "byteorder": ">"},
        {"compression": "zstd", "predictor": 2},
        {"compression": "deflate", "bigtiff": True, "byteorder": ">"},
        {"compression": 33005},
        {"compression": "jpeg", "photometric": "rgb"},
        {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (2, 1)},
        {"compression": "jpeg", "photometric": "ycbcr", "subsampling": (2, 2), "bigtiff": True},
    ],
    ids=str,
)
def test_compressions_and_colours(tmp_path: Path, options: dict[str, Any]) -> None:
    path, pixels = tmp_path / "slide.tif", tissue()
    file = {key: options[key] for key in ("bigtiff", "byteorder") if key in options}
    page = {"photometric": "rgb"} | {key: value for key, value in options.items() if key not in file}
    tifffile.imwrite(path, pixels, tile=(128, 192), **file, **page, **RESOLUTION)
    ours = read_all(path)
    if page.get("compression") != "jpeg":
        np.testing.assert_array_equal(ours, tifffile.imread(path))
    if page.get("compression") not in ("lzw", 33005):  # OpenSlide's generic reader knows neither
        np.testing.assert_array_equal(ours, openslide_pixels(path, 0, 0, pixels.shape[1], pixels.shape[0]))


@pytest.mark.parametrize("options", [{}, {"compression": "deflate", "predictor": 2}, {"compression": "jpeg"}], ids=str)
def test_grey_slides_are_read_as_rgb(tmp_path: Path, options: dict[str, Any]) -> None:
    path, grey = tmp_path / "grey.tif", tissue()[..., 1]
    tifffile.imwrite(path, grey, tile=(128, 128), photometric="minisblack", **options, **RESOLUTION)
    ours = read_all(path)
    np.testing.assert_array_equal(ours, np.repeat(tifffile.imread(path)[..., None], 3, axis=2))


def test_decode_threads_change_nothing() -> None:
    region = Region(-50, 33, 2048, 2048, 0.499)
    with open_tiled(SVS, mpp=None) as one, open_tiled(SVS, mpp=None, decode_threads=3) as three:
        np.testing.assert_array_equal(one.read(region), three.read(region))


def test_many_threads_read_one_slide() -> None:
    whole = read_all(SVS)
    corners = [(x, y) for x in range(7, 1500, 301) for y in range(11, 2200, 401)]
    start = threading.Barrier(8)
    with open_tiled(SVS, mpp=None) as slide, ThreadPoolExecutor(8) as pool:

        def differing(share: int) -> int:
            start.wait()
            return sum(
                int((slide.read(Region(x, y, 600, 500, slide.mpp)) != whole[y : y + 500, x : x + 600]).sum())
                for x, y in corners[share::8]
            )

        assert sum(pool.map(differing, range(8))) == 0


def test_a_thousand_rounds_of_open_and_read_grow_neither_memory_nor_open_files() -> None:
    process = psutil.Process()

    def rounds(number: int) -> None:
        for i in range(number):
            with open_tiled(SVS, mpp=None, decode_threads=1 + (i % 50 == 0)) as slide:
                slide.read(Region(i, i, 300, 300, slide.mpp))

    rounds(50)
    files, before = process.num_fds(), process.memory_info().rss
    rounds(1000)
    assert process.num_fds() == files
    assert process.memory_info().rss - before < 16 << 20


@pytest.mark.parametrize(
    ("recorded", "message"),
    [(b"MPP = 0.000 ", "records 0 um/px"), (b"XPP = 0.4990", "does not record"), (b"MPP = 99999.", "records 99999")],
)
def test_missing_or_absurd_mpp_names_the_override(tmp_path: Path, recorded: bytes, message: str) -> None:
    offset = SVS.read_bytes().index(b"MPP = 0.4990")
    path = with_bytes(SVS, tmp_path / "slide.svs", offset, recorded)
    with pytest.raises(SlideError, match=rf"{message}.*--slide-mpp.*`mpp`"):
        open_tiled(path, mpp=None)
    with open_tiled(path, mpp=0.5) as slide:
        assert slide.mpp == 0.5


@pytest.mark.parametrize("resolution", [(72, "INCH"), (300, "INCH"), (20_000, "NONE")])
def test_a_printers_resolution_is_no_mpp(tmp_path: Path, resolution: tuple[int, str]) -> None:
    per_unit, unit = resolution
    path = tmp_path / "slide.tif"
    tifffile.imwrite(
        path, tissue(), tile=(128, 128), photometric="rgb", resolution=(per_unit,) * 2, resolutionunit=unit
    )
    with pytest.raises(SlideError, match="--slide-mpp"):
        open_tiled(path, mpp=None)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"photometric": "rgb"}, "strips"),
        ({"photometric": "rgb", "tile": (128, 128), "planarconfig": "separate"}, "interleaved"),
        ({"photometric": "rgb", "tile": (128, 128), "software": "Philips DP v1.0"}, "Philips"),
        ({"photometric": "rgb", "tile": (128, 128), "compression": "packbits"}, "compression 32773"),
        ({"photometric": "miniswhite", "tile": (128, 128)}, "colours of kind 0"),
    ],
    ids=str,
)
def test_other_tiffs_are_left_to_other_backends(tmp_path: Path, options: dict[str, Any], reason: str) -> None:
    pixels = tissue()
    if options.get("planarconfig"):
        pixels = np.moveaxis(pixels, 2, 0)
    elif options["photometric"] == "miniswhite":
        pixels = pixels[..., 0]
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, pixels, **options, **RESOLUTION)
    with pytest.raises(NotThisFormat, match=reason):
        open_tiled(path, mpp=None)


def test_text_is_not_this_format(tmp_path: Path) -> None:
    path = tmp_path / "page.svs"
    path.write_text("<!DOCTYPE html>")
    with pytest.raises(NotThisFormat, match="not a TIFF"):
        open_tiled(path, mpp=None)


def damaged(kind: str, target: Path) -> Path:
    """The SVS with tile 65 (column 5, row 6 of 10 columns) damaged."""
    offset, count = tile_extent(SVS, 65)
    if kind == "byte count 0":
        return with_tile_entry(SVS, target, 65, tag=Tag.TILE_BYTES, value=0)
    if kind == "byte count 4 GiB":
        return with_tile_entry(SVS, target, 65, tag=Tag.TILE_BYTES, value=0xFFFFFFF0)
    if kind == "zeroed":
        return with_bytes(SVS, target, offset, bytes(count))
    if kind == "end missing":
        return with_tile_entry(SVS, target, 65, tag=Tag.TILE_BYTES, value=count // 2)
    assert kind == "another tile's size"
    size = SVS.read_bytes().index(struct.pack(">HH", 240, 240), offset)
    return with_bytes(SVS, target, size, struct.pack(">HH", 232, 240))


@pytest.mark.parametrize("kind", ["byte count 0", "byte count 4 GiB", "zeroed", "end missing", "another tile's size"])
def test_a_damaged_tile_is_named_and_the_others_are_read(tmp_path: Path, kind: str) -> None:
    path, whole = damaged(kind, tmp_path / "slide.svs"), read_all(SVS)
    offset, _ = tile_extent(SVS, 65)
    with open_tiled(path, mpp=None) as slide:
        named = rf"slide\.svs: level 0, tile column 5, row 6 \(\d+ bytes at offset {offset}\)"
        with pytest.raises(TileReadError, match=named):
            slide.read(Region(5 * 240 + 239, 6 * 240 + 239, 100, 100, slide.mpp))
        beside = slide.read(Region(6 * 240, 6 * 240, 480, 480, slide.mpp))
        np.testing.assert_array_equal(beside, whole[1440:1920, 1440:1920])


def test_bit_rot_fails_at_least_where_openslide_fails(tmp_path: Path) -> None:
    """Direct decode also hears the warnings that come with the end of an image, for which OpenSlide does not wait.

    Rot that decodes without any warning goes unseen by both: no decoder can tell it from an image.
    """
    ours_failed, theirs_failed = set(), set()
    region = Region(4 * 240, 4 * 240, 240, 240, 0.499)
    for seed in range(20):
        path = with_bit_rot(SVS, tmp_path / "rot.svs", tile=44, seed=seed)
        try:
            theirs = openslide_pixels(path, region.l0_x, region.l0_y, 240, 240)
        except openslide.OpenSlideError:
            theirs_failed.add(seed)
        with open_tiled(path, mpp=None) as slide:
            try:
                ours = slide.read(region)
            except TileReadError:
                ours_failed.add(seed)
            else:
                np.testing.assert_array_equal(ours, theirs)
    assert theirs_failed < ours_failed
    assert len(ours_failed) >= 15


@pytest.mark.parametrize("part", [0.1, 0.5])
@pytest.mark.parametrize("path", [SVS, PYRAMID], ids=lambda path: path.name)
def test_a_file_cut_short_is_refused(tmp_path: Path, path: Path, part: float) -> None:
    cut = tmp_path / path.name
    cut.write_bytes(path.read_bytes()[: int(os.path.getsize(path) * part)])
    with pytest.raises(SlideError, match="cut short"):
        open_tiled(cut, mpp=None)


def test_a_cut_behind_all_levels_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cut = tmp_path / "slide.svs"
    cut.write_bytes(SVS.read_bytes()[: int(os.path.getsize(SVS) * 0.9)])
    np.testing.assert_array_equal(read_all(cut), read_all(SVS))
    assert "cut short" in caplog.text


def test_a_closed_slide_says_so() -> None:
    slide = open_tiled(SVS, mpp=None)
    slide.close()
    slide.close()
    with pytest.raises(SlideError, match="closed"):
        slide.read(Region(0, 0, 10, 10, slide.mpp))


def qptiff(path: Path, pages: list[np.ndarray], **options: Any) -> Path:
    """Pages as Akoya's scanners write them: full resolution, thumbnail, reduced resolutions, label."""
    about = "<PerkinElmer-QPI-ImageDescription><ImageType>{}</ImageType></PerkinElmer-QPI-ImageDescription>"
    thumbnail = tissue()[::8, ::8]
    with tifffile.TiffWriter(path, bigtiff=True) as file:
        for i, pixels in enumerate(pages):
            kind = "ReducedResolution" if options.get("reduced") and i else "FullResolution"
            file.write(
                pixels, tile=(128, 128), description=about.format(kind), metadata=None, software="PerkinElmer-QPI",
                photometric="rgb" if pixels.ndim == 3 else "minisblack", **RESOLUTION,
                **({"subfiletype": 1} if kind == "ReducedResolution" else {}),
            )  # fmt: skip
            if i == 0:
                file.write(thumbnail, description=about.format("Thumbnail"), metadata=None, photometric="rgb")
        file.write(thumbnail[:, :40], description=about.format("Label"), metadata=None, photometric="rgb")
    return path


def test_a_brightfield_qptiff_is_read(tmp_path: Path) -> None:
    pixels = tissue()
    path = qptiff(tmp_path / "a.qptiff", [pixels, pixels[::2, ::2]], reduced=True)
    with open_tiled(path, mpp=None) as slide:
        assert [(level.width, level.height) for level in slide.levels] == [
            (pixels.shape[1], pixels.shape[0]),
            (pixels[::2, ::2].shape[1], pixels[::2, ::2].shape[0]),
        ]
    np.testing.assert_array_equal(read_all(path), pixels)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_fluorescence_qptiff_is_refused_by_name(tmp_path: Path, dtype: Any) -> None:
    channels = [tissue()[..., i].astype(dtype) for i in range(3)]
    with pytest.raises(SlideError, match="3 pages of 600 x 500 px hold one channel"):
        open_slide(qptiff(tmp_path / "a.qptiff", channels))
