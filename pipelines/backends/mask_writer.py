"""Masks written band by band, in a tiled TIFF or a PNG, as ``mask`` reads them.

Takes a path, a size and the class ids from top to bottom; a TIFF is never in memory whole.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.mask import PNG_BYTES
from pipelines.backends.tiff_writer import DEFLATE_MASK, TILE, TiffWriter, encode_mask
from pipelines.slides.geometry import Size

BAND_ROWS = TILE
"""Height of the bands a mask is written in; the last may be less."""


def write_mask(path: Path, size: Size, mpp: float, bands: Iterable[NDArray[np.uint8]]) -> None:
    """Write a mask of one byte per px, as PNG or TIFF by the suffix of ``path``.

    Args:
        path: the file to make.
        size: of the mask in px.
        mpp: um/px, which a TIFF states.
        bands: uint8 (``BAND_ROWS``, size.width) from top to bottom, the last with what is left.

    Raises:
        ValueError: a PNG above ``PNG_BYTES``, which could not be read back.
        OSError: the disk is full or the folder not writable.
    """
    if path.suffix.lower() == ".png":
        if size.pixels > PNG_BYTES:
            raise ValueError(
                f"a mask of {size.width} x {size.height} px is too large for a PNG, which may have "
                f"{PNG_BYTES >> 20} Mpx: write a .tif, or ask for a coarser --mpp"
            )
        path.write_bytes(imagecodecs.png_encode(np.concatenate(list(bands))))
        return
    with TiffWriter(path, [size], DEFLATE_MASK, mpp, "class ids") as writer:
        for row, band in enumerate(bands):
            for column in range(writer.grid(0).width):
                tile = np.zeros((TILE, TILE), np.uint8)
                part = band[:, column * TILE : (column + 1) * TILE]
                tile[: part.shape[0], : part.shape[1]] = part
                writer.write_tile(0, column, row, encode_mask(tile))
