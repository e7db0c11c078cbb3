"""Hamamatsu NDPI read without a slide library, where the file says where its restart segments start.

Takes an NDPI file, whose levels are one huge JPEG stream each; gives a ``PyramidSlide`` whose level 0 is OpenSlide's,
byte for byte. The stream's restart markers cut it into segments of independent MCUs (ITU-T T.81, B.2.1), and private
tags list where each starts: a segment behind the stream's header, its size changed, is a small JPEG of its own.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

import numpy as np

from pipelines.backends.codecs import EOI, OtherJpeg, StreamHeader, decode
from pipelines.backends.level_reader import level0_mpp
from pipelines.backends.tiff_levels import resolution_mpp
from pipelines.backends.tiff_page import Page, Tag, table_fault
from pipelines.backends.tiff_tags import Tiff, read_tiff
from pipelines.backends.tiled import StoredTiles, TiledReader
from pipelines.slides.geometry import levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import NotThisFormat, Pixels, SlideError

_HEADER_BYTES: Final = 1 << 16
_RESTARTS: Final = tuple(bytes((0xFF, 0xD0 + i)) for i in range(8))
_WHOLE_PIXELS: Final = 1 << 24
"""A level without restart segments up to this size is decoded whole on each read; a larger one is left to OpenSlide."""


class RestartSegments:
    """Decoder of the restart segments of one level.

    Args:
        header: the level's stream up to its scan data, its size set to that of one segment.
    """

    def __init__(self, header: bytes) -> None:
        self._header = header

    def __call__(self, data: bytes, out: Pixels) -> None:
        """Decode one segment, the marker that ends it included, into ``out``: uint8 (MCU height, interval width, 3).

        Raises:
            ValueError: damaged, or not a restart segment.
        """
        if data[-2:] not in (*_RESTARTS, EOI):
            raise ValueError(f"no restart marker ends this segment but {data[-2:].hex(' ')}")
        decode(self._header + data[:-2] + EOI, out)


def open_ndpi(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open an NDPI file as a slide. Focal planes other than the central one, macro image and map are not levels.

    Args:
        path: the file.
        mpp: um/px of level 0, in place of what the file records; None: the file's.
        scene: not used: an NDPI file holds one slide.

    Raises:
        NotThisFormat: not NDPI, or without a list of restart segments; says why.
        SlideError: cut short or damaged, a level's stream or list of segments among it, or without a plausible mpp.
        ValueError: ``mpp`` is implausible.
        OSError: the file cannot be read.
    """
    tiff = read_tiff(path)
    if not tiff.is_ndpi:
        raise NotThisFormat(f"{path}: a TIFF file, but not Hamamatsu NDPI")
    pages = sorted((p for p in tiff.pages if _is_level(p)), key=lambda p: p.width, reverse=True)
    if not pages:
        raise NotThisFormat(f"{path}: no page of this NDPI file is a level of the slide")
    with path.open("rb") as file:
        grids = [_grid(tiff, page, file.fileno()) for page in pages]
    levels = levels_from_sizes([(g.width, g.height) for g in grids], level0_mpp(path, *resolution_mpp(pages[0]), mpp))
    return PyramidSlide(path, TiledReader(path, grids, name="ndpi"), levels)


def _is_level(page: Page) -> bool:
    return page.number(Tag.NDPI_LENS, -1) > 0 and page.number(Tag.NDPI_FOCUS, 0) == 0


def _grid(tiff: Tiff, page: Page, fd: int) -> StoredTiles:
    """Segments of a level as its tiles: one restart interval wide, one MCU high."""
    name = f"{tiff.path}: page {page.index} ({page.width} x {page.height} px)"
    fault = table_fault(page, tiff.size_bytes)
    if fault:
        raise SlideError(f"{tiff.path}: damaged NDPI: {fault}")
    if page.is_tiled or len(page.array(Tag.STRIP_OFFSETS)) != 1:
        raise NotThisFormat(f"{name}: a level of an NDPI file is one JPEG stream")
    start, stream_bytes = page.number(Tag.STRIP_OFFSETS, 0), page.number(Tag.STRIP_BYTES, 0)
    try:
        header = StreamHeader.parse(os.pread(fd, min(stream_bytes, _HEADER_BYTES), start))
    except OtherJpeg as error:
        raise NotThisFormat(f"{name}: its JPEG header is not read here: {error}") from error
    except ValueError as error:  # OpenSlide would leave out the level, or make up another
        raise SlideError(f"{tiff.path}: damaged NDPI: {name.removeprefix(f'{tiff.path}: ')}: {error}") from error
    if not header.interval:
        if page.width * page.height > _WHOLE_PIXELS:
            raise NotThisFormat(f"{name}: its JPEG stream has no restart markers")
        whole = np.array([[start], [stream_bytes]], np.int64)
        return StoredTiles(page.width, page.height, page.width, page.height, whole[0], whole[1], decode)

    starts = _starts(page)
    per_row = -(-page.width // header.mcu_width)
    columns, rows = per_row // header.interval, -(-page.height // header.mcu_height)
    if per_row % header.interval or len(starts) != columns * rows:
        raise NotThisFormat(
            f"{name}: restart segments of {header.interval} MCUs, {per_row} MCUs per row, {len(starts)} listed starts"
        )
    ends = np.append(starts[1:], stream_bytes)
    if starts[0] != header.scan_start or (ends <= starts).any():
        raise SlideError(f"{name}: damaged NDPI: its list of restart segments does not fit its JPEG stream")
    width = header.interval * header.mcu_width
    try:
        segment = RestartSegments(header.resized(width, header.mcu_height))
    except ValueError as error:
        raise NotThisFormat(f"{name}: {error}") from error
    return StoredTiles(page.width, page.height, width, header.mcu_height, start + starts, ends - starts, segment)


def _starts(page: Page) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """First byte of each segment, counted from the start of the level's stream."""
    low, high = page.array(Tag.NDPI_STARTS_LOW), page.array(Tag.NDPI_STARTS_HIGH)
    return low + (high << 32) if len(high) == len(low) else low
