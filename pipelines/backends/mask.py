"""Masks: pictures whose values are class ids, whatever the file.

Takes the path of a TIFF, a PNG or a DICOM Segmentation, gives a ``Mask`` that answers values at
asked px. Small ones are decoded once, uncompressed TIFFs are mapped into memory, everything else is read piece by piece
(``mask_tiff``, ``mask_seg``).
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.mask_seg import SegMask
from pipelines.backends.mask_tiff import TiffMask, byte_values, nearest
from pipelines.slides.slide import SlideError

WHOLE_PIXELS = 64 << 20
"""A striped TIFF up to this size is decoded once; reading a tile of it would decode whole rows again and again."""

BAND_ROWS = 1024

PNG_BYTES = 1 << 30
"""Largest picture that is decoded; of those above ``WHOLE_PIXELS`` one at a time."""

CHANNELS = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}
"""Of a decoded PNG, by colour type."""

_large = threading.Lock()


class Mask(Protocol):
    """Class values on a grid of pixels. Safe in many threads."""

    path: Path
    width: int
    height: int
    names: Mapping[int, str]
    """Classes by value where the file names them itself; empty where ``classes.txt`` does."""

    @property
    def nbytes(self) -> int:
        """Memory held while it is open."""
        ...

    def sample(self, columns: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        """Values at the crossings of ``columns`` (w,) and ``rows`` (h,), both ascending; 0 outside; ``out`` (h, w).

        Raises:
            SlideError: the file is damaged here, or a value does not fit into a byte.
        """
        ...

    def values(self) -> set[int]:
        """Return all values that occur."""
        ...


class ArrayMask:
    """A ``Mask`` in memory, or mapped into it."""

    names: Mapping[int, str] = MappingProxyType({})

    def __init__(self, path: Path, pixels: NDArray[np.integer]) -> None:
        self.path = path
        self.height, self.width = pixels.shape
        self._pixels = pixels.view(np.uint8) if pixels.dtype == bool else pixels

    @property
    def nbytes(self) -> int:
        return 0 if isinstance(self._pixels, np.memmap) else self._pixels.nbytes

    def sample(self, columns: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        out[...] = 0
        x0, x1 = np.searchsorted(columns, [0, self.width])
        y0, y1 = np.searchsorted(rows, [0, self.height])
        if x0 < x1 and y0 < y1:
            out[y0:y1, x0:x1] = byte_values(nearest(self._pixels, columns[x0:x1], rows[y0:y1]), self.path)

    def values(self) -> set[int]:
        values: set[int] = set()
        for row in range(0, self.height, BAND_ROWS):
            values.update(np.unique(self._pixels[row : row + BAND_ROWS]).tolist())
        return values


def open_mask(path: Path) -> Mask:
    """Open a mask file, by its suffix: .dcm, .png, or TIFF.

    Raises:
        SlideError: it cannot be read, or has several channels that differ.
    """
    if not path.is_file():
        raise SlideError(
            f"mask {path} cannot be read: it must be a file; there is none, or a pipe or folder of that name"
        )
    if path.suffix.lower() == ".png":
        return ArrayMask(path, _png_values(path))
    if path.suffix.lower() == ".dcm":
        return SegMask(path)
    mask = TiffMask(path)
    try:
        with tifffile.TiffFile(path) as file:
            page = file.pages.first
            if page.is_memmappable:
                dtype = page.dtype.newbyteorder(file.byteorder)
                return ArrayMask(path, np.memmap(path, dtype, "r", page.dataoffsets[0], page.shape))
            is_tiled = page.is_tiled
    except Exception as fault:  # tifffile raises nearly anything on damaged files
        raise SlideError(f"mask {path} cannot be read as TIFF: {fault}. Save it again") from fault
    if not is_tiled and mask.width * mask.height <= WHOLE_PIXELS:
        return ArrayMask(path, _whole(mask))
    return mask


def _whole(mask: TiffMask) -> NDArray[np.uint8]:
    pixels = np.empty((mask.height, mask.width), np.uint8)
    mask.sample(np.arange(mask.width), np.arange(mask.height), pixels)
    return pixels


def _png_values(path: Path) -> NDArray[np.integer]:
    """The values as stored: palette indices, and grey values of 1, 2 and 4 bits, which decoders spread over 0..255."""
    try:
        data = path.read_bytes()
        # PNG specification, 11.2.2 IHDR: width, height, bits of a sample, colour type. A file of a kilobyte can ask for
        # terabytes.
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        size_bytes = width * height * CHANNELS.get(data[25], 4) * (2 if data[24] > 8 else 1)
        if size_bytes > PNG_BYTES:
            raise SlideError(
                f"mask {path} is {width} x {height} px, {size_bytes >> 20} MiB decoded; a PNG may have "
                f"{PNG_BYTES >> 20}. Save it as a tiled TIFF"
            )
        with _large if size_bytes > WHOLE_PIXELS else contextlib.nullcontext():
            pixels: NDArray[np.integer] = imagecodecs.png_decode(data)
    except OSError as fault:
        raise SlideError(f"mask {path} cannot be read: {fault.strerror or fault}") from fault
    except SlideError:
        raise
    except Exception as fault:  # imagecodecs raises its own classes for each codec
        raise SlideError(f"mask {path} is damaged: {fault}. Save it again") from fault
    bits, colour = data[24], data[25]
    if colour == 3:
        return _palette_indices(data, pixels)
    if pixels.ndim == 3:
        if (pixels[:, :, :1] != pixels[:, :, : 3 if colour in (2, 6) else 1]).any():
            raise SlideError(f"mask {path} must have one channel, the class ids; it is a colour picture")
        pixels = pixels[:, :, 0]
    return pixels // (255 // (2**bits - 1)) if bits < 8 else pixels


def _palette_indices(data: bytes, pixels: NDArray[np.integer]) -> NDArray[np.integer]:
    at = data.index(b"PLTE")
    palette = np.frombuffer(data, np.uint8, int.from_bytes(data[at - 4 : at], "big"), at + 4).reshape(-1, 3)
    weights = np.array([1 << 16, 1 << 8, 1])
    colours, first = np.unique(palette @ weights, return_index=True)
    indices: NDArray[np.integer] = first[np.searchsorted(colours, pixels[:, :, :3] @ weights)].astype(np.uint8)
    return indices
