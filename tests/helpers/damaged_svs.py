"""Damaged copies of the shipped SVS: one kind of damage each, as transfers, disks and scanners make them.

The places to damage are found with tifffile, not with the reader under test.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import tifffile

from tests.helpers.real import SVS

BAD_TILE = 65
"""Column 5, row 6 of a grid of 10 columns."""

TILE = 240

Change = Callable[[bytearray], None]


def bit_rot(data: bytearray) -> None:
    """Every tenth tile has wrong bytes in its middle."""
    offsets, counts = _tables()
    for i in range(0, len(offsets), 10):
        middle = offsets[i] + counts[i] // 2
        data[middle : middle + 64] = b"\xff\x00\x5a\xff\xd9" * 12 + b"\xff" * 4


def zeroed_tile(data: bytearray) -> None:
    offsets, counts = _tables()
    data[offsets[BAD_TILE] : offsets[BAD_TILE] + counts[BAD_TILE]] = bytes(counts[BAD_TILE])


def byte_count(value: int) -> Change:
    return lambda data: _set_entry(data, "TileByteCounts", value)


def never_written_tile(data: bytearray) -> None:
    """Offset and byte count 0, as sparse TIFF files leave out background."""
    _set_entry(data, "TileByteCounts", 0)
    _set_entry(data, "TileOffsets", 0)


def replaced(old: bytes, new: bytes) -> Change:
    def change(data: bytearray) -> None:
        assert len(old) == len(new)
        assert old in data
        data[:] = data.replace(old, new)

    return change


def cut(fraction: float) -> Change:
    def change(data: bytearray) -> None:
        del data[int(len(data) * fraction) :]

    return change


def damaged(folder: Path, change: Change) -> Path:
    """A copy of the shipped SVS after ``change``."""
    data = bytearray(SVS.read_bytes())
    change(data)
    path = folder / "slide.svs"
    path.write_bytes(data)
    return path


def _set_entry(data: bytearray, tag: str, value: int) -> None:
    with tifffile.TiffFile(SVS) as tiff:
        table = tiff.pages[0].tags[tag].valueoffset
    data[table + 4 * BAD_TILE : table + 4 * BAD_TILE + 4] = value.to_bytes(4, "little")


def _tables() -> tuple[tuple[int, ...], tuple[int, ...]]:
    with tifffile.TiffFile(SVS) as tiff:
        return tiff.pages[0].dataoffsets, tiff.pages[0].databytecounts
