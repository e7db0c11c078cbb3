"""Tiles of the index that cannot be read from the level they are read from, though the overview was whole.

Takes an open slide and the corners of its tiles; gives which of them are damaged. The tissue is found on a coarse
level; damage of the finer one that training reads is seen here: in the file's table of compressed tiles, all of it, and
by decoding a piece of a few tiles, drawn by the slide's name.
"""

from __future__ import annotations

import zlib
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_levels import find_levels
from pipelines.backends.tiff_page import Page, Tag
from pipelines.backends.tiff_tags import read_tiff
from pipelines.slides.geometry import Region, best_level, l_from_l0
from pipelines.slides.slide import Slide, TileReadError

LOOKED_AT = 8
"""Tiles of a slide that are decoded in part."""

PIECE_PX = 256
"""Side of the piece, at the tile's resolution: about one compressed tile."""

MOST_DAMAGED = 0.5
"""A slide of which more tiles are damaged is not worth training on; as ``tissue.MOST_UNREADABLE``."""


def damaged_tiles(
    slide: Slide,
    l0_x: NDArray[np.int64],
    l0_y: NDArray[np.int64],
    size: tuple[int, int],
    mpp: float,
    l0_size: tuple[int, int],
    scene: int | None = None,
) -> tuple[NDArray[np.bool_], str]:
    """Return which tiles cannot be read, bool (n,), and the first fault; empty where all can.

    Args:
        slide: open.
        l0_x, l0_y: (n,), top left of each tile in level-0 px.
        size, mpp: width and height of a tile in px at ``mpp`` um/px.
        l0_size: the same in level-0 px.
        scene: of several images of the file, the one that was opened.

    Raises:
        TileReadError: more than ``MOST_DAMAGED`` of the tiles, or of those looked at.
    """
    level = best_level(slide.levels, mpp)
    damaged = np.zeros(len(l0_x), np.bool_)
    fault = ""
    if slide.backend == "tiled":
        damaged = _in_table(slide.path, level.index, level.downsample, l0_x, l0_y, l0_size, scene)
        if damaged.any():
            fault = f"{slide.path}: level {level.index}: compressed tiles without data, or past the end of the file"
    looked_at = np.flatnonzero(~damaged)
    if len(looked_at) > LOOKED_AT:
        random = np.random.default_rng(zlib.crc32(slide.path.name.encode("utf-8", "replace")))
        looked_at = np.sort(random.choice(looked_at, LOOKED_AT, replace=False))
    piece = [min(PIECE_PX, side) for side in size]
    insets = [(l0 - round(l0 * px / side)) // 2 for l0, px, side in zip(l0_size, piece, size, strict=True)]
    failed = 0
    for i in looked_at:
        try:
            slide.read(Region(int(l0_x[i]) + insets[0], int(l0_y[i]) + insets[1], piece[0], piece[1], mpp))
        except TileReadError as error:
            damaged[i] = True
            failed += 1
            fault = fault or str(error)
    if damaged.mean() > MOST_DAMAGED or failed > MOST_DAMAGED * len(looked_at):
        raise TileReadError(f"most tiles cannot be read, though the slide's overview can: {fault}")
    return damaged, fault


def _in_table(
    path: Path,
    level: int,
    downsample: float,
    l0_x: NDArray[np.int64],
    l0_y: NDArray[np.int64],
    l0_size: tuple[int, int],
    scene: int | None,
) -> NDArray[np.bool_]:
    """Tiles that meet a compressed tile which the file cannot hold, bool (n,)."""
    tiff = read_tiff(path)
    page = find_levels(tiff, scene)[1][level]
    bad = _impossible(page, tiff.size_bytes)
    if not bad.any():
        return np.zeros(len(l0_x), np.bool_)
    counts = cv2.integral(bad.view(np.uint8))

    def cells(
        l0_starts: NDArray[np.int64], l0_side: int, tag: Tag, most: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First compressed tile that each tile meets, and one past the last."""
        px = page.number(tag, 1)
        first = np.array([l_from_l0(float(x), downsample) // px for x in l0_starts], np.int64)
        past = np.array([(l_from_l0(float(x + l0_side), downsample) - 1) // px + 1 for x in l0_starts], np.int64)
        return first.clip(0, most), past.clip(0, most)

    left, right = cells(l0_x, l0_size[0], Tag.TILE_WIDTH, bad.shape[1])
    top, bottom = cells(l0_y, l0_size[1], Tag.TILE_HEIGHT, bad.shape[0])
    met: NDArray[np.bool_] = counts[bottom, right] - counts[top, right] - counts[bottom, left] + counts[top, left] > 0
    return met


def _impossible(page: Page, size_bytes: int) -> NDArray[np.bool_]:
    """Compressed tiles, bool (rows, columns), that have a place in the file and no data there.

    Offset and byte count both 0 say that a tile was never written, which is no damage.
    """
    columns, rows = page.grid
    offsets, counts = (page.array(tag)[: rows * columns] for tag in (Tag.TILE_OFFSETS, Tag.TILE_BYTES))
    outside = (counts < 1) | (offsets < 8) | (counts > size_bytes - offsets)
    return np.ascontiguousarray((outside & ((offsets != 0) | (counts != 0))).reshape(rows, columns))
