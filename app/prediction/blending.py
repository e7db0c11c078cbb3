"""Overlapping windows blended to one map in bounded memory, and the weights of the blend.

Takes the probabilities of windows from the top of the slide to the bottom; returns the rows of the map that no further
window touches. The rows of one window are held: in memory, or in a mapped file where they exceed ``SPILL_BYTES``.
Gaussian weights as nnU-Net and MONAI have them (Isensee et al., Nature Methods 18, 2021).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]

SPILL_BYTES = 256 << 20
"""More rows than fit are kept in a file; and so much of the file is resident before its pages are released."""
ROWS_AT_ONCE = 256
"""Rows given at a time."""

SIGMA, LEAST_WEIGHT = 0.125, 1e-3
"""Of a Gaussian window: standard deviation as a part of its side, and the weight of its corners at least."""


def gaussian_window(side: int) -> Floats:
    """Return float32 (side, side): about 1 in the middle, less towards the edges, beyond which nothing is seen."""
    offset = np.arange(side) - (side - 1) / 2
    line = np.exp(-0.5 * (offset / (SIGMA * side)) ** 2)
    weights: Floats = np.maximum(np.outer(line, line), LEAST_WEIGHT).astype(np.float32)
    return weights


class Blender:
    """The weighted mean of windows, and where there is none 0.

    Args:
        width, height: of the canvas in cells.
        weights: float32 (h, w) of a window.
        folder: where a file is put if one is needed; it has no name and ends with this process.

    Raises:
        OSError: the disk has no room for the file.
    """

    def __init__(self, classes: int, width: int, height: int, weights: Floats, folder: Path) -> None:
        self._weights = weights
        self._size = (height, width)
        rows = len(weights)
        shape = (classes + 1, rows, width)  # the last is the sum of weights
        self._map: mmap.mmap | None = None
        if int(np.prod(shape)) * 4 > SPILL_BYTES:
            self._map = _mapped(int(np.prod(shape)) * 4, folder)
            self._sums: Floats = np.frombuffer(self._map, np.float32).reshape(shape)
        else:
            self._sums = np.zeros(shape, np.float32)
        self._top = 0
        self._touched_bytes = 0

    def add(self, x: int, y: int, probabilities: Floats) -> None:
        """Put a window at (x, y), cells; what lies outside the canvas is left out.

        Args:
            probabilities: float32 (classes, h, w), or (classes, 1, 1) of a window that is the same all over.
        """
        assert y == self._top, "windows come from the top to the bottom, rows above them are taken first"
        rows = min(len(self._weights), self._size[0] - y)
        columns = min(self._weights.shape[1], self._size[1] - x)
        weights = self._weights[:rows, :columns]
        weighted = np.broadcast_to(probabilities, (len(probabilities), *self._weights.shape))[:, :rows, :columns]
        weighted = weighted * weights
        for ring, window in self._parts(y, rows):
            self._sums[:-1, ring, x : x + columns] += weighted[:, window]
            self._sums[-1, ring, x : x + columns] += weights[window]
        self._touched_bytes += weighted.nbytes + weights.nbytes
        if self._map is not None and self._touched_bytes > SPILL_BYTES:
            self._map.madvise(mmap.MADV_DONTNEED)  # of a shared file: what was written stays in the file
            self._touched_bytes = 0

    def rows_above(self, y: int) -> Iterator[Floats]:
        """Yield the rows that are not given yet and lie above ``y``, float32 (classes, some, width), from the top."""
        while self._top < y:
            rows = min(y - self._top, len(self._weights), ROWS_AT_ONCE)
            done = np.zeros((len(self._sums) - 1, rows, self._size[1]), np.float32)
            for ring, given in self._parts(self._top, rows):
                weights = self._sums[-1, ring]
                np.divide(self._sums[:-1, ring], weights, out=done[:, given], where=weights > 0)
                self._sums[:, ring] = 0
            self._top += rows
            yield done

    def _parts(self, y: int, rows: int) -> Iterator[tuple[slice, slice]]:
        """Rows ``y`` to ``y + rows`` of the canvas: where they are held, and which of them these are."""
        held = len(self._weights)
        start, done = y % held, 0
        while done < rows:
            count = min(rows - done, held - start)
            yield slice(start, start + count), slice(done, done + count)
            start, done = 0, done + count

    def close(self) -> None:
        if self._map is not None:
            del self._sums
            with contextlib.suppress(BufferError):  # rows that an error left half given still look at it
                self._map.close()


def _mapped(size: int, folder: Path) -> mmap.mmap:
    """Return a file without a name of ``size`` bytes of 0, mapped."""
    with tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, size)  # a full disk fails here, not by a signal at the first write
        return mmap.mmap(file.fileno(), size)


def chunks(bands: Iterator[NDArray[Any]], rows: int) -> Iterator[NDArray[Any]]:
    """Yield what ``bands`` (classes, any, width) hold as (classes, ``rows``, width), the last as it comes."""
    waiting: list[NDArray[Any]] = []
    held = 0
    for band in bands:
        while held + band.shape[1] >= rows:
            yield np.concatenate([*waiting, band[:, : rows - held]], axis=1)
            band, waiting, held = band[:, rows - held :], [], 0
        if band.shape[1]:
            waiting.append(band)
            held += band.shape[1]
    if waiting:
        yield np.concatenate(waiting, axis=1)
