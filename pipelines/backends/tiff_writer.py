"""Writers of tiled pyramidal BigTIFFs: slides and heat maps row by row, masks band by band.

OpenSlide, tifffile, QuPath and our own backends open the files: one page per level, the coarser ones marked as
reduced. tifffile writes pages one after the other, so tiles wait in an unnamed file. A file appears under its name when
it is whole.
"""

from __future__ import annotations

import functools
import os
import tempfile
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from pathlib import Path
from typing import IO, Any, Self

import cv2
import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.mask import PNG_BYTES
from pipelines.slides.geometry import Size
from pipelines.slides.whole_files import replacing

TILE = 256
"""Edge of a stored tile in px, as most scanners write it."""

JPEG = {"compression": "jpeg", "photometric": "rgb", "subsampling": (2, 2)}
"""Encoding of whole JPEG streams, YCbCr with halved chroma: what ``encode_jpeg`` gives."""

DEFLATE_MASK = {"compression": "zlib", "photometric": "minisblack"}
"""Encoding of one byte per px under zlib: what ``encode_mask`` gives."""


def encode_jpeg(tile: NDArray[np.uint8], quality: int) -> bytes:
    """Return the JPEG stream of an RGB tile, uint8 (``TILE``, ``TILE``, 3). Releases the interpreter lock."""
    return bytes(
        imagecodecs.jpeg8_encode(tile, level=quality, colorspace="RGB", outcolorspace="YCBCR", subsampling="420")
    )


def encode_mask(tile: NDArray[np.uint8]) -> bytes:
    """Return the zlib stream of a mask tile, uint8 (``TILE``, ``TILE``)."""
    return bytes(imagecodecs.zlib_encode(tile.tobytes(), level=1))


def level_sizes(size: Size, longest: int) -> list[Size]:
    """Return the sizes of the levels of a pyramid: halved, rounded up, until no side is above ``longest`` px."""
    sizes = [size]
    while max(sizes[-1].width, sizes[-1].height) > longest:
        sizes.append(Size(-(-sizes[-1].width // 2), -(-sizes[-1].height // 2)))
    return sizes


class PyramidWriter:
    """Pyramid written row by row; ``with`` publishes it on success and leaves nothing on an error.

    Each level halves the one before (mean of 2 x 2 px): memory is that of a few rows of tiles, whatever the height.

    Args:
        size, mpp: of the finest level; um/px are stored as resolution, which OpenSlide reports as ``openslide.mpp-x``.
        description: text of the first page's ImageDescription.
        encoding: ``JPEG`` for RGB, ``DEFLATE_MASK`` for one byte per px.
        longest: px of the longer side of the coarsest level at most.
        threads: compress the tiles; None: the caller's.
        quality: of ``JPEG``.
    """

    def __init__(
        self,
        path: Path,
        size: Size,
        mpp: float,
        description: str,
        encoding: dict[str, Any] = DEFLATE_MASK,
        longest: int = TILE,
        threads: Executor | None = None,
        quality: int = 80,
    ) -> None:
        self._path, self._mpp, self._description, self._encoding = path, mpp, description, encoding
        self._sizes = level_sizes(size, longest)
        self._encode: Callable[[NDArray[np.uint8]], bytes] = (
            functools.partial(encode_jpeg, quality=quality) if encoding is JPEG else encode_mask
        )
        self._map = map if threads is None else threads.map
        self._waiting: list[NDArray[np.uint8] | None] = [None] * len(self._sizes)
        self._places = [array("q") for _ in self._sizes]  # offset and bytes of each tile
        self._tiles: IO[bytes]

    def add(self, rows: NDArray[np.uint8]) -> None:
        """Take the next rows, uint8 (any number, width), or (any number, width, 3) for ``JPEG``."""
        if rows.shape[1] != self._sizes[0].width:
            raise ValueError(f"rows are {self._sizes[0].width} px wide; got {rows.shape[1]}")
        self._add(0, rows)

    def _add(self, level: int, rows: NDArray[np.uint8]) -> None:
        waiting = self._waiting[level]
        rows = rows if waiting is None else np.concatenate([waiting, rows])
        whole = len(rows) // TILE * TILE
        for top in range(0, whole, TILE):
            self._write_tiles(level, rows[top : top + TILE])
        self._waiting[level] = rows[whole:].copy() if whole < len(rows) else None

    def _write_tiles(self, level: int, rows: NDArray[np.uint8]) -> None:
        """Write one row of tiles, the last of which may be short, and hand on what the next level makes of it."""
        columns = -(-rows.shape[1] // TILE)
        missing = ((0, TILE - len(rows)), (0, columns * TILE - rows.shape[1]), (0, 0))[: rows.ndim]
        padded = np.pad(rows, missing, "edge")
        tiles = (np.ascontiguousarray(padded[:, column * TILE : (column + 1) * TILE]) for column in range(columns))
        for encoded in self._map(self._encode, tiles):
            self._places[level].extend((self._tiles.tell(), len(encoded)))
            self._tiles.write(encoded)
        if level + 1 < len(self._sizes):
            self._add(level + 1, halved(rows))

    def __enter__(self) -> Self:
        self._tiles = tempfile.TemporaryFile(dir=self._path.parent)  # closed by __exit__
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Write the pages and give the file its name, unless an error has come.

        Raises:
            OSError: the disk is full or the folder not writable; nothing is left under the name.
        """
        with self._tiles:
            if kind is not None:
                return
            for level in range(len(self._sizes)):  # finest first: each hands on what is left to the next
                waiting = self._waiting[level]
                if waiting is not None:
                    self._write_tiles(level, waiting)
            with replacing(self._path) as temporary, temporary.open("wb") as file:
                self._write_pages(file)
                file.flush()
                os.fsync(file.fileno())

    def _write_pages(self, file: IO[bytes]) -> None:
        with tifffile.TiffWriter(file, bigtiff=True) as writer:
            for level, (size, places) in enumerate(zip(self._sizes, self._places, strict=True)):
                missing = -(-size.width // TILE) * -(-size.height // TILE) - len(places) // 2
                assert missing == 0, f"{missing} tiles of {self._path} were never written"
                per_cm = 1e4 / (self._mpp * self._sizes[0].width / size.width)
                writer.write(
                    map(self._tile, places[::2], places[1::2]),
                    shape=(size.height, size.width, *([3] if self._encoding["photometric"] == "rgb" else [])),
                    dtype="uint8",
                    tile=(TILE, TILE),
                    subfiletype=int(level > 0),
                    resolution=((round(per_cm * 1000), 1000),) * 2,
                    resolutionunit="CENTIMETER",
                    description=self._description.encode() if level == 0 else None,  # text is refused beyond ASCII
                    metadata=None,
                    software=False,
                    **self._encoding,
                )

    def _tile(self, offset: int, length: int) -> bytes:
        self._tiles.seek(offset)
        return self._tiles.read(length)


def halved(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return the means of 2 x 2 px, rounded; an odd last row or column stands for itself twice."""
    odd = rows.shape[0] % 2, rows.shape[1] % 2
    even = np.pad(rows, ((0, odd[0]), (0, odd[1]), (0, 0))[: rows.ndim], "edge") if any(odd) else rows
    half = cv2.resize(even, (even.shape[1] // 2, even.shape[0] // 2), interpolation=cv2.INTER_AREA)
    return np.asarray(half, np.uint8)


def write_mask(path: Path, size: Size, mpp: float, bands: Iterable[NDArray[np.uint8]]) -> None:
    """Write a mask of one byte per px, as PNG or TIFF by the suffix of ``path``.

    Raises:
        ValueError: a PNG above ``PNG_BYTES``, which could not be read back.
        OSError: the disk is full or the folder not writable.
    """
    if path.suffix.lower() == ".png":
        if size.width * size.height > PNG_BYTES:
            raise ValueError(
                f"a mask of {size.width} x {size.height} px is too large for a PNG, which may have "
                f"{PNG_BYTES >> 20} Mpx: write a .tif, or ask for a coarser --mpp"
            )
        with replacing(path) as temporary:
            temporary.write_bytes(imagecodecs.png_encode(np.concatenate(list(bands))))
        return
    with PyramidWriter(path, size, mpp, "class ids", longest=max(size.width, size.height)) as writer:
        for band in bands:
            writer.add(band)
