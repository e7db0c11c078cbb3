"""Chunks that unpack to more than they may are refused by every codec, in Zarr v2, v3 and shards."""

from __future__ import annotations

import bz2
import gzip
import lzma
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

from pipelines.backends.registry import open_slide
from pipelines.backends.zarr_store import most_bytes, refuse_bomb
from pipelines.slides.geometry import Region
from pipelines.slides.slide import TileReadError

BOMB = bytes(8 << 20)
MOST = most_bytes((64, 64, 3))
PIXELS = np.full((128, 128, 3), 7, np.uint8)


def zstd_without_size(data: bytes) -> bytes:
    """A frame without a content size: window descriptor, and blocks of one repeated byte (RFC 8878, 3.1.1.2)."""
    size = 1 << 17
    blocks = [
        (size << 3 | 2 | (i == len(data) // size - 1)).to_bytes(3, "little") + b"\0" for i in range(len(data) // size)
    ]
    return b"\x28\xb5\x2f\xfd\x00\x58" + b"".join(blocks)


PACKED: dict[str, Callable[[bytes], Any]] = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "blosc": numcodecs.Blosc().encode,
    "zstd": numcodecs.Zstd().encode,
    "lz4": numcodecs.LZ4().encode,
}


@pytest.mark.parametrize("kind", PACKED)
def test_every_codec_is_bounded(kind: str) -> None:
    refuse_bomb(kind, bytes(PACKED[kind](PIXELS[:64, :64].tobytes())), MOST)
    with pytest.raises(ValueError, match="unpack to more than"):
        refuse_bomb(kind, bytes(PACKED[kind](BOMB)), MOST)


def test_streams_one_after_the_other_and_frames_without_a_size_are_counted() -> None:
    small = gzip.compress(bytes(MOST // 2))
    refuse_bomb("gzip", small * 2, MOST)
    refuse_bomb("zstd", zstd_without_size(bytes(1 << 17)), 1 << 17)
    for kind, data in (("gzip", small * 3), ("zstd", zstd_without_size(bytes(1 << 18)))):
        with pytest.raises(ValueError, match="unpack to more than"):
            refuse_bomb(kind, data, min(MOST, (1 << 18) - 1) if kind == "zstd" else MOST)


@pytest.mark.parametrize("kind", sorted({*PACKED} - {"lz4"}))
def test_damaged_data_are_left_to_the_decoder(kind: str) -> None:
    for data in (b"", b"\x28\xb5\x2f\xfd", bytes(PACKED[kind](BOMB[:4096]))[:9], bytes(30)):
        refuse_bomb(kind, data, MOST)


def read(path: Path) -> np.ndarray:
    with open_slide(path, mpp=0.5) as slide:
        return slide.read(Region(0, 0, 128, 128, 0.5))


@pytest.mark.parametrize("kind", PACKED)
def test_a_chunk_of_zarr_2(tmp_path: Path, kind: str) -> None:
    codec = numcodecs.get_codec({"id": kind})
    zarr.create_array(tmp_path / "a.zarr", data=PIXELS, chunks=(64, 64, 3), compressors=codec, zarr_format=2)
    np.testing.assert_array_equal(read(tmp_path / "a.zarr"), PIXELS)
    (tmp_path / "a.zarr" / "0.0.0").write_bytes(bytes(PACKED[kind](BOMB)))
    with pytest.raises(TileReadError, match="unpack to more than"):
        read(tmp_path / "a.zarr")


@pytest.mark.parametrize(("kind", "codec"), [("gzip", GzipCodec()), ("zstd", ZstdCodec()), ("blosc", BloscCodec())])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_of_zarr_3(tmp_path: Path, kind: str, codec: Any, sharded: bool) -> None:
    whole = {"chunks": (64, 64, 3), "shards": (128, 128, 3) if sharded else None, "compressors": [codec]}
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=PIXELS, **whole)
    np.testing.assert_array_equal(read(path), PIXELS)
    if not sharded:
        (path / "c" / "0" / "0" / "0").write_bytes(bytes(PACKED[kind](BOMB)))
    else:
        bomb = zarr.create_array(
            tmp_path / "b.zarr",
            shape=(4096, 4096, 3),
            chunks=(2048, 2048, 3),
            shards=(4096, 4096, 3),
            dtype="u1",
            compressors=[codec],
            serializer=BytesCodec(),
            fill_value=9,
        )
        bomb[...] = 0
        (path / "c" / "0" / "0" / "0").write_bytes((tmp_path / "b.zarr" / "c" / "0" / "0" / "0").read_bytes())
    with pytest.raises(TileReadError, match="unpack to more than"):
        read(path)
