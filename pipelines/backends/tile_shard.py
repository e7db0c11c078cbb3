"""Shards of tiles as bytes: a file with many tiles, each compressed and with a checksum, and an index at its end.

Takes pixels, gives the bytes of a shard of a Zarr 3 array, and back; any Zarr library reads them. A tile is compressed
by Blosc's LZ4: of stained tissue nothing saves much, and this costs the least. Format: Zarr 3 core, codecs ``blosc``,
``crc32c`` and ``sharding_indexed``.
"""

from __future__ import annotations

import os
from typing import Any, Final

import google_crc32c
import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels

TILE_BYTES: Final = (1 << 31) - (1 << 16)
"""Of one tile at most: what Blosc compresses in one piece."""

CRC_BYTES: Final = 4

NO_CHUNK: Final = (1 << 64) - 1
"""Offset and size of a tile that a shard does not hold."""

BYTES: Final[dict[str, Any]] = {"name": "bytes", "configuration": {"endian": "little"}}
CRC: Final[dict[str, Any]] = {"name": "crc32c"}
BLOSC: Final[dict[str, Any]] = {
    "name": "blosc",
    "configuration": {"typesize": 1, "cname": "lz4", "clevel": 1, "shuffle": "noshuffle", "blocksize": 0},
}


class DamagedShard(Exception):
    """Bytes of a shard that are not those that were written."""


def encode_tile(pixels: Pixels) -> bytes:
    """Return the bytes of one tile, its checksum at the end."""
    flat: Any = np.ascontiguousarray(pixels).reshape(-1)  # an array, which the library's types do not name
    data = imagecodecs.blosc_encode(flat, level=1, compressor="lz4", shuffle=0, typesize=1, numthreads=1)
    return with_checksum(bytes(data))


def decode_tile(data: bytes, out: Pixels) -> None:
    """Write the pixels of a tile into ``out``, C-contiguous.

    Raises:
        DamagedShard: the checksum is of other bytes, or the tile is of another size.
    """
    compressed = checked(data)
    flat: Any = out.reshape(-1)
    try:
        decoded = imagecodecs.blosc_decode(compressed, out=flat, numthreads=1)
    except Exception as error:  # whatever the library makes of bytes that somebody else wrote
        raise DamagedShard(f"{type(error).__name__}: {error}") from error
    if len(decoded) != out.size:
        raise DamagedShard(f"a tile of {len(decoded)} bytes in place of {out.size}")


def with_checksum(data: bytes) -> bytes:
    """Return ``data`` and, in 4 bytes more, its CRC32C."""
    checksum: int = google_crc32c.value(data)
    return data + checksum.to_bytes(CRC_BYTES, "little")


def checked(data: bytes) -> bytes:
    """Return ``data`` without the checksum at its end. Raises DamagedShard where it is of other bytes."""
    body, checksum = data[:-CRC_BYTES], data[-CRC_BYTES:]
    if len(checksum) < CRC_BYTES or google_crc32c.value(body) != int.from_bytes(checksum, "little"):
        raise DamagedShard(f"the checksum of {len(data)} bytes is wrong")
    return body


def shard_bytes(tiles: list[bytes], slots: int) -> list[bytes]:
    """Return the parts of a shard file, to be written one after the other."""
    sizes = np.array([len(tile) for tile in tiles], np.uint64)
    index = np.full((slots, 2), NO_CHUNK, "<u8")
    index[: len(tiles), 0] = np.cumsum(sizes) - sizes
    index[: len(tiles), 1] = sizes
    return [*tiles, with_checksum(index.tobytes())]


def read_index(descriptor: int, slots: int) -> NDArray[np.uint64]:
    """Return where the tiles of an open shard file are: offset and bytes of each, uint64 (slots, 2).

    Raises:
        DamagedShard: the file is cut short, or its index was changed.
    """
    index_bytes = slots * 16 + CRC_BYTES
    end = os.fstat(descriptor).st_size - index_bytes
    if end < 0:
        raise DamagedShard("the file is shorter than its index")
    index = np.frombuffer(checked(os.pread(descriptor, index_bytes, end)), "<u8").reshape(slots, 2)
    held = index[index[:, 0] != NO_CHUNK]
    if len(held) and int((held[:, 0] + held[:, 1]).max()) > end:
        raise DamagedShard("the index names bytes beyond the tiles")
    return index


def tiles_metadata(shards: int, slots: int, height: int, width: int) -> dict[str, Any]:
    """Return ``zarr.json`` of the array of tiles, uint8 (shards * slots, height, width, 3)."""
    inner = [{"name": "bytes"}, BLOSC, CRC]
    sharding = {"chunk_shape": [1, height, width, 3], "codecs": inner, "index_codecs": [BYTES, CRC]}
    codecs = [{"name": "sharding_indexed", "configuration": sharding | {"index_location": "end"}}]
    shape = [shards * slots, height, width, 3]
    return _array("uint8", shape, [slots, height, width, 3], codecs, 255, ["tile", "y", "x", "channel"])


def places_metadata(shards: int, slots: int, columns: int) -> dict[str, Any]:
    """Return ``zarr.json`` of the array that says what each tile is, int64 (shards * slots, columns)."""
    return _array("int64", [shards * slots, columns], [slots, columns], [BYTES, CRC], 0, ["tile", "place"])


def _array(
    kind: str, shape: list[int], chunks: list[int], codecs: list[dict[str, Any]], fill: int, names: list[str]
) -> dict[str, Any]:
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": kind,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
        "fill_value": fill,
        "codecs": codecs,
        "dimension_names": names,
        "attributes": {},
    }
