"""Pictures as slides: modes, limits and damage."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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


def read_all(path: Path) -> np.ndarray:
    with open_slide(path, mpp=0.5) as slide:
        assert slide.backend == "image"
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, 0.5))


@pytest.mark.parametrize("suffix", [".png", ".tif", ".bmp"])
def test_lossless_pictures(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(PIXELS).save(tmp_path / f"a{suffix}")
    np.testing.assert_array_equal(read_all(tmp_path / f"a{suffix}"), PIXELS)


def test_jpeg(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.jpg")
    np.testing.assert_array_equal(read_all(tmp_path / "a.jpg"), np.asarray(Image.open(tmp_path / "a.jpg")))


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_jpeg_of_other_colours(tmp_path: Path, mode: str) -> None:
    Image.fromarray(PIXELS).convert(mode).save(tmp_path / "a.jpg")
    np.testing.assert_array_equal(read_all(tmp_path / "a.jpg"), Image.open(tmp_path / "a.jpg").convert("RGB"))


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("at", ["half", "end"])
def test_a_damaged_jpeg_is_refused(tmp_path: Path, mode: str, at: str) -> None:
    """Pillow reads both, grey where the data are damaged."""
    Image.fromarray(PIXELS).convert(mode).save(tmp_path / "a.jpg")
    data = bytearray((tmp_path / "a.jpg").read_bytes())
    middle = len(data) - (len(data) - data.index(b"\xff\xda")) // 2
    data = data[:middle] + b"\xff\xd9" if at == "half" else data[:-2]
    (tmp_path / "a.jpg").write_bytes(data)
    with pytest.raises(TileReadError, match="damaged or cut short"):
        read_all(tmp_path / "a.jpg")


def test_grey_and_palette(tmp_path: Path) -> None:
    Image.fromarray(PIXELS[..., 0]).save(tmp_path / "grey.png")
    np.testing.assert_array_equal(read_all(tmp_path / "grey.png"), np.stack([PIXELS[..., 0]] * 3, axis=-1))
    palette = Image.fromarray(PIXELS).quantize(16)
    palette.save(tmp_path / "palette.png")
    np.testing.assert_array_equal(read_all(tmp_path / "palette.png"), np.asarray(palette.convert("RGB")))


def test_transparent_pixels_are_blended_onto_white(tmp_path: Path) -> None:
    alpha = np.full((40, 60, 1), 255, np.uint8)
    alpha[:10], alpha[10:20] = 0, 128
    Image.fromarray(np.concatenate([PIXELS, alpha], axis=2)).save(tmp_path / "a.png")
    share = alpha / 255
    np.testing.assert_allclose(read_all(tmp_path / "a.png"), PIXELS * share + 255 * (1 - share), atol=1)


def test_sixteen_bits_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.arange(2400, dtype=np.uint16).reshape(40, 60)).save(tmp_path / "a.png")
    with pytest.raises(SlideError, match="8 bits per channel"):
        read_all(tmp_path / "a.png")


def test_the_mpp_must_be_given(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png", dpi=(25_400, 25_400))
    with pytest.raises(SlideError, match=r"does not record its um/px.*--slide-mpp"):
        open_slide(tmp_path / "a.png")


def test_the_size_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    monkeypatch.setattr(image_backend, "LIMIT_PIXELS", 40 * 60 - 1)
    with pytest.raises(SlideError, match=r"at most 2,399 px; it has 60 x 40 px; convert it to a tiled pyramid"):
        open_slide(tmp_path / "a.png", mpp=0.5)


def test_a_picture_that_claims_to_be_huge_is_refused_undecoded(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.bmp")
    data = bytearray((tmp_path / "a.bmp").read_bytes())
    data[18:26] = (100_000).to_bytes(4, "little") * 2
    (tmp_path / "a.bmp").write_bytes(data)
    with pytest.raises(SlideError, match="must have at most 80,000,000 px"):
        open_slide(tmp_path / "a.bmp", mpp=0.5)


EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 60 40\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_program_is_started_for_a_file_that_is_called_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ghostscript = tmp_path / "bin" / "gs"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {tmp_path / 'started'}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", str(ghostscript.parent), prepend=":")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for anew
    (tmp_path / "a.png").write_bytes(EPS)
    with pytest.raises(SlideError), open_slide(tmp_path / "a.png", mpp=0.5, backend="image") as slide:
        slide.read(Region(0, 0, 10, 10, 0.5))
    assert not (tmp_path / "started").exists()


@pytest.mark.parametrize("suffix", ["gif", "webp", "ppm", "tga", "ico"])
def test_other_formats_of_pillow_are_not_asked(tmp_path: Path, suffix: str) -> None:
    Image.fromarray(PIXELS).save(tmp_path / f"a.{suffix}")
    (tmp_path / f"a.{suffix}").rename(tmp_path / "a.png")
    with pytest.raises(SlideError, match="not a picture of a known format"):
        open_slide(tmp_path / "a.png", mpp=0.5)


@pytest.mark.parametrize(
    ("pixels", "options", "said"),
    [
        (PIXELS.view(np.int8), {"photometric": "rgb"}, "page 0 has signed samples"),
        (PIXELS[..., 0].view(np.int8), {}, "page 0 has signed samples"),
        (PIXELS.astype(np.uint16), {"photometric": "rgb"}, "unsigned samples of 16 bits"),
        (PIXELS[..., 0].astype(np.float32), {}, "floating-point samples"),
        (np.moveaxis(PIXELS, 2, 0), {"photometric": "minisblack"}, "3 pages of 60 x 40 px hold one channel"),
    ],
    ids=["int8 rgb", "int8 grey", "uint16", "float", "planes"],
)
@pytest.mark.parametrize("tile", [None, (16, 16)])
def test_a_tiff_of_other_pixels_is_refused_by_name(
    tmp_path: Path, pixels: np.ndarray, options: dict[str, Any], said: str, tile: tuple[int, int] | None
) -> None:
    tifffile.imwrite(tmp_path / "a.tif", pixels, tile=tile, **options)
    with pytest.raises(SlideError, match=said):
        open_slide(tmp_path / "a.tif", mpp=0.5)


@pytest.mark.parametrize("rows", [8, 16, 64])
@pytest.mark.parametrize("compression", [None, "lzw", "deflate", "zstd", "jpeg", "jpeg grey"])
def test_strips_are_decoded_as_tiles_are(tmp_path: Path, compression: str | None, rows: int) -> None:
    kind, _, is_grey = (compression or "").partition(" ")
    pixels = PIXELS[..., 0] if is_grey else PIXELS
    path = tmp_path / "a.tif"
    options: dict[str, Any] = {"photometric": "minisblack" if is_grey else "rgb", "compression": kind or None}
    tifffile.imwrite(path, pixels, rowsperstrip=rows, metadata=None, **options)
    expected = np.asarray(Image.open(path).convert("RGB"))
    np.testing.assert_array_equal(read_all(path), expected)
    with tifffile.TiffFile(path) as tiff:
        offset, count = tiff.pages[0].dataoffsets[0], tiff.pages[0].databytecounts[0]
    data = bytearray(path.read_bytes())
    data[offset + count - 8 : offset + count] = bytes(8)  # the end of the first strip
    path.write_bytes(data)
    if kind in ("deflate", "jpeg"):  # of the others only the length is known
        with pytest.raises(TileReadError, match="damaged"):
            read_all(path)


def test_a_last_strip_that_is_filled_up(tmp_path: Path) -> None:
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, np.concatenate([PIXELS, PIXELS[:8]]), photometric="rgb", rowsperstrip=16, metadata=None)
    data = path.read_bytes()
    with tifffile.TiffFile(path) as tiff:
        tag = tiff.pages[0].tags["ImageLength"]
        data = data[: tag.valueoffset] + (40).to_bytes(2, "little") + data[tag.valueoffset + 2 :]
    path.write_bytes(data)
    np.testing.assert_array_equal(read_all(path), PIXELS)


def test_a_picture_cut_short_fails_when_read(tmp_path: Path) -> None:
    Image.fromarray(PIXELS).save(tmp_path / "a.png")
    data = (tmp_path / "a.png").read_bytes()
    (tmp_path / "a.png").write_bytes(data[: len(data) // 2])
    with open_slide(tmp_path / "a.png", mpp=0.5) as slide, pytest.raises(TileReadError, match="cannot be decoded"):
        slide.read(Region(0, 0, 10, 10, 0.5))


def test_the_shipped_nuclei_open_and_have_masks_of_their_size() -> None:
    images = sorted((NUCLEI / "images").glob("*.png"))
    assert len(images) == 28
    for path in images:
        mask = np.asarray(Image.open(NUCLEI / "masks" / path.name))
        assert mask.shape == read_all(path).shape[:2]
        assert set(np.unique(mask)) == {0, 255}
