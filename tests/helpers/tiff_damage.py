"""Damaged copies of a TIFF slide, made from a whole one."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from pipelines.backends.tiff_page import Tag
from pipelines.backends.tiff_tags import read_tiff


def tile_extent(path: Path, tile: int, page: int = 0) -> tuple[int, int]:
    """Offset and byte count of a tile."""
    tags = read_tiff(path).pages[page]
    return int(tags.array(Tag.TILE_OFFSETS)[tile]), int(tags.array(Tag.TILE_BYTES)[tile])


def with_bytes(source: Path, target: Path, offset: int, data: bytes) -> Path:
    """A copy in which ``data`` lies at ``offset``."""
    whole = bytearray(source.read_bytes())
    whole[offset : offset + len(data)] = data
    target.write_bytes(whole)
    return target


def with_tile_entry(source: Path, target: Path, tile: int, *, tag: Tag, value: int) -> Path:
    """A copy of a little-endian classic TIFF whose first page has another offset or byte count for ``tile``."""
    assert tag in (Tag.TILE_OFFSETS, Tag.TILE_BYTES)
    table = read_tiff(source).pages[0].array(tag).astype("<u4").tobytes()
    whole = source.read_bytes()
    assert whole.count(table) == 1, "the table must be found in one place"
    return with_bytes(source, target, whole.index(table) + 4 * tile, struct.pack("<I", value))


def with_bit_rot(source: Path, target: Path, tile: int, *, seed: int, byte_changes: int = 20) -> Path:
    """A copy in which bytes in the middle of a tile's data are others."""
    offset, count = tile_extent(source, tile)
    random = np.random.default_rng(seed)
    whole = bytearray(source.read_bytes())
    for at in random.choice(np.arange(offset + count // 4, offset + count - 2), byte_changes, replace=False):
        whole[at] ^= int(random.integers(1, 256))
    target.write_bytes(whole)
    return target
