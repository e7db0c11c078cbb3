"""Writes a tiled pyramidal BigTIFF as a stream: compressed tiles of any level in any order, one pass, little memory.

Takes the sizes of the levels and the bytes of each tile; gives a file that OpenSlide, tifffile and our own backends
open: one page per level, the coarser ones marked as reduced (TIFF 6.0 section 8; BigTIFF as libtiff writes it). Only
the offset and length of each tile are held until the end, 16 bytes per tile. The file appears under its name when it
is whole, never before.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size

TILE = 256
"""Edge of a stored tile in px, as most scanners write it."""

SHARED_BYTES = 2048
"""Tiles up to this length are remembered, and equal ones stored once: glass costs nothing on disk."""

_ASCII, _SHORT, _LONG, _RATIONAL, _LONG8 = 2, 3, 4, 5, 16
_FORMAT = {_SHORT: "H", _LONG: "I", _RATIONAL: "II", _LONG8: "Q"}
_Entry = tuple[int, int, bytes, int]
"""Tag, type, packed value, count."""


@dataclass(frozen=True)
class Encoding:
    """How the tiles handed over are compressed: the TIFF tag values that a reader needs to decode them."""

    compression: int
    photometric: int
    samples: int


JPEG = Encoding(compression=7, photometric=6, samples=3)
"""Whole JPEG streams, YCbCr with halved chroma: what ``encode_jpeg`` gives."""

DEFLATE_MASK = Encoding(compression=8, photometric=1, samples=1)
"""One byte per px under zlib: what ``encode_mask`` gives."""


def encode_jpeg(tile: NDArray[np.uint8], quality: int = 80) -> bytes:
    """JPEG stream of an RGB tile, uint8 (``TILE``, ``TILE``, 3). Releases the interpreter lock."""
    return bytes(
        imagecodecs.jpeg8_encode(tile, level=quality, colorspace="RGB", outcolorspace="YCBCR", subsampling="420")
    )


def encode_mask(tile: NDArray[np.uint8]) -> bytes:
    """zlib stream of a mask tile, uint8 (``TILE``, ``TILE``)."""
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

    def __init__(self, path: Path, levels: Sequence[Size], encoding: Encoding, mpp: float, description: str) -> None:
        self.levels = tuple(levels)
        self._path = path
        self._temporary = path.with_name(f".{path.name}.part")
        self._encoding = encoding
        self._mpp = mpp
        self._description = description
        self._grids = [Size(-(-size.width // TILE), -(-size.height // TILE)) for size in levels]
        self._offsets = [np.zeros(grid.pixels, np.uint64) for grid in self._grids]
        self._lengths = [np.zeros(grid.pixels, np.uint64) for grid in self._grids]
        self._shared: dict[bytes, int] = {}
        self._file = self._temporary.open("wb")
        # Header of a little-endian BigTIFF; the offset of the first page is filled in at the end.
        self._file.write(struct.pack("<2sHHHQ", b"II", 43, 8, 0, 0))
        self._end = 16

    def grid(self, level: int) -> Size:
        """Number of tile columns and rows of a level."""
        return self._grids[level]

    def write_tile(self, level: int, column: int, row: int, encoded: bytes) -> None:
        """Append one compressed tile. Every tile of every level is to be written once, in any order."""
        grid = self._grids[level]
        assert max(column / grid.width, row / grid.height) < 1, f"tile ({column}, {row}) outside {grid} of {level}"
        offset = self._shared.get(encoded) if len(encoded) <= SHARED_BYTES else None
        if offset is None:
            offset = self._append(encoded)
            if len(encoded) <= SHARED_BYTES:
                self._shared[encoded] = offset
        self._offsets[level][row * grid.width + column] = offset
        self._lengths[level][row * grid.width + column] = len(encoded)

    def publish(self) -> None:
        """Write the pages and give the file its name.

        Raises:
            OSError: the disk is full or the folder not writable; nothing is left under the name.
        """
        missing = sum(int((offsets == 0).sum()) for offsets in self._offsets)
        assert missing == 0, f"{missing} tiles of {self._path} were never written"
        link_at = 8
        for level in range(len(self.levels)):
            link_at = self._write_page(level, link_at)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._temporary.replace(self._path)

    def discard(self) -> None:
        """Remove what has been written."""
        try:
            self._file.close()
        except OSError:
            pass  # a full disk fails once more on closing, and the file goes anyway
        finally:
            self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            try:
                self.publish()
            except BaseException:
                self.discard()
                raise
        else:
            self.discard()

    def _append(self, data: bytes) -> int:
        """Offset at which ``data`` now lies; even, as TIFF asks of values."""
        offset = self._end
        self._file.write(data if len(data) % 2 == 0 else data + b"\0")
        self._end += len(data) + len(data) % 2
        return offset

    def _write_page(self, level: int, link_at: int) -> int:
        """Append the page of ``level`` and link it from ``link_at``; gives where the next link is to be written."""
        entries = sorted(self._entries(level))
        table = b"".join(self._field(entry) for entry in entries)
        page_at = self._append(struct.pack("<Q", len(entries)) + table + struct.pack("<Q", 0))
        self._file.seek(link_at)
        self._file.write(struct.pack("<Q", page_at))
        self._file.seek(self._end)
        return page_at + 8 + len(table)

    def _entries(self, level: int) -> list[_Entry]:
        size, encoding = self.levels[level], self._encoding
        centimetre = round(1e4 / (self._mpp * self.levels[0].width / size.width) * 1000)  # px per cm in 1/1000
        entries = [
            _entry(254, _LONG, int(level > 0)),  # NewSubfileType: a reduced version of another page
            _entry(256, _LONG, size.width),
            _entry(257, _LONG, size.height),
            _entry(258, _SHORT, *[8] * encoding.samples),
            _entry(259, _SHORT, encoding.compression),
            _entry(262, _SHORT, encoding.photometric),
            _entry(277, _SHORT, encoding.samples),
            _entry(282, _RATIONAL, centimetre, 1000),
            _entry(283, _RATIONAL, centimetre, 1000),
            _entry(284, _SHORT, 1),  # samples of a px side by side
            _entry(296, _SHORT, 3),  # resolution unit: centimetre
            _entry(322, _LONG, TILE),
            _entry(323, _LONG, TILE),
            (324, _LONG8, self._offsets[level].astype("<u8").tobytes(), self._offsets[level].size),
            (325, _LONG8, self._lengths[level].astype("<u8").tobytes(), self._lengths[level].size),
        ]
        if level == 0:
            text = self._description.encode("ascii") + b"\0"
            entries.append((270, _ASCII, text, len(text)))
        if encoding.photometric == 6:
            entries.append(_entry(530, _SHORT, 2, 2))  # chroma subsampling
            entries.append(_entry(532, _RATIONAL, 0, 1, 255, 1, 128, 1, 255, 1, 128, 1, 255, 1))  # full-range YCbCr
        return entries

    def _field(self, entry: _Entry) -> bytes:
        """The 20 bytes of a field; values that do not fit its last 8 are appended to the file."""
        tag, kind, packed, count = entry
        value = packed.ljust(8, b"\0") if len(packed) <= 8 else struct.pack("<Q", self._append(packed))
        return struct.pack("<HHQ", tag, kind, count) + value


def _entry(tag: int, kind: int, *values: int) -> _Entry:
    count = len(values) // len(_FORMAT[kind])
    return tag, kind, struct.pack("<" + _FORMAT[kind] * count, *values), count
