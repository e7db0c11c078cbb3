"""Writers of tiled pyramidal BigTIFFs: compressed tiles in any order, heat maps row by row, masks band by band.

OpenSlide, tifffile, QuPath and our own backends open the files: one page per level, the coarser ones marked as
reduced. tifffile writes pages one after the other, so tiles wait in an unnamed file. A file appears under its name when
it is whole.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.mask import PNG_BYTES
from pipelines.slides.geometry import Size

TILE = 256
"""Edge of a stored tile in px, as most scanners write it."""

JPEG = {"compression": "jpeg", "photometric": "rgb", "subsampling": (2, 2)}
"""Encoding of whole JPEG streams, YCbCr with halved chroma: what ``encode_jpeg`` gives."""

DEFLATE_MASK = {"compression": "zlib", "photometric": "minisblack"}
"""Encoding of one byte per px under zlib: what ``encode_mask`` gives."""


def encode_jpeg(tile: NDArray[np.uint8], quality: int = 80) -> bytes:
    """Return the JPEG stream of an RGB tile, uint8 (``TILE``, ``TILE``, 3). Releases the interpreter lock."""
    return bytes(
        imagecodecs.jpeg8_encode(tile, level=quality, colorspace="RGB", outcolorspace="YCBCR", subsampling="420")
    )


def encode_mask(tile: NDArray[np.uint8]) -> bytes:
    """Return the zlib stream of a mask tile, uint8 (``TILE``, ``TILE``)."""
    return bytes(imagecodecs.zlib_encode(tile.tobytes(), level=1))


class TiffWriter:
    """Open file under a temporary name beside ``path``; ``with`` publishes it on success and removes it on an error.

    Args:
        path: the file to make; replaced if it exists.
        levels: size of each level, finest first.
        encoding: what the tiles are.
        mpp: um/px of level 0, stored as resolution; OpenSlide reports it as ``openslide.mpp-x``.
        description: text of the first page's ImageDescription.
    """

    def __init__(
        self, path: Path, levels: Sequence[Size], encoding: dict[str, Any], mpp: float, description: str
    ) -> None:
        self.levels = tuple(levels)
        self._path = path
        self._encoding = encoding
        self._mpp = mpp
        self._description = description
        self._places = [np.zeros((self.grid(k).height, self.grid(k).width, 2), np.int64) for k in range(len(levels))]
        self._waiting: IO[bytes]

    def grid(self, level: int) -> Size:
        """Return the number of tile columns and rows of a level."""
        size = self.levels[level]
        return Size(-(-size.width // TILE), -(-size.height // TILE))

    def write_tile(self, level: int, column: int, row: int, encoded: bytes) -> None:
        """Take one compressed tile. Every tile of every level is to be given once, in any order."""
        self._places[level][row, column] = self._waiting.tell(), len(encoded)
        self._waiting.write(encoded)

    def __enter__(self) -> Self:
        self._waiting = tempfile.TemporaryFile(dir=self._path.parent)  # closed by __exit__
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write the pages and give the file its name, unless an error has come.

        Raises:
            OSError: the disk is full or the folder not writable; nothing is left under the name.
        """
        temporary = self._path.with_name(f".{self._path.name}.part")
        try:
            if kind is None:
                missing = sum(int((places[..., 1] == 0).sum()) for places in self._places)
                assert missing == 0, f"{missing} tiles of {self._path} were never written"
                with temporary.open("wb") as file:
                    self._write_pages(file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.replace(self._path)
        finally:
            temporary.unlink(missing_ok=True)
            self._waiting.close()

    def _write_pages(self, file: IO[bytes]) -> None:
        with tifffile.TiffWriter(file, bigtiff=True) as writer:
            for level, size in enumerate(self.levels):
                per_cm = 1e4 / (self._mpp * self.levels[0].width / size.width)
                writer.write(
                    self._tiles(level),
                    shape=(size.height, size.width, *([3] if self._encoding["photometric"] == "rgb" else [])),
                    dtype="uint8",
                    tile=(TILE, TILE),
                    subfiletype=int(level > 0),
                    resolution=((round(per_cm * 1000), 1000),) * 2,
                    resolutionunit="CENTIMETER",
                    description=self._description if level == 0 else None,
                    metadata=None,
                    software=False,
                    **self._encoding,
                )

    def _tiles(self, level: int) -> Iterator[bytes]:
        for offset, length in self._places[level].reshape(-1, 2).tolist():
            self._waiting.seek(offset)
            yield self._waiting.read(length)


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


BAND_ROWS = TILE
"""Height of the bands a mask is written in; the last may be less."""


def write_mask(path: Path, size: Size, mpp: float, bands: Iterable[NDArray[np.uint8]]) -> None:
    """Write a mask of one byte per px, as PNG or TIFF by the suffix of ``path``.

    Args:
        path: the file to make.
        size: of the mask in px.
        mpp: um/px, which a TIFF states.
        bands: uint8 (``BAND_ROWS``, size.width) from top to bottom, the last with what is left.

    Raises:
        ValueError: a PNG above ``PNG_BYTES``, which could not be read back.
        OSError: the disk is full or the folder not writable.
    """
    if path.suffix.lower() == ".png":
        if size.pixels > PNG_BYTES:
            raise ValueError(
                f"a mask of {size.width} x {size.height} px is too large for a PNG, which may have "
                f"{PNG_BYTES >> 20} Mpx: write a .tif, or ask for a coarser --mpp"
            )
        path.write_bytes(imagecodecs.png_encode(np.concatenate(list(bands))))
        return
    with TiffWriter(path, [size], DEFLATE_MASK, mpp, "class ids") as writer:
        for row, band in enumerate(bands):
            for column in range(writer.grid(0).width):
                tile = np.zeros((TILE, TILE), np.uint8)
                part = band[:, column * TILE : (column + 1) * TILE]
                tile[: part.shape[0], : part.shape[1]] = part
                writer.write_tile(0, column, row, encode_mask(tile))
