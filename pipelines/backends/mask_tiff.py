"""A mask in a tiled or stripped TIFF, read piece by piece: one of 100,000 px on a side is never in memory whole.

Takes a path, gives the class value at asked (column, row) px. Only level 0 of a pyramid is used: coarser levels of
masks are often averages, and an average of class ids is no class.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType

import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.tiff_page import table_fault
from pipelines.backends.tiff_tags import read_tiff
from pipelines.slides.slide import SlideError, TileReadError

PIECE_BYTES = 256 << 20
"""Largest decoded tile or strip that is accepted; a mask in one compressed strip is one piece."""


class TiffMask:
    """A ``Mask`` over the tiles or strips of the first page of a TIFF. Safe in many threads: every read is positional.

    Raises:
        SlideError: not a TIFF, damaged, several channels, or pieces above ``PIECE_BYTES``.
    """

    names: Mapping[int, str] = MappingProxyType({})
    nbytes = 1 << 20
    """What an open one holds, about: the offsets of its pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            tiff = read_tiff(path)
        except (SlideError, OSError) as fault:
            what = str(fault).removeprefix(f"{path}: ")
            raise SlideError(f"mask {path} cannot be read as TIFF: {what}. Save it again") from fault
        faults = [*tiff.faults, *filter(None, [table_fault(tiff.pages[0], tiff.size_bytes)])]
        if faults or not tiff.pages[0].is_sorted:  # tifffile would go on with the defaults of what it cannot read
            what = "; ".join(faults) or "its tags are out of order"
            raise SlideError(f"mask {path} cannot be read as TIFF: it is damaged: {what}. Save it again")
        try:
            with tifffile.TiffFile(path) as file:
                page = file.pages.first
                shape, self._dtype = page.shape, page.dtype
                self._piece_height, self._piece_width = page.chunks[:2]
                self._grid = page.chunked[:2]
                self._offsets, self._counts = page.dataoffsets, page.databytecounts
                self._decode, tables = page.decode, page.jpegtables
        except Exception as fault:  # tifffile raises nearly anything on damaged files
            raise SlideError(f"mask {path} cannot be read as TIFF: {fault}. Save it again") from fault
        if len(shape) != 2 or self._dtype is None or self._dtype.kind not in "bui" or tables is not None:
            raise SlideError(
                f"mask {path} must have one channel of whole numbers, the class ids; "
                f"it has shape {shape}, type {self._dtype}"
            )
        self.height, self.width = shape
        size_bytes = path.stat().st_size
        pieces = self._grid[0] * self._grid[1]
        ends = [o + n for o, n in zip(self._offsets, self._counts, strict=False)]
        if len(self._offsets) != pieces or len(self._counts) != pieces or max(ends) > size_bytes:
            raise SlideError(f"mask {path} is cut off: its pieces do not all lie within its {size_bytes} bytes")
        piece_bytes = self._piece_height * self._piece_width * self._dtype.itemsize
        if piece_bytes > PIECE_BYTES:
            raise SlideError(
                f"mask {path} is stored in pieces of {piece_bytes >> 20} MiB; at most {PIECE_BYTES >> 20} MiB can be "
                "read at once. Save it as a tiled TIFF"
            )
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def sample(self, columns: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Values at the crossings of ``columns`` and ``rows``, both ascending; 0 where they lie outside the mask."""
        out[...] = 0
        for down in _pieces(rows, self._piece_height, self.height):
            for across in _pieces(columns, self._piece_width, self.width):
                piece = self._piece(
                    int(rows[down.start]) // self._piece_height, int(columns[across.start]) // self._piece_width
                )
                if piece is not None:
                    local = nearest(piece, columns[across] % self._piece_width, rows[down] % self._piece_height)
                    out[down, across] = byte_values(local, self.path)

    def values(self) -> set[int]:
        """Return all values that occur. Pieces of the same compressed bytes, most of a mask, are decoded once."""
        values: set[int] = set()
        seen: set[bytes] = set()
        for down in range(self._grid[0]):
            for across in range(self._grid[1]):
                height = min(self._piece_height, self.height - down * self._piece_height)
                width = min(self._piece_width, self.width - across * self._piece_width)
                data = self._data(down * self._grid[1] + across)
                key = blake2b(data, key=f"{height} {width}".encode()).digest()
                if key not in seen:
                    seen.add(key)
                    piece = self._piece(down, across)
                    values.update([0] if piece is None else np.unique(piece[:height, :width]).tolist())
        return values

    def _piece(self, down: int, across: int) -> NDArray[np.integer] | None:
        """One decoded tile or strip, None where the file leaves it out."""
        index = down * self._grid[1] + across
        if not self._counts[index]:
            return None
        try:
            decoded = self._decode(self._data(index), index)[0]
        except Exception as fault:  # imagecodecs raises its own classes for each codec
            raise TileReadError(f"mask {self.path} is damaged: piece {index} cannot be decoded: {fault}") from fault
        if decoded is None:
            return None
        piece: NDArray[np.integer] = decoded[0, :, :, 0]
        return piece.view(np.uint8) if piece.dtype == bool else piece

    def _data(self, index: int) -> bytes:
        return os.pread(self._fd, self._counts[index], self._offsets[index])


def nearest(pixels: NDArray[np.integer], columns: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.integer]:
    """``pixels`` at the crossings of ``columns`` and ``rows``, both ascending and within it."""
    if rows[-1] - rows[0] < len(rows):  # as fine as the mask or finer: its rows are fewer than those asked for
        band = pixels[rows[0] : rows[-1] + 1]
        return _take(_take(band, columns, 1), rows - rows[0], 0)
    return _take(_take(pixels, rows, 0), columns, 1)


def _take(pixels: NDArray[np.integer], index: NDArray[np.int64], axis: int) -> NDArray[np.integer]:
    if index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():  # a run: nothing is copied
        run = slice(int(index[0]), int(index[-1]) + 1)
        return pixels[run] if axis == 0 else pixels[:, run]
    return pixels.take(index, axis)


def byte_values(values: NDArray[np.integer], path: Path) -> NDArray[np.uint8]:
    """``values`` as uint8. Raises SlideError where they are no class ids."""
    if values.dtype != np.uint8 and values.size and (values.min() < 0 or values.max() > 255):
        raise SlideError(
            f"mask {path} must hold class ids 0..254 and 255 for ignore; it holds {values.min()}..{values.max()}"
        )
    return values.astype(np.uint8, copy=False)


def _pieces(index: NDArray[np.int64], piece: int, size: int) -> Iterator[slice]:
    """Runs of ``index`` (ascending) within 0..size that fall into one piece each."""
    low, high = np.searchsorted(index, [0, size])
    starts = np.flatnonzero(np.diff(index[low:high] // piece, prepend=-1)) + low
    yield from (slice(int(a), int(b)) for a, b in pairwise([*starts, high]))
