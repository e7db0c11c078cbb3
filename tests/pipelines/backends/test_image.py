"""Pictures as slides: modes, limits and damage."""

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from pipelines.backends import image as image_backend
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError, TileReadError
from tests.helpers.real import NUCLEI

PIXELS = np.random.default_rng(3).integers(0, 256, (40, 60, 3), np.uint8)
PICTURE = Image.fromarray(PIXELS)


def read_all(path):
    with open_slide(path, mpp=0.5) as slide:
        assert slide.backend == "image"
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, 0.5))


@pytest.mark.parametrize(
    ("name", "picture"),
    [
        *((name, PICTURE) for name in ("a.png", "a.tif", "a.bmp", "a.jpg")),
        *((name, PICTURE.convert(mode)) for name, mode in (("a.jpg", "L"), ("a.jpg", "CMYK"), ("a.png", "L"))),
        ("a.png", PICTURE.quantize(16)),
    ],
    ids=lambda value: getattr(value, "mode", value),
)
def test_pixels_are_those_of_pillow(tmp_path, name, picture):
    picture.save(tmp_path / name)
    np.testing.assert_array_equal(read_all(tmp_path / name), Image.open(tmp_path / name).convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("at", ["half", "end"])
def test_a_damaged_jpeg_is_refused(tmp_path, mode, at):
    """Pillow reads both, grey where the data are damaged."""
    PICTURE.convert(mode).save(tmp_path / "a.jpg")
    data = (tmp_path / "a.jpg").read_bytes()
    middle = len(data) - (len(data) - data.index(b"\xff\xda")) // 2
    (tmp_path / "a.jpg").write_bytes(data[:middle] + b"\xff\xd9" if at == "half" else data[:-2])
    with pytest.raises(TileReadError, match="damaged or cut short"):
        read_all(tmp_path / "a.jpg")


def test_a_picture_cut_short_fails_when_read(tmp_path):
    PICTURE.save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    with open_slide(tmp_path / "a.png", mpp=0.5) as slide, pytest.raises(TileReadError, match="cannot be decoded"):
        slide.read(Region(0, 0, 10, 10, 0.5))


def test_transparent_pixels_are_blended_onto_white(tmp_path):
    alpha = np.full((40, 60, 1), 255, np.uint8)
    alpha[:10], alpha[10:20] = 0, 128
    Image.fromarray(np.concatenate([PIXELS, alpha], axis=2)).save(tmp_path / "a.png")
    share = alpha / 255
    np.testing.assert_allclose(read_all(tmp_path / "a.png"), PIXELS * share + 255 * (1 - share), atol=1)


def test_limits_are_named(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    PICTURE.save(path, dpi=(25_400, 25_400))
    with pytest.raises(SlideError, match=r"does not record its um/px.*--slide-mpp"):
        open_slide(path)
    PICTURE.save(tmp_path / "a.bmp")
    data = bytearray((tmp_path / "a.bmp").read_bytes())
    data[18:26] = (100_000).to_bytes(4, "little") * 2  # it claims to be huge, and is refused before it is decoded
    (tmp_path / "a.bmp").write_bytes(data)
    with pytest.raises(SlideError, match="at most 80,000,000 px"):
        open_slide(tmp_path / "a.bmp", mpp=0.5)
    monkeypatch.setattr(image_backend, "LIMIT_PIXELS", 40 * 60 - 1)
    with pytest.raises(SlideError, match=r"at most 2,399 px; it has 60 x 40 px; convert it to a tiled pyramid"):
        open_slide(path, mpp=0.5)


def test_no_program_is_started_for_a_file_that_is_called_a_picture(tmp_path, monkeypatch):
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for anew
    eps = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 40\n%%EndComments\nshowpage\n%%EOF\n"
    (tmp_path / "a.png").write_bytes(eps)
    with pytest.raises(SlideError), open_slide(tmp_path / "a.png", mpp=0.5, backend="image") as slide:
        slide.read(Region(0, 0, 10, 10, 0.5))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("suffix", ["gif", "webp", "ppm", "tga", "ico"])
def test_other_formats_of_pillow_are_not_asked(tmp_path, suffix):
    PICTURE.save(tmp_path / f"a.{suffix}")
    (tmp_path / f"a.{suffix}").rename(tmp_path / "a.png")
    with pytest.raises(SlideError, match="not a picture of a known format"):
        open_slide(tmp_path / "a.png", mpp=0.5)


@pytest.mark.parametrize(
    ("pixels", "options", "words"),
    [
        (PIXELS.view(np.int8), {"photometric": "rgb"}, "page 0 has signed samples"),
        (PIXELS[..., 0].view(np.int8), {}, "page 0 has signed samples"),
        (PIXELS.astype(np.uint16), {"photometric": "rgb"}, "unsigned samples of 16 bits"),
        (PIXELS[..., 0].astype(np.float32), {}, "floating-point samples"),
        (np.moveaxis(PIXELS, 2, 0), {"photometric": "minisblack"}, "3 pages of 60 x 40 px hold one channel"),
        (PIXELS, {"photometric": "minisblack", "planarconfig": "contig"}, "3 samples per px"),
        (PIXELS[..., :2], {"photometric": "minisblack", "planarconfig": "contig"}, "2 samples per px"),
        (PIXELS[..., [0, 1, 2, 0]], {"photometric": "rgb", "extrasamples": ["unspecified"]}, "4 samples per px"),
    ],
    ids=["int8 rgb", "int8 grey", "uint16", "float", "planes", "3 channels", "2 channels", "RGB and a channel"],
)
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_other_pixels_are_refused_by_name(tmp_path, pixels, options, words, tile):
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=tile, **options)
    with pytest.raises(SlideError, match=words):
        open_slide(tmp_path / "a.tif", mpp=0.5)


@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_a_tiff_with_an_alpha_channel_is_read(tmp_path, tile):
    opaque = np.dstack([PIXELS, np.full((40, 60), 255, np.uint8)])
    tifffile.imwrite(tmp_path / "a.tif", opaque, tile=tile, photometric="rgb", extrasamples=["unassalpha"])
    with open_slide(tmp_path / "a.tif", mpp=0.5) as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 60, 40, 0.5)), PIXELS)


@pytest.mark.parametrize("orientation", [2, 6])
def test_a_tiff_that_is_turned_or_mirrored_is_refused(tmp_path, orientation):
    PICTURE.save(tmp_path / "a.tif", tiffinfo={274: 1})
    np.testing.assert_array_equal(read_all(tmp_path / "a.tif"), PIXELS)
    PICTURE.save(tmp_path / "a.tif", tiffinfo={274: orientation})
    with pytest.raises(SlideError, match=rf"\(Orientation {orientation}\); save it upright"):
        open_slide(tmp_path / "a.tif", mpp=0.5)


@pytest.mark.parametrize("shape", [(40, 60), (40, 60, 3), (40, 60, 4)])
def test_a_png_of_sixteen_bits_is_refused(tmp_path, shape):
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.full(shape, 300, np.uint16)))
    with pytest.raises(SlideError, match="8 bits per channel"):
        read_all(tmp_path / "a.png")


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("compression", [None, "lzw", "deflate", "zstd", "jpeg", "jpeg grey"])
def test_strips_are_decoded_as_tiles_are(tmp_path, compression, rows):
    kind, _, is_grey = (compression or "").partition(" ")
    path, pixels = tmp_path / "a.tif", PIXELS[..., 0] if is_grey else PIXELS
    options = {"photometric": "minisblack" if is_grey else "rgb", "compression": kind or None}
    tifffile.imwrite(path, pixels, rowsperstrip=rows, metadata=None, **options)
    np.testing.assert_array_equal(read_all(path), np.asarray(Image.open(path).convert("RGB")))
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[0], tiff.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + count - 8 : offset + count] = bytes(8)  # the end of the first strip
    path.write_bytes(data)
    if kind in ("deflate", "jpeg"):  # of the others only the length is known
        with pytest.raises(TileReadError, match="damaged"):
            read_all(path)


def test_strips_of_ycbcr_under_an_rgb_tag_are_read(tmp_path):
    path, other = tmp_path / "a.tif", tmp_path / "b.tif"
    tifffile.imwrite(path, PIXELS, photometric="rgb", compression="jpeg", rowsperstrip=16, metadata=None)
    data = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        tag = tiff.pages[0].tags["PhotometricInterpretation"]
    assert tag.value == 6
    other.write_bytes(data[: tag.valueoffset] + (2).to_bytes(2, "little") + data[tag.valueoffset + 2 :])
    np.testing.assert_array_equal(read_all(other), read_all(path))


def test_a_last_strip_that_is_filled_up(tmp_path):
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.concatenate([PIXELS, PIXELS[:8]]), photometric="rgb", rowsperstrip=16, metadata=None)
    data = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        at = tiff.pages[0].tags["ImageLength"].valueoffset
    path.write_bytes(data[:at] + (40).to_bytes(2, "little") + data[at + 2 :])
    np.testing.assert_array_equal(read_all(path), PIXELS)


def test_the_shipped_nuclei_open_and_have_masks_of_their_size():
    images = sorted((NUCLEI / "images").glob("*.png"))
    assert len(images) == 28
    for path in images:
        mask = np.asarray(Image.open(NUCLEI / "masks" / path.name))
        assert mask.shape == read_all(path).shape[:2]
        assert set(np.unique(mask)) == {0, 255}
