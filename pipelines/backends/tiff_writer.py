"""Writes a tiled pyramidal BigTIFF of compressed tiles that come level by level or all levels at once, in any order.

Takes the sizes of the levels and the bytes of each tile; gives a file that OpenSlide, tifffile and our own backends
open: one page per level, the coarser ones marked as reduced. tifffile writes pages one after the other, so tiles wait
in an unnamed file beside; of each only its place there is in memory. The file appears under its name when it is whole,
never before.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

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
