"""Masks: pictures whose values are class ids, whatever the file.

Takes the path of a TIFF, a PNG or a DICOM Segmentation; gives a ``Mask``. Small ones are decoded once, uncompressed
TIFFs are mapped into memory, everything else is read piece by piece: a mask of 100,000 px on a side is never in memory
whole. Only level 0 of a pyramid is used: an average of class ids is no class.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import weakref
import zlib
from collections.abc import Iterator, Mapping
from functools import cache
from hashlib import blake2b
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import imagecodecs
import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.tiff_page import UNREADABLE, Tag, table_fault
from pipelines.backends.tiff_tags import read_tiff
from pipelines.slides.slide import SlideError, TileReadError

log = logging.getLogger(__name__)

WHOLE_PIXELS = 64 << 20
"""A striped TIFF up to this size is decoded once; reading a tile of it would decode whole rows again and again."""

BAND_ROWS = 1024

PNG_BYTES = 1 << 30
"""Largest picture that is decoded; of those above ``WHOLE_PIXELS`` one at a time."""

CHANNELS, INDEXED = {0: 1, 2: 3, 3: 3, 4: 2, 6: 4}, 3
"""Of a decoded PNG, by colour type; that of a palette."""

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
        bands = (self._pixels[row : row + BAND_ROWS] for row in range(0, self.height, BAND_ROWS))
        return {value for band in bands for value in np.unique(band).tolist()}


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
        from pipelines.backends.mask_seg import SegMask  # which takes what masks share from here

        return SegMask(path)
    mask = TiffMask(path)
    if mask.mapped is not None:
        dtype, offset = mask.mapped
        return ArrayMask(path, np.memmap(path, dtype, "r", offset, (mask.height, mask.width)))
    if mask.is_tiled or mask.width * mask.height > WHOLE_PIXELS:
        return mask
    pixels = np.empty((mask.height, mask.width), np.uint8)
    mask.sample(np.arange(mask.width), np.arange(mask.height), pixels)
    return ArrayMask(path, pixels)


def _png_values(path: Path) -> NDArray[np.integer]:
    """The values as stored: palette indices, and grey values of 1, 2 and 4 bits, which decoders spread over 0..255."""
    try:
        data = path.read_bytes()
        # PNG specification, 11.2.2 IHDR: width, height, bits of a sample, colour type. A file of a kilobyte can ask for
        # terabytes.
        width, height = int.from_bytes(data[16:20], "big"), int.from_bytes(data[20:24], "big")
        bits, colour = data[24], data[25]
        size_bytes = width * height * CHANNELS.get(colour, 4) * (2 if bits > 8 else 1)
        if size_bytes > PNG_BYTES:
            raise SlideError(
                f"mask {path} is {width} x {height} px, {size_bytes >> 20} MiB decoded; a PNG may have "
                f"{PNG_BYTES >> 20}. Save it as a tiled TIFF"
            )
        if colour == INDEXED:
            data = _with_indices_as_colours(data)
        with _large if size_bytes > WHOLE_PIXELS else contextlib.nullcontext():
            pixels: NDArray[np.integer] = imagecodecs.png_decode(data)
    except OSError as fault:
        raise SlideError(f"mask {path} cannot be read: {fault.strerror or fault}") from fault
    except SlideError:
        raise
    except Exception as fault:  # imagecodecs raises its own classes for each codec
        raise SlideError(f"mask {path} is damaged: {fault}. Save it again") from fault
    if colour == INDEXED:
        return pixels[:, :, 0]
    if pixels.ndim == 3:
        if (pixels[:, :, :1] != pixels[:, :, : 3 if colour in (2, 6) else 1]).any():
            raise SlideError(f"mask {path} must have one channel, the class ids; it is a colour picture")
        pixels = pixels[:, :, 0]
    return pixels // (255 // (2**bits - 1)) if bits < 8 else pixels


def _with_indices_as_colours(png: bytes) -> bytes:
    """Return an indexed PNG whose colours are grey, each as bright as its index: decoders give colours alone, and a
    palette may have one twice."""
    at = png.index(b"PLTE")
    count = int.from_bytes(png[at - 4 : at], "big") // 3
    chunk = b"PLTE" + bytes(index for index in range(count) for _ in range(3))
    return png[:at] + chunk + zlib.crc32(chunk).to_bytes(4, "big") + png[at + len(chunk) + 4 :]


PIECE_BYTES = 256 << 20
"""Largest decoded tile or strip that is accepted; a mask in one compressed strip is one piece."""


@cache  # masks are opened again and again
def _tell_of_white(path: Path) -> None:
    log.warning(
        "%s: class 1 is where the bits of this mask are 1; they are stored as MINISWHITE, so viewers show them black. "
        "Invert the mask if the class is what viewers show white",
        path,
    )


class TiffMask:
    """A ``Mask`` over the tiles or strips of the first page of a TIFF. Safe in many threads: every read is positional.

    Raises:
        SlideError: not a TIFF, damaged, several channels, or pieces above ``PIECE_BYTES``.
    """

    names: Mapping[int, str] = MappingProxyType({})
    nbytes = 1 << 20
    """What an open one holds, about: the offsets of its pieces."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            tiff = read_tiff(path)
        except (SlideError, OSError) as fault:
            what = str(fault).removeprefix(f"{path}: ")
            raise SlideError(f"mask {path} cannot be read as TIFF: {what}. Save it again") from fault
        faults = [*tiff.faults, *filter(None, [table_fault(tiff.pages[0], tiff.size_bytes)])]
        if faults or not tiff.pages[0].is_sorted:  # tifffile would go on with the defaults of what it cannot read
            what = "; ".join(faults) or "its tags are out of order"
            raise SlideError(f"mask {path} cannot be read as TIFF: it is damaged: {what}. Save it again")
        try:
            with tifffile.TiffFile(path) as file:
                page = file.pages.first
                shape, self._dtype = page.shape, page.dtype
                self._piece_height, self._piece_width = page.chunks[:2]
                self._grid = page.chunked[:2]
                self._offsets, self._counts = page.dataoffsets, page.databytecounts
                self._decode, tables = page.decode, page.jpegtables
                self.is_tiled = page.is_tiled
                mapped = (page.dtype.newbyteorder(file.byteorder), page.dataoffsets[0])
                self.mapped: tuple[Any, int] | None = mapped if page.is_memmappable else None
        except Exception as fault:  # tifffile raises nearly anything on damaged files
            raise SlideError(f"mask {path} cannot be read as TIFF: {fault}. Save it again") from fault
        if len(shape) != 2 or self._dtype is None or self._dtype.kind not in "bui" or tables is not None:
            raise SlideError(
                f"mask {path} must have one channel of whole numbers, the class ids; "
                f"it has shape {shape}, type {self._dtype}"
            )
        white = tiff.pages[0].number(Tag.PHOTOMETRIC, UNREADABLE) == tifffile.PHOTOMETRIC.MINISWHITE
        if white and self._dtype.kind == "b":
            _tell_of_white(path)
        self.height, self.width = shape
        size_bytes = path.stat().st_size
        pieces = self._grid[0] * self._grid[1]
        ends = [o + n for o, n in zip(self._offsets, self._counts, strict=False)]
        if len(self._offsets) != pieces or len(self._counts) != pieces or max(ends) > size_bytes:
            raise SlideError(f"mask {path} is cut off: its pieces do not all lie within its {size_bytes} bytes")
        piece_bytes = self._piece_height * self._piece_width * self._dtype.itemsize
        if piece_bytes > PIECE_BYTES:
            raise SlideError(
                f"mask {path} is stored in pieces of {piece_bytes >> 20} MiB; at most {PIECE_BYTES >> 20} MiB can be "
                "read at once. Save it as a tiled TIFF"
            )
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    def sample(self, columns: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        out[...] = 0
        for down in _pieces(rows, self._piece_height, self.height):
            for across in _pieces(columns, self._piece_width, self.width):
                piece = self._piece(
                    int(rows[down.start]) // self._piece_height, int(columns[across.start]) // self._piece_width
                )
                if piece is not None:
                    local = nearest(piece, columns[across] % self._piece_width, rows[down] % self._piece_height)
                    out[down, across] = byte_values(local, self.path)

    def values(self) -> set[int]:
        """Return all values that occur. Pieces of the same compressed bytes, most of a mask, are decoded once."""
        values: set[int] = set()
        seen: set[bytes] = set()
        for down in range(self._grid[0]):
            for across in range(self._grid[1]):
                height = min(self._piece_height, self.height - down * self._piece_height)
                width = min(self._piece_width, self.width - across * self._piece_width)
                data = self._data(down * self._grid[1] + across)
                key = blake2b(data, key=f"{height} {width}".encode()).digest()
                if key not in seen:
                    seen.add(key)
                    piece = self._piece(down, across)
                    values.update([0] if piece is None else np.unique(piece[:height, :width]).tolist())
        return values

    def _piece(self, down: int, across: int) -> NDArray[np.integer] | None:
        """One decoded tile or strip, None where the file leaves it out."""
        index = down * self._grid[1] + across
        if not self._counts[index]:
            return None
        try:
            decoded = self._decode(self._data(index), index)[0]
        except Exception as fault:  # imagecodecs raises its own classes for each codec
            raise TileReadError(f"mask {self.path} is damaged: piece {index} cannot be decoded: {fault}") from fault
        if decoded is None:
            return None
        piece: NDArray[np.integer] = decoded[0, :, :, 0]
        return piece.view(np.uint8) if piece.dtype == bool else piece

    def _data(self, index: int) -> bytes:
        return os.pread(self._fd, self._counts[index], self._offsets[index])


def nearest(pixels: NDArray[np.integer], columns: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.integer]:
    """``pixels`` at the crossings of ``columns`` and ``rows``, both ascending and within it."""
    if rows[-1] - rows[0] < len(rows):  # as fine as the mask or finer: its rows are fewer than those asked for
        band = pixels[rows[0] : rows[-1] + 1]
        return _take(_take(band, columns, 1), rows - rows[0], 0)
    return _take(_take(pixels, rows, 0), columns, 1)


def _take(pixels: NDArray[np.integer], index: NDArray[np.int64], axis: int) -> NDArray[np.integer]:
    if index[-1] - index[0] == len(index) - 1 and (np.diff(index) == 1).all():  # a run: nothing is copied
        run = slice(int(index[0]), int(index[-1]) + 1)
        return pixels[run] if axis == 0 else pixels[:, run]
    return pixels.take(index, axis)


def byte_values(values: NDArray[np.integer], path: Path) -> NDArray[np.uint8]:
    """``values`` as uint8. Raises SlideError where they are no class ids."""
    if values.dtype != np.uint8 and values.size and (values.min() < 0 or values.max() > 255):
        raise SlideError(
            f"mask {path} must hold class ids 0..254 and 255 for ignore; it holds {values.min()}..{values.max()}"
        )
    return values.astype(np.uint8, copy=False)


def _pieces(index: NDArray[np.int64], piece: int, size: int) -> Iterator[slice]:
    """Runs of ``index`` (ascending) within 0..size that fall into one piece each."""
    low, high = np.searchsorted(index, [0, size])
    starts = np.flatnonzero(np.diff(index[low:high] // piece, prepend=-1)) + low
    yield from (slice(int(a), int(b)) for a, b in pairwise([*starts, high]))
