"""Formats that the documents promise, by the backend that they name; compressions; files of other content."""

import numpy as np
import pytest
import tifffile
from PIL import Image

from benchmarks.formats.references import openslide_level, own_library
from pipelines.backends.registry import open_slide
from pipelines.backends.tiled import open_tiled
from pipelines.catalog.catalog import find_slides
from pipelines.slides.geometry import Region
from pipelines.slides.slide import NotThisFormat, SlideError
from tests.helpers.format_files import tissue, write_read_ones, write_refused_ones
from tests.helpers.openslide_pixels import openslide_pixels
from tests.helpers.real import SVS

NAMES = {
    "openslide": "bounds dicom-jpeg dicom-jpeg2000 dicom-jpeg2000-lossless dicom-raw jpeg2000-33003",
    "tiled": "brightfield deflate-bigtiff jpeg2000-33005 lzw uncompressed zstd",
    "zarr": "ome-0.4 ome-0.5",
}
BACKENDS = {name: backend for backend, names in NAMES.items() for name in names.split()}
LOSSLESS = {"brightfield", "deflate-bigtiff", "dicom-jpeg2000-lossless", "dicom-raw", "lzw", "uncompressed", "zstd"}
OFF_BY_ROUNDING = {"dicom-jpeg", "dicom-jpeg2000"}
"""pydicom has another conversion from YCbCr than libjpeg-turbo, and another build of the inexact wavelet."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("formats")
    write_read_ones(folder)
    return folder


@pytest.fixture(scope="module")
def refused_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("refused")
    write_refused_ones(folder)
    return folder


def test_each_format_is_one_slide_with_its_backend(folder):
    opened, sides = {}, {False: (1, 1 / 2, 1 / 4), True: (2, 1, 1 / 2)}
    for spec in find_slides(folder):
        with spec.open() as slide:
            opened[spec.slide_id] = slide.backend
            sizes = [(level.width, level.height) for level in slide.levels]
            assert sizes == [(side * 384, side * 256) for side in sides[spec.slide_id == "bounds"]]
    assert opened == BACKENDS


@pytest.mark.parametrize("slide_id", BACKENDS)
def test_pixels_are_those_of_openslide_and_of_the_formats_own_library(folder, slide_id):
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
    ("name", "reason"),
    [
        ("rgb-16-bit.tif", "unsigned samples of 16 bits"),
        ("grey-16-bit.tif", "unsigned samples of 16 bits"),
        ("rgb-float.tif", "floating-point samples of 32 bits"),
        ("fluorescence.qptiff", "3 pages of 384 x 256 px hold one channel"),
        ("fluorescence.ome.tif", "3 pages of 384 x 256 px hold one channel"),
        ("rgb-16-bit.ome.zarr", "array 0 is <u2 with 3 channels"),
        ("five-channels.ome.zarr", "with 5 channels"),
    ],
)
def test_16_bits_and_channels_are_refused_by_name(refused_folder, name, reason):
    with pytest.raises(SlideError, match=f"{refused_folder / name}.*{reason}") as error:
        open_slide(refused_folder / name)
    assert "8-bit RGB" in str(error.value)


PIXELS = np.random.default_rng(0).integers(0, 256, (256, 256, 3), np.uint8)


def write_as(path, kind):
    if kind == "strips":
        tifffile.imwrite(path, PIXELS, photometric="rgb", rowsperstrip=64)
    elif kind == "tiles":
        tifffile.imwrite(path, PIXELS, photometric="rgb", tile=(64, 64))
    elif kind == "DICOM":
        path.write_bytes(bytes(128) + b"DICM" + bytes(64))
    else:
        Image.fromarray(PIXELS).save(path, kind)
    return path


@pytest.mark.parametrize("backend", ["auto", "image"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((f"a.{suffix}", "JPEG") for suffix in ["svs", "ndpi", "scn", "bif", "svslide", "qptiff", "vms", "dcm"]),
        *((f"a.{suffix}", "PNG") for suffix in ["svs", "tif", "tiff", "btf", "SVS"]),
        ("a.svs", "BMP"),
        ("a.dcm", "tiles"),
        ("a.svslide", "tiles"),
        ("a.svs", "DICOM"),
        ("a.svs", "strips"),
        ("a.ndpi", "strips"),
    ],
)
def test_other_content_than_the_suffix_says(tmp_path, name, kind, backend):
    path = write_as(tmp_path / name, kind)
    with pytest.raises(SlideError, match=rf"{path}: named {path.suffix.lower()}"):
        open_slide(path, mpp=0.25, backend=backend)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "tiles", "strips"])
@pytest.mark.parametrize("has_empty_folder", [False, True])
def test_an_mrxs_file_without_its_data(tmp_path, kind, has_empty_folder):
    path = write_as(tmp_path / "case.mrxs", kind)
    if has_empty_folder:
        (tmp_path / "case").mkdir()
    with pytest.raises(SlideError, match=r"MRXS slide without .*case"):
        open_slide(path, mpp=0.25)


@pytest.mark.parametrize(
    ("name", "kind", "backend"),
    [
        ("a.png", "JPEG", "image"),
        ("a.jpg", "PNG", "image"),
        ("a.tif", "strips", "image"),
        ("a.svs", "tiles", "tiled"),
        ("a.ndpi", "tiles", "tiled"),
        ("noname", "JPEG", "image"),
    ],
)
def test_content_that_the_suffix_allows(tmp_path, name, kind, backend):
    with open_slide(write_as(tmp_path / name, kind), mpp=0.25) as slide:
        assert slide.backend == backend


RESOLUTION = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}


def svs_tissue():
    with open_tiled(SVS, mpp=None) as slide:
        return slide.read(Region(800, 900, 600, 500, slide.mpp))


def read_all(path):
    with open_tiled(path, mpp=None) as slide:
        level = slide.levels[0]
        return slide.read(Region(0, 0, level.width, level.height, slide.mpp))


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
def test_compressions_and_colours(tmp_path, options):
    path, pixels = tmp_path / "slide.tif", svs_tissue()
    tifffile.imwrite(path, pixels, tile=(128, 192), **{"photometric": "rgb"} | options, **RESOLUTION)
    ours = read_all(path)
    if options.get("compression") != "jpeg":
        np.testing.assert_array_equal(ours, tifffile.imread(path))
    if options.get("compression") not in ("lzw", 33005):  # OpenSlide's generic reader knows neither
        np.testing.assert_array_equal(ours, openslide_pixels(path, 0, 0, pixels.shape[1], pixels.shape[0]))


@pytest.mark.parametrize("options", [{}, {"compression": "deflate", "predictor": 2}, {"compression": "jpeg"}], ids=str)
def test_grey_slides_are_read_as_rgb(tmp_path, options):
    path, grey = tmp_path / "grey.tif", svs_tissue()[..., 1]
    tifffile.imwrite(path, grey, tile=(128, 128), photometric="minisblack", **options, **RESOLUTION)
    ours = read_all(path)
    np.testing.assert_array_equal(ours, np.repeat(tifffile.imread(path)[..., None], 3, axis=2))


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
def test_other_tiffs_are_left_to_other_backends(tmp_path, options, reason):
    pixels = svs_tissue()
    if options.get("planarconfig"):
        pixels = np.moveaxis(pixels, 2, 0)
    elif options["photometric"] == "miniswhite":
        pixels = pixels[..., 0]
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, pixels, **options, **RESOLUTION)
    with pytest.raises(NotThisFormat, match=reason):
        open_tiled(path, mpp=None)
