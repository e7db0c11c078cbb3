"""Every format that the documents promise is opened, by the backend that they name; others are refused by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
import zarr.codecs

from benchmarks.formats.references import openslide_level, own_library
from pipelines.backends.registry import open_slide
from pipelines.catalog.catalog import find_slides
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from tests.helpers.format_files import tissue, write_read_ones, write_refused_ones

BACKENDS = {
    "bounds": "openslide",
    "brightfield": "tiled",
    "deflate-bigtiff": "tiled",
    "dicom-jpeg": "openslide",
    "dicom-jpeg2000": "openslide",
    "dicom-jpeg2000-lossless": "openslide",
    "dicom-raw": "openslide",
    "jpeg2000-33003": "openslide",
    "jpeg2000-33005": "tiled",
    "lzw": "tiled",
    "ome-0.4": "zarr",
    "ome-0.5": "zarr",
    "uncompressed": "tiled",
    "zstd": "tiled",
}
LOSSLESS = {"brightfield", "deflate-bigtiff", "dicom-jpeg2000-lossless", "dicom-raw", "lzw", "uncompressed", "zstd"}
OFF_BY_ROUNDING = {"dicom-jpeg", "dicom-jpeg2000"}
"""pydicom has another conversion from YCbCr than libjpeg-turbo, and another build of the inexact wavelet."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    write_read_ones(folder)
    return folder


def test_each_format_is_one_slide_with_its_backend(folder: Path) -> None:
    opened, sides = {}, {False: (1, 1 / 2, 1 / 4), True: (2, 1, 1 / 2)}
    for spec in find_slides(folder):
        with spec.open() as slide:
            opened[spec.slide_id] = slide.backend
            sizes = [(level.width, level.height) for level in slide.levels]
            assert sizes == [(side * 384, side * 256) for side in sides[spec.slide_id == "bounds"]]
    assert opened == BACKENDS


@pytest.mark.parametrize("slide_id", BACKENDS)
def test_pixels_are_those_of_openslide_and_of_the_formats_own_library(folder: Path, slide_id: str) -> None:
    spec = next(spec for spec in find_slides(folder) if spec.slide_id == slide_id)
    written = tissue()
    held_against = set()
    with spec.open() as slide:
        for level in slide.levels[::2]:
            pixels = slide.read(Region(0, 0, level.width, level.height, level.mpp)).astype(np.int16)
            if slide_id in LOSSLESS:
                np.testing.assert_array_equal(pixels, written[level.index])
            openslide = openslide_level(spec.path, level)
            if openslide is not None:
                held_against.add("openslide")
                np.testing.assert_array_equal(pixels, openslide)
            own = own_library(spec.path, level)
            if own is not None:
                held_against.add(own[0])
                assert np.abs(pixels - own[1]).max() <= (slide_id in OFF_BY_ROUNDING)
    assert held_against, "neither OpenSlide nor the format's own library reads it"


@pytest.mark.parametrize(
    "options",
    [
        *(
            {"zarr_format": 2, "compressors": kind()}
            for kind in (numcodecs.Blosc, numcodecs.BZ2, numcodecs.GZip, numcodecs.LZ4, numcodecs.LZMA)
        ),
        {"zarr_format": 2, "compressors": numcodecs.Zlib()},
        {"zarr_format": 2, "compressors": None},
        {"zarr_format": 3, "compressors": zarr.codecs.BloscCodec()},
        {"zarr_format": 3, "compressors": zarr.codecs.GzipCodec()},
        {"zarr_format": 3, "compressors": zarr.codecs.ZstdCodec(), "shards": (128, 128, 3)},
        {"zarr_format": 3, "compressors": None},
    ],
    ids=lambda options: f"v{options['zarr_format']}-{type(options['compressors']).__name__}",
)
def test_compressions_of_zarr(tmp_path: Path, options: dict[str, Any]) -> None:
    pixels = tissue()[2]
    zarr.create_array(tmp_path / "a.zarr", data=pixels, chunks=(64, 64, 3), **options)
    with open_slide(tmp_path / "a.zarr", mpp=0.5) as slide:
        got = slide.read(Region(0, 0, pixels.shape[1], pixels.shape[0], 0.5))
    np.testing.assert_array_equal(got, pixels)


def test_16_bits_and_channels_are_refused_by_name(tmp_path: Path) -> None:
    write_refused_ones(tmp_path)
    said = {}
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(SlideError) as error:
            open_slide(path)
        said[path.name] = str(error.value)
        assert str(path) in said[path.name]
        assert "8-bit RGB" in said[path.name]
    for name, reason in {
        "rgb-16-bit.tif": "unsigned samples of 16 bits",
        "grey-16-bit.tif": "unsigned samples of 16 bits",
        "rgb-float.tif": "floating-point samples of 32 bits",
        "fluorescence.qptiff": "3 pages of 384 x 256 px hold one channel",
        "fluorescence.ome.tif": "3 pages of 384 x 256 px hold one channel",
        "rgb-16-bit.ome.zarr": "array 0 is <u2 with 3 channels",
        "five-channels.ome.zarr": "with 5 channels",
    }.items():
        assert reason in said.pop(name)
    assert not said
