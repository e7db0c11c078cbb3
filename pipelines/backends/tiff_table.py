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

_FAULTS_NAMED: Final = 3


def table_fault(page: Page, size_bytes: int) -> str | None:
    """Why none of a page's pixels can be trusted: an impossible size, a table too short, data past the file's end."""
    name = _name(page)
    if page.width < 1 or page.height < 1:
        return f"{name}: an image is at least 1 x 1 px"
    if page.is_tiled and min(page.number(Tag.TILE_WIDTH, 0), page.number(Tag.TILE_HEIGHT, 0)) < 1:
        return f"{name}: tile size {page.number(Tag.TILE_WIDTH, 0)} x {page.number(Tag.TILE_HEIGHT, 0)} px"
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
        found = np.flatnonzero(bad)
        named = [
            f"{kind} {i} (column {i % columns}, row {i // columns}: offset {offsets[i]}, {counts[i]} bytes)"
            for i in found[:_FAULTS_NAMED]
        ]
        if named:
            more = f" and {found.size - _FAULTS_NAMED} more" if found.size > _FAULTS_NAMED else ""
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
