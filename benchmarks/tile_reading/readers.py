"""Readers under comparison: each takes a square of level 0 and gives the seconds it took.

All open the file once and keep it open, use one thread, and end with RGB pixels in an array. The bare decoder is the
bound: libjpeg-turbo on the compressed tiles that the square touches, already in memory, into one reused buffer.
"""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import openslide
import simplejpeg
import tifffile
import zarr

from benchmarks.tile_reading.slide import TILE
from benchmarks.timing import Took, clocked
from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region

Reader: TypeAlias = Callable[[int, int, int], Took]
"""(l0_x, l0_y, side) in px to seconds."""


def readers(path: Path, largest: int) -> dict[str, Reader]:
    """Return all readers by name; squares are of ``largest`` px at most."""
    return {
        "megatile": megatile(path),
        "megatile into a given array": megatile_into(path, largest),
        "bare decoder": bare_decoder(path),
        "openslide": openslide_rgb(path),
        "tifffile + zarr": tifffile_zarr(path),
    }


def megatile(path: Path) -> Reader:
    slide = open_slide(path, backend="tiled")
    return _timed(lambda x, y, side: slide.read(Region(x, y, side, side, slide.mpp)))


def megatile_into(path: Path, largest: int) -> Reader:
    """Read into memory that is used again, as the stream does."""
    slide = open_slide(path, backend="tiled")
    memory = np.ones(3 * largest * largest, np.uint8)
    return _timed(
        lambda x, y, side: slide.read(
            Region(x, y, side, side, slide.mpp), memory[: 3 * side * side].reshape(side, side, 3)
        )
    )


def openslide_rgb(path: Path) -> Reader:
    slide = openslide.OpenSlide(path)
    return _timed(lambda x, y, side: np.asarray(slide.read_region((x, y), 0, (side, side)).convert("RGB")))


def tifffile_zarr(path: Path) -> Reader:
    store = tifffile.imread(path, aszarr=True)
    atexit.register(store.close)  # it warns of a file that is left open
    array = zarr.open(store, mode="r")
    assert isinstance(array, zarr.Array)
    return _timed(lambda x, y, side: array[y : y + side, x : x + side])


def bare_decoder(path: Path) -> Reader:
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages.first
        columns, extents = -(-page.imagewidth // TILE), list(zip(page.dataoffsets, page.databytecounts, strict=True))
        assert page.jpegtables is None, "the benchmark's slide has its tables in each tile"
    descriptor = os.open(path, os.O_RDONLY)
    pixels = np.empty((TILE, TILE, 3), np.uint8)

    def compressed(x: int, y: int, side: int) -> list[bytes]:
        tiles = [
            row * columns + column
            for row in range(y // TILE, -(-(y + side) // TILE))
            for column in range(x // TILE, -(-(x + side) // TILE))
        ]
        return [os.pread(descriptor, extents[tile][1], extents[tile][0]) for tile in tiles]

    def decode(tiles: list[bytes]) -> None:
        for tile in tiles:
            simplejpeg.decode_jpeg(tile, "RGB", buffer=pixels)

    return lambda x, y, side: clocked(decode, compressed(x, y, side))


def _timed(read: Callable[[int, int, int], object]) -> Reader:
    return lambda x, y, side: clocked(read, x, y, side)
