"""Whether a page's table of tiles or strips can be true, held against the file's size.

Takes a page and the size of its file; gives faults in words that name the tile. Nothing is decoded: a page without a
fault may still hold damaged pixels.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_page import Page, Tag

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
    outside = int(((offsets[:expected] >= size_bytes) & (counts[:expected] > 0)).sum())
    if outside:
        return (
            f"{name}: {outside} of {expected} {kind}s begin past the end of the file of {size_bytes} bytes: cut short"
        )
    return None


def data_faults(page: Page, size_bytes: int) -> list[str]:
    """Faults of a page's size and of its table of tiles or strips, held against the file's size.

    Offset and byte count both 0 are no fault: so a sparse TIFF says that a tile was never written.
    """
    fault = table_fault(page, size_bytes)
    if fault:
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
