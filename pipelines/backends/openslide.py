"""Slides through OpenSlide: every vendor format that it knows and that is not decoded directly.

Takes a path, gives a ``Slide``. OpenSlide (Goode et al., OpenSlide: a vendor-neutral software foundation for digital
pathology, 2013) renders premultiplied ARGB; here that goes in bands onto white, straight into the caller's array.
Damage is caught before OpenSlide sees it: a tile of byte count 0 would read black, one of 4 GiB abort the process.
"""

from __future__ import annotations

import ctypes
import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray
from openslide import OpenSlide, OpenSlideError, OpenSlideUnsupportedFormatError, lowlevel

from pipelines.backends.dicom_elements import is_dicom
from pipelines.backends.dicom_head import refuse_series
from pipelines.backends.level_reader import Recorded, bands, level0_mpp, pad, scratch
from pipelines.backends.tiff_levels import choose_image, recorded_mpp
from pipelines.backends.tiff_page import MAX_SIDE
from pipelines.backends.tiff_tags import check_tiff, read_tiff
from pipelines.slides.geometry import Bounds, Level, l0_from_l
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import NotThisFormat, Pixels, SlideError, TileReadError

log = logging.getLogger(__name__)

BAND_BYTES = 8 << 20
"""ARGB pixels held at once per thread: the second copy of a 16,384 px tile would be 1 GiB."""

COMPOSED = ("mirax", "trestle", "ventana")
"""Vendors whose tiles overlap, at places between px: OpenSlide draws every level of them, the finest too."""


class OpenSlideReader:
    """A ``LevelReader`` over an OpenSlide handle that is replaced when it fails.

    OpenSlide's errors latch: after one bad tile every later call on the handle fails, also in the other threads that
    are reading good tiles. So a failed read is tried once more on a handle of its own; what fails there is damaged.

    Regions are given to OpenSlide in level-0 px. Where a level's downsample is no whole number it therefore draws up to
    1 / (2 downsample) px off the level's own grid, and blends neighbours; levels that divide evenly are exact.
    """

    name = "openslide"

    def __init__(self, path: Path, slide: OpenSlide) -> None:
        self._path = path
        self._lock = threading.Lock()
        self._slide: OpenSlide | None = slide
        self._sizes = slide.level_dimensions
        self._downsamples = slide.level_downsamples
        self._tile_rows = [
            int(slide.properties.get(f"openslide.level[{i}].tile-height", 0)) for i in range(slide.level_count)
        ]

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        inside = pad(out, l_x, l_y, *self._sizes[level])
        if inside is None:
            return
        with self._lock:
            slide = self._slide
        if slide is not None:
            try:
                self._draw(slide, level, *inside)
                return
            except OpenSlideError:
                log.debug("%s: handle failed at level %d (%d, %d); reopened", self._path, level, l_x, l_y)
        fresh = _open(self._path)
        try:
            self._draw(fresh, level, *inside)
        except OpenSlideError as error:
            fresh.close()
            with self._lock:
                if self._slide is slide:
                    self._slide = None  # the next read opens another; threads inside this one still hold it
            height, width = inside.out.shape[:2]
            with self._path.open("rb") as file:
                file.read(1)  # fails where the disk or share does, of which OpenSlide's error does not tell
            raise TileReadError(
                f"{self._path}: pixels cannot be read at level {level}, x {inside.l_x}, y {inside.l_y}, "
                f"{width} x {height} px: {error}; the file is damaged there"
            ) from error
        with self._lock:
            if self._slide is slide:
                self._slide = fresh

    def _draw(self, slide: OpenSlide, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        """Fill ``out``, which lies inside the level."""
        rows, columns = out.shape[:2]
        downsample, tile_rows = self._downsamples[level], self._tile_rows[level] or 1
        for start, stop in bands(l_y, rows, tile_rows, BAND_BYTES // (columns * 4)):
            argb = scratch((stop - start) * columns * 4).view(np.uint32).reshape(stop - start, columns)
            # Private, hence the bound on openslide-python's version: the public reader makes a PIL image of twice the
            # size, un-premultiplied, and takes 1.6 times as long.
            lowlevel._read_region(
                slide._osr,
                argb.ctypes.data_as(ctypes.POINTER(ctypes.c_uint32)),
                l0_from_l(l_x, downsample),
                l0_from_l(l_y + start, downsample),
                level,
                columns,
                stop - start,
            )
            _rgb_on_white(argb, out[start:stop])

    def close(self) -> None:
        with self._lock:
            slide, self._slide = self._slide, None
        if slide is not None:
            slide.close()


def _rgb_on_white(argb: NDArray[np.uint32], out: Pixels) -> None:
    """Premultiplied ARGB over white: ``c + (255 - alpha)``, exact in 8 bits because c <= alpha."""
    bgra = argb.view(np.uint8).reshape(*argb.shape, 4)
    opaque = int(np.bitwise_and.reduce(argb, axis=None)) >> 24 == 255
    white = None if opaque else 255 - bgra[..., 3:]
    cv2.cvtColor(bgra, cv2.COLOR_BGRA2RGB, dst=out)
    if white is not None:
        out += white


def open_openslide(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open a slide through OpenSlide.

    Raises:
        NotThisFormat: OpenSlide does not know the format, or takes another image of a TIFF file for the slide.
        SlideError: the file is damaged, of DICOM files one of its series is, or does not hold one RGB image; or the mpp
            is missing or implausible and ``mpp`` is not given.
    """
    if faults := check_tiff(path):
        raise SlideError(f"{path}: damaged TIFF, not handed to OpenSlide: {'; '.join(faults)}")
    if is_dicom(path):
        refuse_series(path)
    slide = _open(path)
    try:
        properties = slide.properties
        recorded: tuple[Recorded, Recorded] = (_number(properties, "mpp-x"), _number(properties, "mpp-y"))
        if properties.get("openslide.vendor") == "generic-tiff":
            image, _ = choose_image(read_tiff(path), scene)
            if image.page.index:
                raise NotThisFormat(f"{path}: OpenSlide reads the first image; the slide is page {image.page.index}")
            recorded = recorded_mpp(image)  # OpenSlide takes any unit for an inch
        l0_mpp = level0_mpp(path, *recorded, mpp)
        if max(max(size) for size in slide.level_dimensions) > MAX_SIDE:
            raise SlideError(f"{path}: levels of {slide.level_dimensions} px; a side has at most {MAX_SIDE} px")
        levels = tuple(
            Level(i, width, height, downsample, l0_mpp * downsample)
            for i, ((width, height), downsample) in enumerate(
                zip(slide.level_dimensions, slide.level_downsamples, strict=True)
            )
        )
        box = [_number(properties, f"bounds-{name}") for name in ("x", "y", "width", "height")]
        sides = [int(number) for number in box if number is not None and math.isfinite(number)]
        bounds = Bounds(*sides) if len(sides) == len(box) else None
        if bounds is not None and min(bounds.width, bounds.height) < 1:
            raise SlideError(
                f"{path}: the slide has no scanned area: the file records one of {bounds.width} x {bounds.height} px; "
                "its data are missing or damaged, copy the slide again"
            )
        composed = properties.get("openslide.vendor") in COMPOSED
        drawn = frozenset(level.index for level in levels if composed or not level.downsample.is_integer())
        return PyramidSlide(path, OpenSlideReader(path, slide), levels, bounds, drawn)
    except BaseException:
        slide.close()
        raise


def _open(path: Path) -> OpenSlide:
    try:
        return OpenSlide(path)
    except OpenSlideUnsupportedFormatError:
        raise NotThisFormat(f"{path}: OpenSlide does not know the format") from None
    except OpenSlideError as error:
        raise SlideError(f"{path}: OpenSlide knows the format and cannot open the file: {error}") from error


def _number(properties: Mapping[str, str], name: str) -> float | None:
    try:
        return float(properties[f"openslide.{name}"])
    except (KeyError, ValueError):
        return None
