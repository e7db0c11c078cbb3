"""Heat maps as files: one byte per px, a pyramid of tiles under zlib with its resolution, written row by row.

Takes rows from the top to the bottom; gives a TIFF that OpenSlide, tifffile and QuPath open. Each level halves the one
before (mean of 2 x 2 px), so memory is that of a few rows of tiles, whatever the height.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_writer import DEFLATE_MASK, TILE, TiffWriter, encode_mask
from pipelines.slides.geometry import Size


class HeatMapWriter:
    """A heat map on its way into a file; ``with`` publishes it on success and leaves nothing on an error.

    Args:
        path: the file to make; replaced if it exists.
        size: of the finest level.
        mpp: um/px of the finest level.
        description: text of the first page's ImageDescription.
    """

    def __init__(self, path: Path, size: Size, mpp: float, description: str) -> None:
        self._sizes = [size]
        while max(self._sizes[-1].width, self._sizes[-1].height) > TILE:
            finer = self._sizes[-1]
            self._sizes.append(Size(-(-finer.width // 2), -(-finer.height // 2)))
        self._tiff = TiffWriter(path, self._sizes, DEFLATE_MASK, mpp, description)
        self._waiting = [np.empty((0, level.width), np.uint8) for level in self._sizes]
        self._tile_rows = [0] * len(self._sizes)

    def add(self, rows: NDArray[np.uint8]) -> None:
        """Take the next rows, uint8 (any number, width)."""
        self._add(0, rows)

    def _add(self, level: int, rows: NDArray[np.uint8]) -> None:
        waiting = np.concatenate([self._waiting[level], rows])
        while len(waiting) >= TILE:
            self._write_tiles(level, waiting[:TILE])
            waiting = waiting[TILE:]
        self._waiting[level] = waiting.copy()

    def _write_tiles(self, level: int, rows: NDArray[np.uint8]) -> None:
        """Write one row of tiles, the last of which may be short, and hand on what the next level makes of it."""
        columns = self._tiff.grid(level).width
        padded = np.zeros((TILE, columns * TILE), np.uint8)
        padded[: len(rows), : rows.shape[1]] = rows
        for column in range(columns):
            tile = np.ascontiguousarray(padded[:, column * TILE : (column + 1) * TILE])
            self._tiff.write_tile(level, column, self._tile_rows[level], encode_mask(tile))
        self._tile_rows[level] += 1
        if level + 1 < len(self._sizes):
            self._add(level + 1, halved(rows))

    def __enter__(self) -> Self:
        self._tiff.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                for level in range(len(self._sizes)):  # finest first: each hands on what is left to the next
                    if len(self._waiting[level]):
                        self._write_tiles(level, self._waiting[level])
            except BaseException as fault:
                self._tiff.__exit__(type(fault), fault, fault.__traceback__)
                raise
        self._tiff.__exit__(kind, value, trace)


def halved(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the means of 2 x 2 px, rounded; an odd last row or column stands for itself twice."""
    height, width = rows.shape
    even = np.pad(rows, ((0, height % 2), (0, width % 2)), "edge").astype(np.uint16)
    sums = even[::2, ::2] + even[1::2, ::2] + even[::2, 1::2] + even[1::2, 1::2]
    return ((sums + 2) // 4).astype(np.uint8)
