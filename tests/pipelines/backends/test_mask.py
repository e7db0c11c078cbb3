"""Every way to store a mask against the array that was stored."""

from __future__ import annotations

import os
import struct
import tracemalloc
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import imagecodecs
import numpy as np
import pytest
import tifffile

from pipelines.backends.mask import ArrayMask, TiffMask, open_mask
from pipelines.slides.slide import SlideError

VALUES = (np.add.outer(np.arange(700) // 90, np.arange(530) // 70) % 4).astype(np.uint8)

TIFFS: dict[str, dict[str, Any]] = {
    "tiled": {"tile": (128, 256), "compression": "deflate"},
    "tiled lzw predictor": {"tile": (128, 128), "compression": "lzw", "predictor": 2},
    "tiled uncompressed": {"tile": (64, 64)},
    "strips": {"rowsperstrip": 50, "compression": "deflate"},
    "one strip": {},
    "palette": {"tile": (128, 128), "compression": "deflate", "photometric": "palette"}
    | {"colormap": np.zeros((3, 256), np.uint16)},
    "big-endian": {"tile": (128, 128), "compression": "deflate", "byteorder": ">"},
    "bigtiff": {"tile": (128, 128), "compression": "deflate", "bigtiff": True},
}


def sampled(mask: Any, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
    out = np.full((len(rows), len(columns)), 99, np.uint8)
    mask.sample(columns, rows, out)
    return out


def expected(values: np.ndarray, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
    height, width = values.shape
    picked = values[np.clip(rows, 0, height - 1)][:, np.clip(columns, 0, width - 1)]
    here = ((rows >= 0) & (rows < height))[:, None] & ((columns >= 0) & (columns < width))[None, :]
    return np.where(here, picked, 0)


def check(mask: Any, values: np.ndarray) -> None:
    assert (mask.height, mask.width) == values.shape
    assert mask.values() == set(np.unique(values).tolist())
    for first, step, n in [
        (0, 1, 530),
        (-40, 1, 700),
        (129, 1, 3),
        (-9, 3.7, 300),
        (100, 0.24, 90),
        (900, 1, 5),
        (-9, 1, 4),
    ]:
        columns = np.floor(first + np.arange(n) * step).astype(np.int64)
        rows = np.floor(first + 11 + np.arange(n // 2 + 1) * step).astype(np.int64)
        np.testing.assert_array_equal(sampled(mask, columns, rows), expected(values, columns, rows))


@pytest.mark.parametrize(
    ("kind", "dtype"), [(k, d) for k in TIFFS for d in (np.uint8, np.uint16) if (k, d) != ("palette", np.uint16)]
)
def test_tiff(tmp_path: Path, kind: str, dtype: type) -> None:
    tifffile.imwrite(tmp_path / "m.tif", VALUES.astype(dtype), **TIFFS[kind])
    check(open_mask(tmp_path / "m.tif"), VALUES)
    if kind != "one strip":
        check(TiffMask(tmp_path / "m.tif"), VALUES)


@pytest.mark.parametrize("tile", [None, (128, 128)])
def test_bits(tmp_path: Path, tile: tuple[int, int] | None) -> None:
    values = VALUES > 1
    tifffile.imwrite(tmp_path / "m.tif", values, tile=tile, compression="deflate", photometric="minisblack")
    check(open_mask(tmp_path / "m.tif"), values.astype(np.uint8))


def test_only_the_first_level_of_a_pyramid_counts(tmp_path: Path) -> None:
    with tifffile.TiffWriter(tmp_path / "m.tif") as file:
        file.write(VALUES, tile=(128, 128), compression="deflate", subifds=1)
        file.write(VALUES[::2, ::2] + 100, tile=(128, 128), compression="deflate", subfiletype=1)
    check(open_mask(tmp_path / "m.tif"), VALUES)


def test_pieces_that_the_file_leaves_out_are_background(tmp_path: Path) -> None:
    piece = zlib.compress(np.full((128, 128), 3, np.uint8).tobytes())
    pieces = iter([b"", piece, piece, b""])
    tifffile.imwrite(
        tmp_path / "m.tif", pieces, shape=(256, 256), dtype=np.uint8, tile=(128, 128), compression="deflate"
    )
    values = np.zeros((256, 256), np.uint8)
    values[:128, 128:] = values[128:, :128] = 3
    check(open_mask(tmp_path / "m.tif"), values)


@pytest.mark.parametrize("level", [0, 9])
def test_png(tmp_path: Path, level: int) -> None:
    (tmp_path / "m.png").write_bytes(imagecodecs.png_encode(VALUES, level=level))
    check(open_mask(tmp_path / "m.png"), VALUES)
    (tmp_path / "grey.png").write_bytes(imagecodecs.png_encode(np.repeat(VALUES[:, :, None], 3, axis=2), level=level))
    check(open_mask(tmp_path / "grey.png"), VALUES)


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_png_palette_and_few_bits_give_stored_values(tmp_path: Path, bits: int) -> None:
    values = (VALUES[:, :512] * 67 + 5) & ((1 << bits) - 1)
    palette = [colour for i in range(1 << bits) for colour in (i * 40 % 256, 255 - i, 7)]
    for name, colour_type in [("palette", 3), ("grey", 0)]:
        packed = np.packbits(
            np.unpackbits(values[:, :, None], axis=2)[:, :, 8 - bits :].reshape(len(values), -1), axis=1
        )
        rows = np.pad(packed, ((0, 0), (1, 0)))
        chunks = [b"IHDR" + np.array([512, 700], ">u4").tobytes() + bytes([bits, colour_type, 0, 0, 0])]
        chunks += [b"PLTE" + bytes(palette)] if colour_type == 3 else []
        chunks += [b"IDAT" + zlib.compress(rows.tobytes()), b"IEND"]
        data = b"\x89PNG\r\n\x1a\n" + b"".join(
            (len(c) - 4).to_bytes(4, "big") + c + zlib.crc32(c).to_bytes(4, "big") for c in chunks
        )
        (tmp_path / f"{name}.png").write_bytes(data)
        check(open_mask(tmp_path / f"{name}.png"), values)


def test_a_large_mask_is_read_piece_by_piece(tmp_path: Path) -> None:
    side, tile = 100_000, 512
    across = -(-side // tile)
    background = zlib.compress(np.zeros((tile, tile), np.uint8).tobytes())
    drawn = zlib.compress((np.arange(tile * tile) % tile // 300).astype(np.uint8).tobytes())

    def pieces() -> Iterator[bytes]:
        yield from (drawn if i == 100 * across + 150 else background for i in range(across * across))

    tifffile.imwrite(
        tmp_path / "m.tif", pieces(), shape=(side, side), dtype=np.uint8, tile=(tile, tile), compression="deflate"
    )
    tracemalloc.start()
    mask = open_mask(tmp_path / "m.tif")
    assert mask.values() == {0, 1}
    got = sampled(mask, np.arange(150 * tile - 700, 150 * tile + 1348), np.arange(100 * tile - 5, 100 * tile + 2043))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert np.argwhere(got)[[0, -1]].tolist() == [[5, 1000], [5 + 511, 1211]]
    assert peak_bytes < 40 << 20


def test_files_are_closed(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "m.tif", VALUES, **TIFFS["tiled"])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        sampled(open_mask(tmp_path / "m.tif"), np.arange(5), np.arange(5))
    assert len(os.listdir("/proc/self/fd")) == before


def broken_tiff(tmp_path: Path, *, cut: int | None = None, rot: bool = False) -> Path:
    path = tmp_path / "m.tif"
    tifffile.imwrite(path, VALUES, **TIFFS["tiled"])
    data = bytearray(path.read_bytes())
    if rot:
        with tifffile.TiffFile(path) as file:
            at = file.pages.first.dataoffsets[4]
        data[at : at + 30] = b"\xff" * 30
    path.write_bytes(data[:cut])
    return path


def test_damaged_files_are_named(tmp_path: Path) -> None:
    rotten = open_mask(broken_tiff(tmp_path, rot=True))
    with pytest.raises(SlideError, match=r"m\.tif is damaged: piece 4"):
        sampled(rotten, np.arange(530), np.arange(700))
    for cut in (0, 3, 9, 200):
        with pytest.raises(SlideError, match=r"m\.tif (cannot be read|is cut off|must have)"):
            open_mask(broken_tiff(tmp_path, cut=cut))
    (tmp_path / "m.png").write_bytes(imagecodecs.png_encode(VALUES)[:100])
    with pytest.raises(SlideError, match=r"m\.png is damaged"):
        open_mask(tmp_path / "m.png")
    with pytest.raises(SlideError, match=r"gone\.png cannot be read"):
        open_mask(tmp_path / "gone.png")
    with pytest.raises(SlideError, match=r"gone\.tif cannot be read"):
        open_mask(tmp_path / "gone.tif")


def test_what_is_no_mask_is_refused(tmp_path: Path) -> None:
    colour = np.stack([VALUES, VALUES + 1, VALUES], axis=2)
    tifffile.imwrite(tmp_path / "rgb.tif", colour, tile=(128, 128), compression="deflate", photometric="rgb")
    with pytest.raises(SlideError, match=r"rgb\.tif must have one channel"):
        open_mask(tmp_path / "rgb.tif")
    tifffile.imwrite(tmp_path / "float.tif", VALUES.astype(np.float32), tile=(128, 128))
    with pytest.raises(SlideError, match="whole numbers"):
        open_mask(tmp_path / "float.tif")
    (tmp_path / "rgb.png").write_bytes(imagecodecs.png_encode(colour))
    with pytest.raises(SlideError, match=r"rgb\.png must have one channel"):
        open_mask(tmp_path / "rgb.png")
    tifffile.imwrite(tmp_path / "many.tif", VALUES.astype(np.uint16) + 500, tile=(128, 128), compression="deflate")
    with pytest.raises(SlideError, match="it holds 500"):
        sampled(open_mask(tmp_path / "many.tif"), np.arange(5), np.arange(5))


def test_one_huge_compressed_strip_is_refused(tmp_path: Path) -> None:
    side = 17_000
    strip = zlib.compress(np.zeros((side, side), np.uint8).tobytes(), 1)
    tifffile.imwrite(
        tmp_path / "m.tif", iter([strip]), shape=(side, side), dtype=np.uint8, rowsperstrip=side, compression="deflate"
    )
    with pytest.raises(SlideError, match="Save it as a tiled TIFF"):
        open_mask(tmp_path / "m.tif")


def test_an_uncompressed_file_is_not_loaded(tmp_path: Path) -> None:
    tifffile.imwrite(tmp_path / "m.tif", VALUES)
    mask = open_mask(tmp_path / "m.tif")
    assert isinstance(mask, ArrayMask)
    assert mask.nbytes == 0


def test_a_pipe_is_no_mask(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "m.png")
    with pytest.raises(SlideError, match="must be a file"):
        open_mask(tmp_path / "m.png")


@pytest.mark.parametrize("change", ["count", "order"])
def test_a_damaged_tag_is_not_replaced_by_its_default(tmp_path: Path, change: str) -> None:
    """Without its BitsPerSample a mask of classes was read as one of 0 and 1."""
    path = tmp_path / "m.tif"
    tifffile.imwrite(path, VALUES, **TIFFS["tiled"])
    data = bytearray(path.read_bytes())
    at = data.index(struct.pack("<HHI", 258, 3, 1))
    if change == "count":
        data[at + 4 : at + 8] = struct.pack("<I", 0x7FFFFFFF)
    else:
        data[at : at + 2] = struct.pack("<H", 296)
    path.write_bytes(data)
    with pytest.raises(SlideError, match=r"mask .*m\.tif cannot be read as TIFF: it is damaged: .*(258|out of order)"):
        open_mask(path)


def test_only_our_errors_for_any_damage_to_the_head(tmp_path: Path) -> None:
    chance = np.random.default_rng(5)
    tifffile.imwrite(tmp_path / "m.tif", VALUES, **TIFFS["tiled"])
    (tmp_path / "m.png").write_bytes(imagecodecs.png_encode(VALUES))
    for name in ("m.tif", "m.png"):
        whole = (tmp_path / name).read_bytes()
        for _ in range(150):
            data = bytearray(whole)
            for at in chance.integers(4, min(400, len(data)), chance.integers(1, 4)):
                data[at] = chance.choice([0, 1, 2, 0x7F, 0x80, 0xFF])
            path = tmp_path / f"damaged-{name}"
            path.write_bytes(data)
            try:
                open_mask(path).values()
            except SlideError as fault:
                assert "damaged-m" in str(fault)  # noqa: PT017 - one of many outcomes
