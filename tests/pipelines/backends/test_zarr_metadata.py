"""Zarr metadata that would run code, name impossible chunks or absent ones, and chunks that unpack to too much."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
import pickle
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
from pipelines.slides.slide import SlideError, TileReadError
from tests.pipelines.backends.test_slides import pyramid, write_ome_zarr


class Payload:
    """Makes the file ``marker`` when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(("key", "said"), [("compressor", "compressor 'pickle'"), ("filters", "filter 'pickle'")])
@pytest.mark.parametrize("dtype", ["|u1", "|O"])
def test_a_pickle_codec_is_refused_by_name_and_not_run(tmp_path: Path, key: str, said: str, dtype: str) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    about = json.loads((path / "0" / ".zarray").read_text())
    codec = {"id": "pickle", "protocol": 5}
    changed = {"compressor": None, "dtype": dtype, key: [codec] if key == "filters" else codec}
    (path / "0" / ".zarray").write_text(json.dumps(about | changed))
    for chunk in (path / "0").glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(SlideError, match=rf"array '0' asks for the {said}; of a slide only"), open_slide(path) as slide:
        slide.read(Region(0, 0, 64, 64, slide.mpp))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["numcodecs.pickle", "vlen-bytes", "imagecodecs_jpeg2k"])
@pytest.mark.parametrize("within_shards", [False, True])
def test_a_codec_of_format_3_is_refused_by_name(tmp_path: Path, name: str, within_shards: bool) -> None:
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=pyramid()[1], chunks=(32, 32, 3), shards=(64, 64, 3) if within_shards else None)
    about = json.loads((path / "zarr.json").read_text())
    codecs = about["codecs"][0]["configuration"]["codecs"] if within_shards else about["codecs"]
    codecs.append({"name": name, "configuration": {}})
    (path / "zarr.json").write_text(json.dumps(about))
    with pytest.raises(SlideError, match=f"asks for the codec '{name}'"):
        open_slide(path, mpp=0.5)


def test_consolidated_metadata_are_not_looked_at(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    about = json.loads((path / "0" / ".zarray").read_text()) | {"filters": [{"id": "pickle"}]}
    (path / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": {"0/.zarray": about}}))
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 90, 90, slide.mpp)), pyramid()[0][:90, :90])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"chunks": [0, 113, 3]}, "sides are whole numbers from 1"),
        ({"chunks": [97, 113]}, "sides are whole numbers from 1"),
        ({"chunks": [97.5, 113, 3]}, "sides are whole numbers from 1"),
        ({"chunks": [97, True, 3]}, "sides are whole numbers from 1"),
        ({"chunks": [1 << 20, 1 << 20, 3]}, "at most 256 MiB are decoded at once"),
        ({"shape": [1 << 40, 1 << 40, 3]}, "sides are whole numbers from 1"),
        ({"shape": [10, 700, 3]}, "px made smaller"),
        ({"dtype": [["a", "u1"]]}, "pixels must be uint8"),
        ({"dtype": "|i1"}, "pixels must be uint8"),
        ({"compressor": {"id": ["blosc"]}}, "cannot be used"),
        ({"compressor": 7}, "cannot be used"),
        ({"zarr_format": "two"}, "cannot be used"),
    ],
)
def test_impossible_metadata(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    about = json.loads((path / "0" / ".zarray").read_text())
    (path / "0" / ".zarray").write_text(json.dumps(about | change))
    with pytest.raises(SlideError, match=said):
        open_slide(path)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('"name": "c"', '"name": ["c"]', "cannot be used"),
        ('"name": "c"', '"name": "k"', "is of type 'channel'"),
        ('"name": "c", "type": "channel"', '"name": "k"', "axes are named t, c, z, y and x"),
        ('"name": "c", "type": "channel"', '"name": "t", "type": "channel"', "is of type 'channel'"),
        ('{"type": "scale", "scale": [0.25', '{"type": "identity", "scale": [0.25', "does not record its um/px"),
        ('{"type": "scale", "scale": [0.25', '{"type": 1e308, "scale": [0.25', "transformation '1e.308' is not known"),
        ("[0.25, 0.25, 1.0]", "[0.5, 0.5, 1.0]", "does not record its um/px"),
        ("[0.25, 0.25, 1.0]", "[0.25, 0.25]", "one positive number for each of 3 axes"),
        ("[0.25, 0.25, 1.0]", "[0.25, -1, 1.0]", "one positive number for each of 3 axes"),
        ("[0.25, 0.25, 1.0]", "[Infinity, NaN, 1.0]", "one positive number for each of 3 axes"),
    ],
)
def test_axes_and_scales_that_are_not_understood(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    text = json.dumps(json.loads((path / ".zattrs").read_text()))
    assert old in text
    (path / ".zattrs").write_text(text.replace(old, new))
    with pytest.raises(SlideError, match=said):
        open_slide(path)


def test_a_path_out_of_the_store_is_refused(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    text = (path / ".zattrs").read_text()
    (path / ".zattrs").write_text(text.replace('"path": "0"', '"path": "../other"'))
    with pytest.raises(SlideError, match="lies outside the store"):
        open_slide(path)


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_lost_chunk_is_not_read_as_black(tmp_path: Path, version: str, level: int) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version=version, axes="yxc")
    chunk = path / str(level) / ("c/0/0/0" if version == "0.5" else "0.0.0")
    chunk.unlink()
    with open_slide(path) as slide:
        mpp = slide.levels[level].mpp
        with pytest.raises(TileReadError, match=rf"level {level}, chunk 0\.0\.0 is not in the store"):
            slide.read(Region(0, 0, 20, 20, mpp))
        if level < 2:  # the coarsest has one chunk
            assert slide.read(Region(slide.levels[0].width // 2, 0, 20, 20, mpp)).any()


@pytest.mark.parametrize("fill", [0, 255])
def test_chunks_that_were_left_out_as_empty_are_the_fill_value(tmp_path: Path, fill: int) -> None:
    pixels = np.full((256, 256, 3), 90, np.uint8)
    pixels[:128, :128] = fill
    group = zarr.create_group(tmp_path / "a.zarr", zarr_format=2)
    datasets = []
    for i, chunks in enumerate((64, 256)):
        level = pixels[:: 2**i, :: 2**i]
        array = group.create_array(str(i), shape=level.shape, dtype="u1", chunks=(chunks, chunks, 3), fill_value=fill)
        array[:] = level
        datasets.append({"path": str(i), "coordinateTransformations": [{"type": "scale", "scale": [0.5 * 2**i] * 3}]})
    axes = [{"name": name, "unit": "micrometer"} for name in "yx"] + [{"name": "c"}]
    group.attrs["multiscales"] = [{"axes": axes, "datasets": datasets}]
    assert not (tmp_path / "a.zarr" / "0" / "1.1.0").exists()
    with open_slide(tmp_path / "a.zarr") as slide:
        np.testing.assert_array_equal(slide.read(Region(0, 0, 256, 256, 0.5)), pixels)


def test_something_else_in_the_place_of_a_chunk(tmp_path: Path) -> None:
    path = write_ome_zarr(tmp_path / "a.zarr", version="0.4", axes="yxc")
    (path / "0" / "0.0.0").unlink()
    os.mkfifo(path / "0" / "0.0.0")
    (path / "0" / "1.1.0").write_bytes(bytes(1_000_000))
    with open_slide(path) as slide:
        with pytest.raises(TileReadError, match=r"0\.0\.0 is no file"):
            slide.read(Region(0, 0, 20, 20, slide.mpp))
        with pytest.raises(TileReadError, match=r"1\.1\.0 has 1000000 bytes"):
            slide.read(Region(120, 100, 20, 20, slide.mpp))


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
