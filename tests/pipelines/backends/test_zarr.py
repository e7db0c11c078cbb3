"""Zarr stores that are not textbook OME-Zarr, that are damaged, or that would run code or unpack to too much."""

import bz2
import contextlib
import gzip
import json
import lzma
import os
import pickle
import zlib

import numcodecs
import numpy as np
import pytest
import zarr
from zarr.codecs import BloscCodec, BytesCodec, GzipCodec, ZstdCodec

from pipelines.backends import zarr as zarr_backend
from pipelines.backends.registry import open_slide
from pipelines.backends.zarr_store import most_bytes, refuse_bomb
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError, TileReadError
from tests.helpers.work import result_in_child
from tests.pipelines.backends.test_slides import pyramid, write_pyramid_zarr


@pytest.fixture
def path(tmp_path):
    return write_pyramid_zarr(tmp_path / "a.zarr", axes="yxc")


def read_all(path, mpp=None):
    with open_slide(path, mpp=mpp) as slide:
        assert slide.backend == "zarr"
        return slide.read(Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp))


def update(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize("options", [{"zarr_format": k} | more for k in (2, 3) for more in ({}, {"compressors": None})])
@pytest.mark.parametrize("channels_first", [False, True])
def test_a_bare_array(tmp_path, options, channels_first):
    pixels = pyramid()[1]
    data = pixels.transpose(2, 0, 1) if channels_first else pixels
    zarr.create_array(tmp_path / "a.zarr", data=data, chunks=(64,) * 3, **options)
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr", mpp=0.5), pixels)
    with pytest.raises(SlideError, match="does not record its um/px"):
        open_slide(tmp_path / "a.zarr")


def test_a_grey_array_with_dimension_names(tmp_path):
    grey = pyramid()[1][..., 0]
    zarr.create_array(tmp_path / "a.zarr", data=grey.T, chunks=(50, 50), dimension_names=["x", "y"])
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr", mpp=0.5), np.stack([grey] * 3, axis=-1))


def test_folders_arrays_and_groups_that_are_no_image(tmp_path):
    for backend in ("auto", "zarr", "openslide"):
        with pytest.raises(SlideError, match="this folder is no Zarr slide"):
            open_slide(tmp_path, backend=backend)
    zarr.create_array(tmp_path / "a.zarr", data=np.zeros((4, 64, 64), np.uint8), chunks=(1, 64, 64))
    with pytest.raises(SlideError, match=r"must be \(height, width, 3\)"):
        open_slide(tmp_path / "a.zarr", mpp=0.5)
    zarr.create_group(tmp_path / "b.zarr").create_array("lungs", data=np.zeros((4, 4), np.uint8))
    with pytest.raises(SlideError, match=r"no `multiscales`.* it holds lungs"):
        open_slide(tmp_path / "b.zarr")


def test_scales_of_the_dataset_and_of_the_image_multiply(path):
    multiscales = json.loads((path / ".zattrs").read_text())["multiscales"]
    multiscales[0]["coordinateTransformations"] = [{"type": "scale", "scale": [2, 2, 1]}]
    update(path / ".zattrs", multiscales=multiscales)
    with open_slide(path) as slide:
        assert slide.mpp == pytest.approx(0.5)


@pytest.mark.parametrize("text", ["{", '{"multiscales": [{}]}', '{"multiscales": 5}', "[]"])
def test_broken_metadata(path, text):
    (path / ".zattrs").write_text(text)
    with pytest.raises(SlideError, match=r"a\.zarr: "):
        open_slide(path)


@pytest.mark.parametrize(
    ("change", "words"),
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
        (None, "cannot be used"),
    ],
)
def test_impossible_or_missing_metadata_of_an_array(path, change, words):
    if change is None:
        (path / "2" / ".zarray").unlink()
    else:
        update(path / "0" / ".zarray", **change)
    with pytest.raises(SlideError, match=words):
        open_slide(path)


@pytest.mark.parametrize(
    ("old", "new", "words"),
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
        ('"path": "0"', '"path": "../other"', "lies outside the store"),
    ],
)
def test_axes_scales_and_paths_that_are_not_understood(path, old, new, words):
    text = json.dumps(json.loads((path / ".zattrs").read_text()))
    assert old in text
    (path / ".zattrs").write_text(text.replace(old, new))
    with pytest.raises(SlideError, match=words):
        open_slide(path)


@pytest.mark.parametrize(
    ("colours", "is_rgb"),
    [
        (["ff0000", "00FF00", "0000ff"], True),
        (["FFFFFF", "00FF00", "0000FF"], True),
        (["00FF00", "00FF00", "00FF00"], True),
        ([None, None, None], True),
        (["0000FF", "00FF00", "FF0000"], False),
    ],
)
def test_three_channels_of_other_colours_are_not_read_as_rgb(path, colours, is_rgb):
    update(path / ".zattrs", omero={"channels": [{"color": colour} for colour in colours]})
    refused = pytest.raises(SlideError, match="channels have the colours 0000FF, 00FF00, FF0000")
    with contextlib.nullcontext() if is_rgb else refused, open_slide(path) as slide:
        assert len(slide.levels) == 4


def test_chunks_that_are_damaged_or_something_else_fail_alone(path):
    (path / "0" / "0.1.0").write_bytes(b"\0" * 100)
    (path / "0" / "0.0.0").unlink()
    os.mkfifo(path / "0" / "0.0.0")
    (path / "0" / "1.1.0").write_bytes(bytes(1_000_000))
    with open_slide(path) as slide:
        for x, y, words in (
            (113, 0, r"level 0, x 113, y 0, .*the chunk is damaged"),
            (0, 0, r"0\.0\.0 is no file"),
            (120, 100, r"1\.1\.0 has 1000000 bytes"),
        ):
            with pytest.raises(TileReadError, match=words):
                slide.read(Region(x, y, 20, 20, slide.mpp))
        np.testing.assert_array_equal(slide.read(Region(0, 97, 113, 97, slide.mpp)), pyramid()[0][97:194, :113])


@pytest.mark.parametrize("version", ["0.4", "0.5"])
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_lost_chunk_is_not_read_as_black(tmp_path, version, level):
    path = write_pyramid_zarr(tmp_path / "a.zarr", version=version, axes="yxc")
    (path / str(level) / ("c/0/0/0" if version == "0.5" else "0.0.0")).unlink()
    with open_slide(path) as slide:
        mpp = slide.levels[level].mpp
        with pytest.raises(TileReadError, match=rf"level {level}, chunk 0\.0\.0 is not in the store"):
            slide.read(Region(0, 0, 20, 20, mpp))
        if level < 2:  # the coarsest has one chunk
            assert slide.read(Region(slide.levels[0].width // 2, 0, 20, 20, mpp)).any()


def test_only_the_chunks_of_a_region_are_read(path):
    for chunk in (path / "0").glob("[0-9]*"):
        if chunk.name not in ("1.1.0", "1.2.0"):
            chunk.write_bytes(b"damaged")
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(200, 100, 100, 90, slide.mpp)), pyramid()[0][100:190, 200:300])


def test_bands_end_where_chunks_end(path, monkeypatch):
    monkeypatch.setattr(zarr_backend, "BAND_BYTES", 1)
    np.testing.assert_array_equal(read_all(path), pyramid()[0])
    with open_slide(path) as slide:
        np.testing.assert_array_equal(slide.read(Region(5, 90, 50, 300, slide.mpp)), pyramid()[0][90:390, 5:55])


@pytest.mark.parametrize("fill", [0, 255])
def test_chunks_that_were_left_out_as_empty_are_the_fill_value(tmp_path, fill):
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
    np.testing.assert_array_equal(read_all(tmp_path / "a.zarr"), pixels)


class Payload:
    """Makes the file ``marker`` when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize(("key", "words"), [("compressor", "compressor 'pickle'"), ("filters", "filter 'pickle'")])
@pytest.mark.parametrize("dtype", ["|u1", "|O"])
def test_a_pickle_codec_is_refused_by_name_and_not_run(path, tmp_path, key, words, dtype):
    codec = {"id": "pickle", "protocol": 5}
    changes = {"compressor": None, "dtype": dtype, key: [codec] if key == "filters" else codec}
    update(path / "0" / ".zarray", **changes)
    for chunk in (path / "0").glob("[0-9]*"):
        chunk.write_bytes(pickle.dumps(Payload(tmp_path / "ran")))
    with pytest.raises(SlideError, match=rf"array '0' asks for the {words}"), open_slide(path) as slide:
        slide.read(Region(0, 0, 64, 64, slide.mpp))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["numcodecs.pickle", "vlen-bytes", "imagecodecs_jpeg2k"])
@pytest.mark.parametrize("within_shards", [False, True])
def test_a_codec_of_format_3_is_refused_by_name(tmp_path, name, within_shards):
    path = tmp_path / "a.zarr"
    zarr.create_array(path, data=pyramid()[1], chunks=(32, 32, 3), shards=(64, 64, 3) if within_shards else None)
    about = json.loads((path / "zarr.json").read_text())
    codecs = about["codecs"][0]["configuration"]["codecs"] if within_shards else about["codecs"]
    codecs.append({"name": name, "configuration": {}})
    (path / "zarr.json").write_text(json.dumps(about))
    with pytest.raises(SlideError, match=f"asks for the codec '{name}'"):
        open_slide(path, mpp=0.5)


def test_consolidated_metadata_are_not_looked_at(path):
    about = json.loads((path / "0" / ".zarray").read_text()) | {"filters": [{"id": "pickle"}]}
    (path / ".zmetadata").write_text(json.dumps({"zarr_consolidated_format": 1, "metadata": {"0/.zarray": about}}))
    np.testing.assert_array_equal(read_all(path), pyramid()[0])


BOMB = bytes(8 << 20)
MOST = most_bytes((64, 64, 3))
PACKED = {
    "gzip": gzip.compress,
    "zlib": zlib.compress,
    "bz2": bz2.compress,
    "lzma": lzma.compress,
    "blosc": numcodecs.Blosc().encode,
    "zstd": numcodecs.Zstd().encode,
    "lz4": numcodecs.LZ4().encode,
}


@pytest.mark.parametrize("kind", PACKED)
def test_a_chunk_of_format_2_that_unpacks_to_too_much_is_refused(tmp_path, kind):
    path, pixels = tmp_path / "a.zarr", pyramid()[0][:128, :128]
    codec = numcodecs.get_codec({"id": kind})
    zarr.create_array(path, data=pixels, chunks=(64, 64, 3), compressors=codec, zarr_format=2)
    np.testing.assert_array_equal(read_all(path, mpp=0.5), pixels)
    (path / "0.0.0").write_bytes(bytes(PACKED[kind](BOMB)))
    with pytest.raises(TileReadError, match="unpack to more than"):
        read_all(path, mpp=0.5)


@pytest.mark.parametrize(("kind", "codec"), [("gzip", GzipCodec()), ("zstd", ZstdCodec()), ("blosc", BloscCodec())])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_chunk_of_format_3_that_unpacks_to_too_much_is_refused(tmp_path, kind, codec, sharded):
    path, pixels, shards = tmp_path / "a.zarr", pyramid()[0][:128, :128], (128, 128, 3) if sharded else None
    zarr.create_array(path, data=pixels, chunks=(64, 64, 3), shards=shards, compressors=[codec])
    np.testing.assert_array_equal(read_all(path, mpp=0.5), pixels)
    bomb = bytes(PACKED[kind](BOMB))
    if sharded:
        sizes = {"shape": (4096, 4096, 3), "chunks": (2048, 2048, 3), "shards": (4096, 4096, 3)}
        options = {"dtype": "u1", "compressors": [codec], "serializer": BytesCodec(), "fill_value": 9}
        zarr.create_array(tmp_path / "b.zarr", **sizes, **options)[...] = 0
        bomb = (tmp_path / "b.zarr" / "c" / "0" / "0" / "0").read_bytes()
    (path / "c" / "0" / "0" / "0").write_bytes(bomb)
    with pytest.raises(TileReadError, match="unpack to more than"):
        read_all(path, mpp=0.5)


def zstd_without_size(size):
    """A frame without a content size: window descriptor, and blocks of 128 KiB zeros (RFC 8878, 3.1.1.2)."""
    blocks = size >> 17
    packed = b"".join((1 << 20 | 2 | (i == blocks - 1)).to_bytes(3, "little") + b"\0" for i in range(blocks))
    return b"\x28\xb5\x2f\xfd\x00\x58" + packed


def test_streams_one_after_the_other_and_frames_without_a_size_are_counted():
    small = gzip.compress(bytes(MOST // 2))
    refuse_bomb("gzip", small * 2, MOST)
    refuse_bomb("zstd", zstd_without_size(1 << 17), 1 << 17)
    for kind, data, most in (("gzip", small * 3, MOST), ("zstd", zstd_without_size(1 << 18), (1 << 18) - 1)):
        with pytest.raises(ValueError, match="unpack to more than"):
            refuse_bomb(kind, data, most)


@pytest.mark.parametrize("kind", sorted({*PACKED} - {"lz4"}))
def test_damaged_data_are_left_to_the_decoder(kind):
    for data in (b"", b"\x28\xb5\x2f\xfd", bytes(PACKED[kind](BOMB[:4096]))[:9], bytes(30)):
        refuse_bomb(kind, data, MOST)


@pytest.mark.process
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_can_read_after_its_parent_has(path):
    """Zarr runs an event loop in a thread, which a fork does not carry over."""
    expected = read_all(path)
    np.testing.assert_array_equal(result_in_child(read_all, path), expected)
