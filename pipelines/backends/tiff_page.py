"""One image directory (page) of a TIFF file: its tags, its size and tiles, and the table of its compressed tiles.

Holds what ``tiff_tags`` reads. Tag numbers are those of TIFF 6.0, Adobe's supplement (SubIFDs), TIFF Technical Note 2
(JPEGTables) and Hamamatsu's private range.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

UNREADABLE: Final = -1
"""Value of a numeric tag that is there and cannot be read: it is not absent, so no default holds, and no rule fits."""


class Tag(IntEnum):
    """The tags that are read; all others are skipped."""

    SUBFILE = 254
    WIDTH = 256
    HEIGHT = 257
    BITS = 258
    COMPRESSION = 259
    PHOTOMETRIC = 262
    DESCRIPTION = 270
    STRIP_OFFSETS = 273
    ORIENTATION = 274
    SAMPLES = 277
    ROWS_PER_STRIP = 278
    STRIP_BYTES = 279
    X_RESOLUTION = 282
    Y_RESOLUTION = 283
    PLANAR = 284
    RESOLUTION_UNIT = 296
    SOFTWARE = 305
    PREDICTOR = 317
    TILE_WIDTH = 322
    TILE_HEIGHT = 323
    TILE_OFFSETS = 324
    TILE_BYTES = 325
    SUB_IFDS = 330
    EXTRA_SAMPLES = 338
    SAMPLE_FORMAT = 339
    JPEG_TABLES = 347
    CHROMA_FACTORS = 530
    XMP = 700
    NDPI_FORMAT = 65420
    NDPI_LENS = 65421
    NDPI_FOCUS = 65424
    NDPI_STARTS_LOW = 65426
    NDPI_STARTS_HIGH = 65432


@dataclass(frozen=True)
class Page:
    """One image directory.

    Attributes:
        index: position in the file's chain; pages of SubIFDs carry their parent's.
        tags: values of the tags in ``Tag``, as flat arrays; a rational is two numbers.
        sub_pages: its SubIFDs.
        is_sorted: its tags ascend, as TIFF 6.0 has it; one that does not may be another tag, damaged.
    """

    index: int
    tags: Mapping[int, NDArray[np.generic]] = field(repr=False)
    sub_pages: tuple[Page, ...] = ()
    is_sorted: bool = True

    def number(self, tag: int, default: int) -> int:
        """First value of a numeric tag; ``default`` when it is absent, ``UNREADABLE`` when it is damaged."""
        values = self.tags.get(tag)
        return default if values is None or values.size == 0 else int(values[0])

    def array(self, tag: int) -> NDArray[np.int64]:
        """Return all values of a numeric tag; empty when it is absent. Values above 2**63 become 2**63 - 1."""
        values = self.tags.get(tag)
        if values is None:
            return np.empty(0, np.int64)
        if values.dtype.kind == "u" and values.dtype.itemsize == 8:
            values = np.minimum(values, np.uint64(np.iinfo(np.int64).max))
        return values.astype(np.int64)

    def blob(self, tag: int) -> bytes | None:
        """Bytes of a tag, such as JPEGTables."""
        values = self.tags.get(tag)
        return None if values is None else values.tobytes()

    def text(self, tag: int) -> str:
        """Text of a tag up to its first zero; empty when it is absent."""
        return (self.blob(tag) or b"").split(b"\0")[0].decode("utf-8", "replace")

    @property
    def width(self) -> int:
        return self.number(Tag.WIDTH, 0)

    @property
    def height(self) -> int:
        return self.number(Tag.HEIGHT, 0)

    @property
    def is_tiled(self) -> bool:
        return Tag.TILE_WIDTH in self.tags or Tag.TILE_OFFSETS in self.tags

    @property
    def grid(self) -> tuple[int, int]:
        """Tile columns and rows."""
        return (
            math.ceil(self.width / max(1, self.number(Tag.TILE_WIDTH, 1))),
            math.ceil(self.height / max(1, self.number(Tag.TILE_HEIGHT, 1))),
        )


MAX_SIDE: Final = 1 << 24
"""Of an image, px: 16 times what scanners make."""
MAX_TILE_SIDE: Final = 1 << 16
MAX_TILE_BYTES: Final = 1 << 28
"""Of a decoded tile, 8192 x 8192 px of 4 bytes: OpenSlide and libtiff allocate it before they look at the data."""
MAX_EMPTY_PIXELS: Final = 1 << 34
MAX_PIXELS_PER_BYTE: Final = 4096
"""Blank JPEG tiles reach some 100 px per byte. An image above both is nearly all left out, or its size is damaged."""
_FAULTS_NAMED: Final = 3


def table_fault(page: Page, size_bytes: int) -> str | None:
    """Why none of a page's pixels can be trusted: an impossible size, a table too short, data past the file's end."""
    name = _name(page)
    if page.width < 1 or page.height < 1:
        return f"{name}: an image is at least 1 x 1 px"
    if max(page.width, page.height) > MAX_SIDE:
        return f"{name}: an image has at most {MAX_SIDE} px a side"
    if page.width * page.height > max(MAX_EMPTY_PIXELS, MAX_PIXELS_PER_BYTE * size_bytes):
        return f"{name}: so many px do not fit into a file of {size_bytes} bytes"
    tile_width, tile_height = page.number(Tag.TILE_WIDTH, 0), page.number(Tag.TILE_HEIGHT, 0)
    px_bytes = page.number(Tag.SAMPLES, 1) * -(-int(page.array(Tag.BITS).max(initial=1)) // 8)
    if page.is_tiled and not (
        min(tile_width, tile_height) >= 1
        and max(tile_width, tile_height) <= MAX_TILE_SIDE
        and tile_width * tile_height * max(4, px_bytes) <= MAX_TILE_BYTES
    ):
        return f"{name}: tile size {tile_width} x {tile_height} px of {px_bytes} bytes"
    kind, columns, rows, offsets, counts = _table(page)
    expected = columns * rows
    if min(len(offsets), len(counts)) < expected:
        return f"{name}: {expected} {kind}s, but {len(offsets)} offsets and {len(counts)} byte counts"
    if outside := int(((offsets[:expected] >= size_bytes) & (counts[:expected] > 0)).sum()):
        return (
            f"{name}: {outside} of {expected} {kind}s begin past the end of the file of {size_bytes} bytes: cut short"
        )
    return None


def data_faults(page: Page, size_bytes: int) -> list[str]:
    """Faults of a page's size and of its table of tiles or strips, held against the file's size.

    Offset and byte count both 0 are no fault: so a sparse TIFF says that a tile was never written.
    """
    if fault := table_fault(page, size_bytes):
        return [fault]
    kind, columns, rows, offsets, counts = _table(page)
    offsets, counts = offsets[: columns * rows], counts[: columns * rows]
    rules = {
        f"{kind} without data": (counts < 1) & (offsets != 0),
        f"{kind} longer than the rest of the file of {size_bytes} bytes": counts > size_bytes - offsets,
    }
    faults = []
    for rule, bad in rules.items():
        pieces = np.flatnonzero(bad)
        named = [
            f"{kind} {i} (column {i % columns}, row {i // columns}: offset {offsets[i]}, {counts[i]} bytes)"
            for i in pieces[:_FAULTS_NAMED]
        ]
        if named:
            more = f" and {pieces.size - _FAULTS_NAMED} more" if pieces.size > _FAULTS_NAMED else ""
            faults.append(f"{_name(page)}: {rule}: {', '.join(named)}{more}")
    return faults


def _name(page: Page) -> str:
    return f"page {page.index} ({page.width} x {page.height} px)"


def _table(page: Page) -> tuple[str, int, int, NDArray[np.int64], NDArray[np.int64]]:
    """Tile or strip, columns and rows of them (planes one below another), offsets and byte counts."""
    planes = page.number(Tag.SAMPLES, 1) if page.number(Tag.PLANAR, 1) == 2 else 1
    if page.is_tiled:
        columns, rows = page.grid
        return "tile", columns, rows * planes, page.array(Tag.TILE_OFFSETS), page.array(Tag.TILE_BYTES)
    strip = max(1, min(page.height, page.number(Tag.ROWS_PER_STRIP, page.height)))
    rows = math.ceil(page.height / strip) * planes
    return "strip", 1, rows, page.array(Tag.STRIP_OFFSETS), page.array(Tag.STRIP_BYTES)
