"""Pyramidal tiled TIFF read without a slide library: positional reads of compressed tiles, decoded straight to pixels.

Takes generic tiled TIFF, BigTIFF, Aperio SVS, OME-TIFF and Hamamatsu NDPI; gives a ``PyramidSlide`` whose level 0 is
OpenSlide's, byte for byte, at several times its speed: OpenSlide spends most of a read in compositing, not in decoding.
A level of NDPI is one huge JPEG stream, whose restart markers cut it into segments of independent MCUs (ITU-T T.81,
B.2.1); private tags list where each starts. A segment behind the stream's header, its size changed, is a small JPEG.
"""

from __future__ import annotations

import functools
import itertools
import logging
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.codecs import (
    EOI,
    JpegTiles,
    OtherJpeg,
    StreamHeader,
    TileDecoder,
    decode,
    decoder,
    stored_ycbcr,
)
from pipelines.backends.level_reader import level0_mpp, pad, scratch
from pipelines.backends.tiff_levels import YCBCR, find_levels, recorded_mpp, resolution_mpp
from pipelines.backends.tiff_page import UNREADABLE, Page, Tag, table_fault
from pipelines.backends.tiff_tags import Tiff, read_tiff
from pipelines.slides.geometry import levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import PADDING, NotThisFormat, Pixels, SlideError, TileReadError

log = logging.getLogger(__name__)

_HEADERS_TRIED: Final = 16
_HEADER_BYTES: Final = 1 << 16


@dataclass(frozen=True)
class StoredTiles:
    """The compressed tiles of one level, row by row.

    Attributes:
        width, height: size of the level in px; the last tiles may reach past it.
        tile_width, tile_height: px.
        offsets, byte_counts: int64 (tiles,), into the file.
        decode: gives the pixels of one tile.
    """

    width: int
    height: int
    tile_width: int
    tile_height: int
    offsets: NDArray[np.int64] = field(repr=False)
    byte_counts: NDArray[np.int64] = field(repr=False)
    decode: TileDecoder = field(repr=False)

    @property
    def columns(self) -> int:
        return -(-self.width // self.tile_width)


class TiledReader:
    """A ``LevelReader`` over compressed tiles in one file.

    Args:
        grids: the levels, finest first.
        name: the backend's name.
    """

    def __init__(self, path: Path, grids: Sequence[StoredTiles], *, name: str) -> None:
        self.name = name
        self._path, self._grids = path, tuple(grids)
        self._fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        grid = self._grids[level]
        inside = pad(out, l_x, l_y, grid.width, grid.height)
        if inside is None:
            return
        columns = range(inside.l_x // grid.tile_width, -(-(inside.l_x + inside.out.shape[1]) // grid.tile_width))
        rows = range(inside.l_y // grid.tile_height, -(-(inside.l_y + inside.out.shape[0]) // grid.tile_height))
        out, shape = inside.out, (grid.tile_height, grid.tile_width, 3)
        buffer = scratch(math.prod(shape)).reshape(shape)
        for row, column in itertools.product(rows, columns):
            x, y = column * grid.tile_width - inside.l_x, row * grid.tile_height - inside.l_y
            left, top = max(0, -x), max(0, -y)
            target = out[y + top : y + shape[0], x + left : x + shape[1]]
            direct = target.shape == shape and target.flags.c_contiguous
            self._decode(level, column, row, target if direct else buffer)
            if not direct:
                target[...] = buffer[top : top + target.shape[0], left : left + target.shape[1]]

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _decode(self, level: int, column: int, row: int, pixels: Pixels) -> None:
        grid = self._grids[level]
        index = row * grid.columns + column
        offset, count = int(grid.offsets[index]), int(grid.byte_counts[index])
        if offset == count == 0:  # never written: how Philips and ASAP leave out background, in Camelyon for one
            pixels[...] = PADDING
            return
        try:
            if count < 1 or offset < 0:
                raise ValueError("the file holds no data for it")
            if count > 2 * pixels.nbytes + 65536:
                raise ValueError(f"{count} bytes cannot be one tile of {pixels.nbytes} bytes")
            data = os.pread(self._fd, count, offset)
            if len(data) < count:
                raise ValueError(f"the file ends {count - len(data)} bytes before the tile does")
            grid.decode(data, pixels)
        except ValueError as error:
            raise TileReadError(
                f"{self._path}: level {level}, tile column {column}, row {row} ({count} bytes at offset {offset}) "
                f"cannot be read: {error}"
            ) from error


def open_tiled(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open a tiled TIFF file as a slide, as ``open_slide`` says.

    Raises:
        NotThisFormat: not a tiled TIFF, or one that another backend has to read; says why.
        SlideError: cut short or damaged, of several images without ``scene``, or without a plausible mpp.
        ValueError: ``mpp`` is implausible.
        OSError: the file cannot be read.
    """
    tiff = read_tiff(path)
    image, pages = find_levels(tiff, scene)
    grids = [_grid(tiff, page) for page in pages]
    if tiff.faults:
        log.warning("%s: %d level(s) are whole, other parts of the file are not: %s", path, len(grids), tiff.faults[0])
    levels = levels_from_sizes([(g.width, g.height) for g in grids], level0_mpp(path, *recorded_mpp(image), mpp))
    return PyramidSlide(path, TiledReader(path, grids, name="tiled"), levels)


def _grid(tiff: Tiff, page: Page) -> StoredTiles:
    if fault := table_fault(page, tiff.size_bytes):
        raise SlideError(f"{tiff.path}: damaged TIFF: {fault}")
    tile_width, tile_height = page.number(Tag.TILE_WIDTH, 0), page.number(Tag.TILE_HEIGHT, 0)
    decode = decoder(page)
    if isinstance(decode, str):
        raise NotThisFormat(f"{tiff.path}: page {page.index}: {decode}")
    tiles = page.grid[0] * page.grid[1]
    offsets, byte_counts = page.array(Tag.TILE_OFFSETS), page.array(Tag.TILE_BYTES)
    if not len(offsets) == len(byte_counts) == tiles:
        raise SlideError(
            f"{tiff.path}: damaged TIFF: page {page.index} of {page.width} x {page.height} px has {tiles} tiles, its "
            f"table {len(offsets)} offsets and {len(byte_counts)} byte counts"
        )
    if isinstance(decode, JpegTiles):
        decode = JpegTiles(page.blob(Tag.JPEG_TABLES), ycbcr=is_ycbcr(tiff.path, page))
    return StoredTiles(page.width, page.height, tile_width, tile_height, offsets, byte_counts, decode)


def is_ycbcr(path: Path, page: Page) -> bool:
    """Return whether a page of JPEG data is YCbCr, by its tags and the first tile or strip whose headers can be read.

    Raises:
        SlideError: they contradict each other.
    """
    tables = (Tag.TILE_OFFSETS, Tag.TILE_BYTES) if page.is_tiled else (Tag.STRIP_OFFSETS, Tag.STRIP_BYTES)
    chroma, tagged = page.array(Tag.CHROMA_FACTORS), page.number(Tag.PHOTOMETRIC, UNREADABLE) == YCBCR
    offsets, byte_counts = map(page.array, tables)
    with path.open("rb") as file:
        for i in np.flatnonzero(byte_counts > 0)[:_HEADERS_TRIED]:
            data = os.pread(file.fileno(), min(int(byte_counts[i]), _HEADER_BYTES), max(0, int(offsets[i])))
            try:
                found = stored_ycbcr(
                    page.blob(Tag.JPEG_TABLES),
                    data,
                    samples=page.number(Tag.SAMPLES, 1),
                    ycbcr=tagged,
                    factors=(int(chroma[0]), int(chroma[1])) if len(chroma) == 2 else (2, 2),
                )
            except ValueError:
                continue  # a damaged tile, which fails alone when it is read
            if isinstance(found, str):
                raise SlideError(f"{path}: damaged TIFF: page {page.index}: {found}; its colours cannot be trusted")
            return found
    return tagged


_SEGMENT_ENDS: Final = (*(bytes((0xFF, 0xD0 + i)) for i in range(8)), EOI)
_WHOLE_PIXELS: Final = 1 << 24
"""A level without restart segments up to this size is decoded whole on each read; a larger one is left to OpenSlide."""


def _decode_segment(header: bytes, data: bytes, out: Pixels) -> None:
    """Decode one restart segment, with the marker that ends it, into ``out``: uint8 (MCU height, interval width, 3);
    ``header`` is the level's stream up to its scan data, its size set to that of one segment."""
    if data[-2:] not in _SEGMENT_ENDS:
        raise ValueError(f"no restart marker ends this segment but {data[-2:].hex(' ')}")
    decode(header + data[:-2] + EOI, out)


def open_ndpi(path: Path, *, mpp: float | None, scene: int | None = None) -> PyramidSlide:
    """Open an NDPI file as a slide. Focal planes other than the central one, macro image and map are not levels.

    It holds one slide, whatever ``scene`` says.

    Raises:
        NotThisFormat: not NDPI, or without a list of restart segments; says why.
        SlideError, ValueError, OSError: as ``open_tiled``.
    """
    tiff = read_tiff(path)
    if not tiff.is_ndpi:
        raise NotThisFormat(f"{path}: a TIFF file, but not Hamamatsu NDPI")
    pages = [p for p in tiff.pages if _is_magnified(p) and p.number(Tag.NDPI_FOCUS, 0) == 0]
    pages.sort(key=lambda p: p.width, reverse=True)
    if not pages:
        raise NotThisFormat(f"{path}: no page of this NDPI file is a level of the slide")
    with path.open("rb") as file:
        grids = [_segment_grid(tiff, page, file.fileno()) for page in pages]
    levels = levels_from_sizes([(g.width, g.height) for g in grids], level0_mpp(path, *resolution_mpp(pages[0]), mpp))
    return PyramidSlide(path, TiledReader(path, grids, name="ndpi"), levels)


def _is_magnified(page: Page) -> bool:
    """Return whether a page shows the slide, maybe below 1x: macro image and map have a magnification of -1 and -2."""
    lens = page.tags.get(Tag.NDPI_LENS)
    return lens is not None and lens.size > 0 and float(lens[0]) > 0


def _segment_grid(tiff: Tiff, page: Page, fd: int) -> StoredTiles:
    """Segments of a level as its tiles: one restart interval wide, one MCU high."""
    name = f"{tiff.path}: page {page.index} ({page.width} x {page.height} px)"
    if fault := table_fault(page, tiff.size_bytes):
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

    starts, high = page.array(Tag.NDPI_STARTS_LOW), page.array(Tag.NDPI_STARTS_HIGH)  # from the start of the stream
    if len(high) == len(starts):
        starts = starts + (high << 32)
    per_row = -(-page.width // header.mcu_width)
    columns, rows = per_row // header.interval, -(-page.height // header.mcu_height)
    if per_row % header.interval or len(starts) != columns * rows:
        raise NotThisFormat(
            f"{name}: restart segments of {header.interval} MCUs, {per_row} MCUs per row, {len(starts)} listed starts"
        )
    ends = np.append(starts[1:], stream_bytes)
    if starts[0] != len(header.stream) or (ends <= starts).any():
        raise SlideError(f"{name}: damaged NDPI: its list of restart segments does not fit its JPEG stream")
    width = header.interval * header.mcu_width
    try:
        segment = functools.partial(_decode_segment, header.resized(width, header.mcu_height))
    except ValueError as error:
        raise NotThisFormat(f"{name}: {error}") from error
    return StoredTiles(page.width, page.height, width, header.mcu_height, start + starts, ends - starts, segment)
