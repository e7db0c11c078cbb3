"""A picture as a slide of one level: PNG, JPEG, BMP, or a TIFF that is not tiled.

Takes the picture and its mpp, which only TIFF files record in a way to trust (JPEG and PNG carry a print resolution).
Gives a ``Slide``. The picture is decoded whole on the first read and kept, hence the limit on its size. JPEG files and
TIFF strips are decoded as TIFF tiles are, which fails on damage that Pillow fills with grey.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

import numpy as np
import simplejpeg
from PIL import Image, UnidentifiedImageError

from pipelines.backends.codecs import JpegTiles, decode, decoder
from pipelines.backends.level_reader import MemoryReader, level0_mpp
from pipelines.backends.tiff_levels import TiffImage, choose_image, recorded_mpp, refuse_samples
from pipelines.backends.tiff_page import Page, Tag
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.backends.tiled import is_ycbcr
from pipelines.slides.geometry import levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import PADDING, NotThisFormat, Pixels, SlideError, TileReadError, is_disk_error

FORMATS = ("PNG", "JPEG", "BMP", "TIFF")
"""No other reader of Pillow is asked: some start programs (Ghostscript for EPS), whatever the file is called."""

JPEG_FORMATS = ("JPEG", "MPO")
"""MPO is a JPEG with further pictures behind the first, as cameras write it."""

LIMIT_PIXELS = 80_000_000
"""8,000 x 10,000 px, 240 MB decoded, just below what Pillow itself warns of. Larger ones belong in a tiled file."""


class ImageReader:
    """A ``LevelReader`` over one picture, decoded when first read."""

    name = "image"

    def __init__(self, path: Path, page: Page | None) -> None:
        self._path, self._page = path, page
        self._lock = threading.Lock()
        self._pixels: MemoryReader | None = None
        self._fault = ""

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        with self._lock:
            if self._fault:  # it takes as long to fail as to succeed, and regions are many
                raise TileReadError(self._fault)
            if self._pixels is None:
                try:
                    self._pixels = MemoryReader([_decode(self._path, self._page)])
                except TileReadError as fault:
                    self._fault = str(fault)
                    raise
            pixels = self._pixels
        pixels.read_level(level, l_x, l_y, out)

    def close(self) -> None:
        self._pixels = None


def open_image(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open a picture as a slide of one level.

    Raises:
        NotThisFormat: not a picture of one of ``FORMATS``.
        SlideError: larger than ``LIMIT_PIXELS``, a TIFF of several 8-bit pictures of similar size without ``scene``,
            or without a plausible mpp.
    """
    tiff_image: TiffImage | None = None
    with contextlib.suppress(NotThisFormat):  # no TIFF
        tiff_image = _tiff_image(path, scene)
    page = None if tiff_image is None else tiff_image.page
    try:
        with Image.open(path, formats=FORMATS) as picture:
            picture.seek(page.index if page else 0)
            width, height = picture.size
    except UnidentifiedImageError:
        raise NotThisFormat(f"{path}: not a picture of a known format ({', '.join(FORMATS)})") from None
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise _too_large(path, str(error)) from None
    except Exception as error:  # Pillow's readers raise whatever their parsers stumble over
        raise NotThisFormat(f"{path}: not a readable picture ({error})") from error
    if width * height > LIMIT_PIXELS:
        raise _too_large(path, f"it has {width} x {height} px")
    recorded = (None, None) if tiff_image is None else recorded_mpp(tiff_image)
    levels = levels_from_sizes([(width, height)], level0_mpp(path, *recorded, mpp))
    return PyramidSlide(path, ImageReader(path, page), levels)


def _tiff_image(path: Path, scene: int | None) -> TiffImage:
    """The image of a TIFF that is the slide. Others would ask too much memory, or be read as something else."""
    tiff = read_tiff(path)
    image, _ = choose_image(tiff, scene)
    refuse_samples(tiff, image.page)
    if faults := check_tiff(path):
        raise SlideError(f"{path}: damaged TIFF: {'; '.join(faults)}")
    orientation = image.page.number(Tag.ORIENTATION, 1)
    if orientation != 1:  # Pillow turns the picture, _decode_strips does not
        raise SlideError(f"{path}: the picture is turned or mirrored (Orientation {orientation}); save it upright")
    return image


def _too_large(path: Path, what: str) -> SlideError:
    return SlideError(
        f"{path}: a picture read as a slide is decoded whole and must have at most {LIMIT_PIXELS:,} px; {what}; "
        "convert it to a tiled pyramid (for example with `vips tiffsave --tile --pyramid`)"
    )


def _decode(path: Path, page: Page | None) -> Pixels:
    """All pixels of a page, transparent ones blended onto white."""
    try:
        if page is not None and (strips := _decode_strips(path, page)) is not None:
            return strips
        with Image.open(path, formats=FORMATS) as file:
            file.seek(page.index if page else 0)
            picture: Image.Image = file
            stored = str(file.tile[0][3]) if file.tile else ""  # Pillow reads RGB of 16 bits as of 8
            if picture.mode.startswith(("I", "F")) or ";16B" in stored:
                raise TileReadError(
                    f"{path}: a slide has 8 bits per channel; this picture has more (mode {picture.mode!r})"
                )
            if picture.format in JPEG_FORMATS:
                return _decode_jpeg(path, picture)
            if picture.has_transparency_data:
                ground = Image.new("RGBA", picture.size, (PADDING, PADDING, PADDING, 255))
                picture = Image.alpha_composite(ground, picture.convert("RGBA"))
            return np.asarray(picture.convert("RGB"))
    except SlideError:
        raise
    except Exception as error:  # as in open_image
        if is_disk_error(error):
            raise
        raise TileReadError(f"{path}: the picture cannot be decoded ({error}); it is damaged or cut short") from error


def _decode_strips(path: Path, page: Page) -> Pixels | None:
    """All pixels of a TIFF page in strips; None if only Pillow can decode them."""
    decode_strip = decoder(page)
    if page.is_tiled or isinstance(decode_strip, str):
        return None
    if isinstance(decode_strip, JpegTiles):
        decode_strip = JpegTiles(page.blob(Tag.JPEG_TABLES), ycbcr=is_ycbcr(path, page))
    pixels = np.empty((page.height, page.width, 3), np.uint8)
    rows = max(1, min(page.height, page.number(Tag.ROWS_PER_STRIP, page.height)))
    tops = range(0, page.height, rows)
    offsets, byte_counts = page.array(Tag.STRIP_OFFSETS), page.array(Tag.STRIP_BYTES)
    with path.open("rb") as file:
        for top, offset, count in zip(tops, offsets[: len(tops)], byte_counts[: len(tops)], strict=True):
            strip = pixels[top : top + rows]
            if offset == count == 0:  # never written
                strip[...] = PADDING
                continue
            if offset < 0 or count < 0:
                raise ValueError("the file holds no data for it")
            if count > 2 * rows * page.width * 3 + 65536:
                raise ValueError(f"{count} bytes cannot be one strip of {rows} x {page.width} px")
            data = os.pread(file.fileno(), int(count), int(offset))
            try:
                decode_strip(data, strip)
            except ValueError:
                if len(strip) == rows:
                    raise
                padded = np.empty((rows, page.width, 3), np.uint8)  # some writers fill up the last strip
                decode_strip(data, padded)
                strip[...] = padded[: len(strip)]
    return pixels


def _decode_jpeg(path: Path, picture: Image.Image) -> Pixels:
    """All pixels of a JPEG. Pillow fills damaged parts with grey; the decoder of TIFF tiles refuses them."""
    if path.stat().st_size > 4 * LIMIT_PIXELS:
        raise TileReadError(f"{path}: a JPEG file of {path.stat().st_size:,} bytes; {4 * LIMIT_PIXELS:,} are read")
    data = path.read_bytes()
    if picture.mode == "CMYK":
        simplejpeg.decode_jpeg(data, "CMYK")
        return np.asarray(picture.convert("RGB"))
    pixels = np.empty((picture.height, picture.width, 3), np.uint8)
    decode(data, pixels)
    return pixels
