"""Writes a scene as a slide: block after block, all levels in one pass, in bounded memory.

Takes a scene and a path; gives a pyramidal JPEG BigTIFF and, when asked, the mask of its glands. Blocks are drawn,
encoded and halved in threads and written in order, so the bytes do not depend on the number of threads. The first
``SHARED_LEVELS`` levels are made within a block, coarser ones from rows of already halved blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_writer import DEFLATE_MASK, JPEG, TILE, TiffWriter, encode_jpeg, encode_mask
from pipelines.slides.geometry import Size
from pipelines.synthetic.scene import BLOCK, Scene

OVERVIEW = 512
"""The coarsest level is the first whose longest side is at most this many px."""

MASK_SCALE = 2
"""A mask is this many times coarser than its slide: a quarter of the work, and borders finer than any hand draws."""

SHARED_LEVELS = (BLOCK // TILE).bit_length()
"""Levels made within a block: at the last of them a block is one tile."""

Image = NDArray[np.uint8]


@dataclass(frozen=True)
class _Painted:
    """One block, compressed: for each level its tiles by row and column, and its px at the last of those levels."""

    tiles: list[list[list[bytes]]]
    reduced: Image
    mask: list[list[bytes]]


def level_sizes(size: Size) -> list[Size]:
    """Sizes of the levels of a slide: halved, rounded up, down to ``OVERVIEW``."""
    sizes = [size]
    while max(sizes[-1].width, sizes[-1].height) > OVERVIEW:
        sizes.append(Size(-(-sizes[-1].width // 2), -(-sizes[-1].height // 2)))
    return sizes


def paint(
    scene: Scene,
    path: Path,
    mask_path: Path | None,
    *,
    mpp: float,
    description: str,
    workers: int,
    progress: Callable[[int, int], None],
) -> None:
    """Write ``scene`` to ``path``, and its gland mask to ``mask_path`` if given.

    Args:
        mpp: um/px of level 0.
        description: ASCII text kept in both files, by which they are recognised later.
        workers: threads that draw and encode.
        progress: called with rows of blocks done and to do.

    Raises:
        OSError: the disk is full or the folder not writable; neither file is left behind.
    """
    sizes = level_sizes(scene.spec.size)
    shared = min(SHARED_LEVELS, len(sizes))
    with ExitStack() as files, ThreadPoolExecutor(workers) as threads:
        writer = files.enter_context(TiffWriter(path, sizes, JPEG, mpp, description))
        mask_writer = None
        if mask_path is not None:
            mask_size = Size(-(-sizes[0].width // MASK_SCALE), -(-sizes[0].height // MASK_SCALE))
            mask_writer = files.enter_context(
                TiffWriter(mask_path, [mask_size], DEFLATE_MASK, mpp * MASK_SCALE, description)
            )
        coarser = _Overviews(writer, shared)
        painter = _BlockPainter(scene, shared, with_mask=mask_writer is not None)
        places = ((column, row) for row in range(scene.rows) for column in range(scene.columns))
        painted = _in_order(threads, painter, places, ahead=2 * workers + 2)
        for row in range(scene.rows):
            band = np.empty((painter.reduced_px, painter.reduced_px * scene.columns, 3), np.uint8)
            for column in range(scene.columns):
                block = next(painted)
                for level, tiles in enumerate(block.tiles):
                    _write_square(writer, level, column, row, tiles)
                if mask_writer is not None:
                    _write_square(mask_writer, 0, column, row, block.mask)
                band[:, column * painter.reduced_px : (column + 1) * painter.reduced_px] = block.reduced
            coarser.add(band)
            progress(row + 1, scene.rows)
        coarser.finish()


class _BlockPainter:
    """Draws and compresses one block; glass is compressed once and handed out again."""

    def __init__(self, scene: Scene, levels: int, *, with_mask: bool) -> None:
        self.reduced_px = BLOCK >> (levels - 1)
        self._scene, self._levels, self._with_mask = scene, levels, with_mask
        glass = np.empty((BLOCK, BLOCK, 3), np.uint8)
        glass[...] = scene.stain.glass
        self._glass = self._compressed(glass, np.zeros((BLOCK, BLOCK), np.uint8))

    def __call__(self, column: int, row: int) -> _Painted:
        if self._scene.is_glass(column, row):
            return self._glass
        block = self._scene.draw(column, row)
        return self._compressed(block.pixels, block.mask)

    def _compressed(self, pixels: Image, mask: Image) -> _Painted:
        tiles = []
        for level in range(self._levels):
            if level:
                pixels = halved(pixels)
            tiles.append(_squares(pixels, encode_jpeg))
        coarse_mask: list[list[bytes]] = []
        if self._with_mask:
            side = BLOCK // MASK_SCALE
            share = cv2.resize(mask * 255, (side, side), interpolation=cv2.INTER_AREA)
            coarse_mask = _squares((share >= 128).astype(np.uint8), encode_mask)
        return _Painted(tiles, pixels, coarse_mask)


class _Overviews:
    """The coarse levels, a row of tiles at a time: two rows of a level make one of the next."""

    def __init__(self, writer: TiffWriter, level: int) -> None:
        self._writer, self._level = writer, level
        self._rows = 0
        self._waiting: list[Image] = []
        self._next = _Overviews(writer, level + 1) if level < len(writer.levels) else None

    def add(self, band: Image) -> None:
        """Take a band of the level before, ``TILE`` px high (a slide of one block: as high as that is)."""
        if self._next is None:
            return
        self._waiting.append(band)
        if len(self._waiting) == 2:
            self._reduce()

    def finish(self) -> None:
        """Close an odd last row: what lies below the slide repeats its last line and is never shown."""
        if self._next is None:
            return
        if self._waiting:
            self._waiting.append(np.repeat(self._waiting[0][-1:], len(self._waiting[0]), axis=0))
            self._reduce()
        self._next.finish()

    def _reduce(self) -> None:
        band = np.concatenate(self._waiting)
        self._waiting.clear()
        columns = self._writer.grid(self._level).width
        wide = np.pad(band, ((0, 0), (0, max(0, 2 * columns * TILE - band.shape[1])), (0, 0)), mode="edge")
        half = halved(wide[:, : 2 * columns * TILE])
        for column, encoded in enumerate(_squares(half, encode_jpeg)[0]):
            self._writer.write_tile(self._level, column, self._rows, encoded)
        self._rows += 1
        assert self._next is not None
        self._next.add(half)


def halved(pixels: Image) -> Image:
    """Mean of each 2 x 2 px."""
    size = (pixels.shape[1] // 2, pixels.shape[0] // 2)
    return np.asarray(cv2.resize(pixels, size, interpolation=cv2.INTER_AREA), np.uint8)


def _squares(image: Image, encode: Callable[[Image], bytes]) -> list[list[bytes]]:
    """The compressed ``TILE`` x ``TILE`` squares of an image, by row and column."""
    height, width = image.shape[:2]
    return [
        [encode(np.ascontiguousarray(image[y : y + TILE, x : x + TILE])) for x in range(0, width, TILE)]
        for y in range(0, height, TILE)
    ]


def _write_square(writer: TiffWriter, level: int, column: int, row: int, tiles: list[list[bytes]]) -> None:
    """Write a block's tiles, those that lie on the slide."""
    grid = writer.grid(level)
    for y, tile_row in enumerate(tiles, row * len(tiles)):
        for x, encoded in enumerate(tile_row, column * len(tile_row)):
            if x < grid.width and y < grid.height:
                writer.write_tile(level, x, y, encoded)


def _in_order(
    threads: ThreadPoolExecutor, painter: _BlockPainter, places: Iterator[tuple[int, int]], ahead: int
) -> Iterator[_Painted]:
    """Blocks in the order of ``places``, at most ``ahead`` of them begun beyond the one given."""
    begun: deque[Future[_Painted]] = deque()
    for column, row in places:
        begun.append(threads.submit(painter, column, row))
        if len(begun) >= ahead:
            yield begun.popleft().result()
    while begun:
        yield begun.popleft().result()
