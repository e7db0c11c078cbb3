"""One image directory (page) of a TIFF file: its tags, and what they say about size and tiles.

Holds what ``tiff_tags`` read; decides nothing. Tag numbers are those of TIFF 6.0, Adobe's supplement (SubIFDs), TIFF
Technical Note 2 (JPEGTables) and Hamamatsu's private range.
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
