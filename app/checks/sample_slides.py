"""Tiny slides of every kind that a backend reads, to see whether the backend works on this machine.

Takes a folder; leaves a pyramidal JPEG TIFF, a Hamamatsu NDPI with restart markers, an OME-Zarr 0.4 and a PNG of the
same picture in it. Zarr and NDPI are written byte by byte: what reads them is being tested, not what writes them.
"""

from __future__ import annotations

import json
import struct
from pathlib import Path

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.tiff_writer import JPEG, TILE, TiffWriter, encode_jpeg
from pipelines.slides.geometry import Size
from pipelines.slides.slide import Pixels

SIDE = 2 * TILE
MPP = 0.5


def sample_picture() -> Pixels:
    """Return soft colours, uint8 (``SIDE``, ``SIDE``, 3): JPEG keeps them to within a few grey levels."""
    x, y = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    return np.stack([x * 255 // SIDE, y * 255 // SIDE, 128 + 0 * x], axis=-1).astype(np.uint8)


def write_samples(folder: Path) -> dict[str, Path]:
    """Write the slides into ``folder``; return backend -> the slide it is to read."""
    picture = sample_picture()
    tiff, ndpi, zarr, png = (folder / name for name in ("sample.tif", "sample.ndpi", "sample.ome.zarr", "sample.png"))
    _write_tiff(tiff, picture)
    ndpi.write_bytes(_ndpi(picture))
    _write_zarr(zarr, picture)
    png.write_bytes(_encoded(".png", picture, []))
    return {"tiled": tiff, "ndpi": ndpi, "zarr": zarr, "openslide": tiff, "image": png}


def _write_tiff(path: Path, picture: Pixels) -> None:
    with TiffWriter(path, [Size(SIDE, SIDE), Size(TILE, TILE)], JPEG, MPP, "MegaTile sample") as writer:
        for row in range(2):
            for column in range(2):
                tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
                writer.write_tile(0, column, row, encode_jpeg(np.ascontiguousarray(tile), quality=95))
        writer.write_tile(1, 0, 0, encode_jpeg(_half(picture), quality=95))


def _half(picture: Pixels) -> Pixels:
    return np.asarray(cv2.resize(picture, (TILE, TILE), interpolation=cv2.INTER_AREA), np.uint8)


def _encoded(kind: str, picture: Pixels, options: list[int]) -> bytes:
    encoded: NDArray[np.uint8] = cv2.imencode(kind, picture[..., ::-1], options)[1]
    return encoded.tobytes()


def _write_zarr(path: Path, picture: Pixels) -> None:
    """Write one uncompressed array (c, y, x) in chunks of ``TILE`` px, Zarr version 2."""
    array = path / "0"
    array.mkdir(parents=True)
    axes = [{"name": "c", "type": "channel"}] + [{"name": n, "type": "space", "unit": "micrometer"} for n in "yx"]
    scale = [{"type": "scale", "scale": [1.0, MPP, MPP]}]
    image = {"version": "0.4", "axes": axes, "datasets": [{"path": "0", "coordinateTransformations": scale}]}
    shape = {"shape": [3, SIDE, SIDE], "chunks": [3, TILE, TILE], "dtype": "|u1", "order": "C"}
    rest = {"zarr_format": 2, "compressor": None, "filters": None, "fill_value": 0}
    (path / ".zgroup").write_text(json.dumps({"zarr_format": 2}))
    (path / ".zattrs").write_text(json.dumps({"multiscales": [image]}))
    (array / ".zarray").write_text(json.dumps(shape | rest))
    for row in range(2):
        for column in range(2):
            tile = picture[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE]
            (array / f"0.{row}.{column}").write_bytes(tile.transpose(2, 0, 1).tobytes())


def _ndpi(picture: Pixels) -> bytes:
    """Return one level as one JPEG stream with a restart marker after each row of MCUs, their starts in tag 65426."""
    across = SIDE // 16  # MCUs of 16 px: chroma is halved in both directions
    stream = _encoded(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 95, cv2.IMWRITE_JPEG_RST_INTERVAL, across])
    scan = stream.index(b"\xff\xda")
    scan += 2 + int.from_bytes(stream[scan + 2 : scan + 4], "big")
    restarts = [at + 2 for at in range(scan, len(stream) - 1) if stream[at] == 0xFF and 0xD0 <= stream[at + 1] <= 0xD7]
    starts = struct.pack(f"<{1 + len(restarts)}I", scan, *restarts)
    at_stream, at_resolution = 16, 16 + len(stream)
    at_starts = at_resolution + 8
    at_page = at_starts + len(starts)
    short, long, rational, signed, floating = 3, 4, 5, 9, 11
    lens = int.from_bytes(struct.pack("<f", 20.0), "little")
    entries = [
        (256, long, 1, SIDE), (257, long, 1, SIDE), (258, short, 1, 8), (259, short, 1, 7), (262, short, 1, 6),
        (273, long, 1, at_stream), (277, short, 1, 3), (278, long, 1, SIDE), (279, long, 1, len(stream)),
        (282, rational, 1, at_resolution), (283, rational, 1, at_resolution), (296, short, 1, 3),
        (65420, short, 1, 1), (65421, floating, 1, lens), (65424, signed, 1, 0),
        (65426, long, 1 + len(restarts), at_starts),
    ]  # fmt: skip
    page = struct.pack("<H", len(entries)) + b"".join(struct.pack("<HHII", *entry) for entry in entries)
    resolution = struct.pack("<II", round(1e4 / MPP), 1)
    # After a page stand 8 bytes for the next one, then the upper halves of all its values.
    head = b"II*\0" + struct.pack("<Q", at_page) + bytes(4)
    return head + stream + resolution + starts + page + bytes(8 + 4 * len(entries))
