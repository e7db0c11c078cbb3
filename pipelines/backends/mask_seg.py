"""A mask in a DICOM Segmentation of a whole slide, frame by frame: the pixel of a segment has its number.

Takes a path, gives the number of the segment at asked (column, row) px. Of uncompressed frames only the rows that are
needed are read, bit-packed ones among them. Where segments overlap the one of the highest number counts, as the area
drawn last does.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import imagecodecs
import numpy as np
from numpy.typing import NDArray

from pipelines.backends.dicom_elements import IMPLICIT, ITEM, UNDEFINED, elements
from pipelines.backends.mask import PIECE_BYTES, byte_values, nearest
from pipelines.backends.segmentation import Segmentation, read_segmentation
from pipelines.slides.slide import SlideError, TileReadError

log = logging.getLogger(__name__)

UNCOMPRESSED: Final = (IMPLICIT, "1.2.840.10008.1.2.1")
DECODERS: Final[dict[str, tuple[str, Callable[[bytes, np.dtype[Any]], NDArray[np.integer]]]]] = {
    "1.2.840.10008.1.2.5": ("RLE", lambda data, dtype: np.frombuffer(imagecodecs.dicomrle_decode(data, dtype), dtype)),
    "1.2.840.10008.1.2.4.80": ("JPEG-LS", lambda data, _: imagecodecs.jpegls_decode(data)),
    "1.2.840.10008.1.2.4.90": ("JPEG 2000", lambda data, _: imagecodecs.jpeg2k_decode(data)),
}
"""Name and decoder of the lossless compressions, by transfer syntax."""

BAND_PIXELS = 16 << 20
"""Pixels that are unpacked at once."""


class SegMask:
    """A ``Mask`` over the frames of a DICOM Segmentation. Safe in many threads: every read is positional.

    Raises:
        SlideError: as ``read_segmentation``; a compression that is not read, or frames above ``PIECE_BYTES``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.header: Segmentation = read_segmentation(path)
        header = self.header
        self.width, self.height, self.names = header.width, header.height, header.labels
        self._dtype = np.dtype("<u2" if header.bits == 16 else np.uint8)
        self._painted = np.argsort(header.segment, kind="stable")  # frames in the order in which they are painted
        self._fragments: NDArray[np.int64] | None = None
        if header.syntax not in UNCOMPRESSED or header.pixels_bytes == UNDEFINED:
            self._fragments = self._frame_fragments()
        self._fd = os.open(path, os.O_RDONLY)
        weakref.finalize(self, os.close, self._fd)

    @property
    def nbytes(self) -> int:
        tables = (self.header.x, self.header.y, self.header.segment, self._painted, self._fragments)
        return sum(table.nbytes for table in tables if table is not None)

    def sample(self, columns: NDArray[np.int64], rows: NDArray[np.int64], out: NDArray[np.uint8]) -> None:
        out[...] = 0
        header = self.header
        touches = (header.x <= columns[-1]) & (header.x + header.columns > columns[0])
        touches &= (header.y <= rows[-1]) & (header.y + header.rows > rows[0])
        for frame in self._painted[touches[self._painted]].tolist():
            x, y = int(header.x[frame]), int(header.y[frame])
            a, b = np.searchsorted(columns, [x, min(x + header.columns, self.width)])
            c, d = np.searchsorted(rows, [y, min(y + header.rows, self.height)])
            if a == b:
                continue
            for first, last in _bands(rows[c:d] - y, BAND_PIXELS // header.columns):
                local = rows[c + first : c + last] - y
                pixels = self._rows(frame, int(local[0]), int(local[-1]) + 1)
                values = byte_values(nearest(pixels, columns[a:b] - x, local - local[0]), self.path)
                np.copyto(out[c + first : c + last, a:b], values, where=values != 0)

    def values(self) -> set[int]:
        """Return the numbers of the segments that have pixels, and 0; warn where segments overlap.

        Raises:
            SlideError: a frame is damaged, or a pixel has a number that no segment has.
        """
        header = self.header
        values: set[int] = {0}
        overlapping = 0
        frames = self._painted[np.lexsort((header.x[self._painted], header.y[self._painted]))]
        starts = np.flatnonzero(np.diff(header.x[frames], prepend=-1) | np.diff(header.y[frames], prepend=-1))
        for stack in np.split(frames, starts[1:]):
            x, y = int(header.x[stack[0]]), int(header.y[stack[0]])
            height, width = min(header.rows, self.height - y), min(header.columns, self.width - x)
            for first, last in _bands(np.arange(height), BAND_PIXELS // header.columns):
                taken = np.zeros((last - first, width), bool)
                for frame in stack:
                    pixels = self._rows(int(frame), first, last)[:, :width]
                    if not pixels.any():
                        continue
                    if header.bits > 1:
                        values.update(np.flatnonzero(np.bincount(pixels.ravel())).tolist())
                    else:
                        values.add(int(header.segment[frame]))
                    if len(stack) > 1:
                        is_drawn = pixels.astype(bool)
                        overlapping += int(np.count_nonzero(taken & is_drawn))
                        taken |= is_drawn
        if unknown := sorted(values - {0} - set(self.names)):
            raise SlideError(
                f"mask {self.path} has pixels of segment {unknown[0]}; its segments are {sorted(self.names)}. "
                "Export it again"
            )
        if overlapping:
            log.warning("%s: segments overlap at %d px: the higher number counts", self.path, overlapping)
        return values

    def _rows(self, frame: int, first: int, last: int) -> NDArray[np.integer]:
        """Numbers of segments in rows ``first`` to ``last`` (excluded) of a frame."""
        header = self.header
        if self._fragments is not None:
            return self._decoded(frame)[first:last]
        pixel = (frame * header.rows + first) * header.columns
        bits = (last - first) * header.columns * header.bits
        start, skipped = divmod(pixel * header.bits, 8)  # frames of 1 bit follow each other within a byte
        data = os.pread(self._fd, -(-(skipped + bits) // 8), header.pixels_at + start)
        if len(data) * 8 < skipped + bits:
            raise TileReadError(f"mask {self.path} is cut short: frame {frame + 1} is not in it. Copy it again")
        if header.bits > 1:
            numbers: NDArray[np.integer] = np.frombuffer(data, self._dtype)
            return numbers.reshape(last - first, header.columns)
        packed = np.frombuffer(data, np.uint8)
        drawn = np.unpackbits(packed, bitorder="little")[skipped : skipped + bits].reshape(last - first, header.columns)
        drawn *= np.uint8(header.segment[frame])
        return drawn

    def _decoded(self, frame: int) -> NDArray[np.integer]:
        assert self._fragments is not None
        offset, size = self._fragments[frame].tolist()
        name, decode = DECODERS[self.header.syntax]
        try:
            decoded: NDArray[np.integer] = decode(os.pread(self._fd, size, offset), self._dtype)
            frame_pixels: NDArray[np.integer] = decoded.reshape(self.header.rows, self.header.columns)
        except Exception as fault:  # imagecodecs raises its own classes for each codec
            raise TileReadError(
                f"mask {self.path} is damaged: frame {frame + 1} cannot be decoded as {name}: {fault}"
            ) from fault
        return frame_pixels

    def _frame_fragments(self) -> NDArray[np.int64]:
        """Place and bytes of each compressed frame, int64 (frames, 2) (DICOM PS3.5 section A.4)."""
        header, path = self.header, self.path
        kinds = ", ".join(["uncompressed", *(name for name, _ in DECODERS.values())])
        if header.syntax not in DECODERS or header.bits == 1 or header.pixels_bytes != UNDEFINED:
            raise SlideError(
                f"mask {path} is {header.kind} with pixels of transfer syntax {header.syntax}; read are {kinds}, of "
                "BINARY uncompressed alone; write it as one of them"
            )
        if header.rows * header.columns * self._dtype.itemsize > PIECE_BYTES:
            raise SlideError(
                f"mask {path} has compressed frames of {header.columns} x {header.rows} px; at most "
                f"{PIECE_BYTES >> 20} MiB can be read at once. Write it in tiles"
            )
        fragments: list[tuple[int, int]] = []
        with path.open("rb") as file:
            file.seek(header.pixels_at)
            size_bytes = os.fstat(file.fileno()).st_size
            try:
                for tag, length in elements(file, 1):
                    if tag != ITEM:
                        break
                    fragments.append((file.tell(), length))
                    if file.seek(length, 1) > size_bytes:
                        raise EOFError
            except (EOFError, ValueError) as fault:
                raise SlideError(f"mask {path} is cut short within its frames. Copy it again") from fault
        frames = fragments[1:]  # the first is the table of offsets
        if len(frames) != len(header.x):
            raise SlideError(
                f"mask {path} has {len(header.x)} frames in {len(frames)} fragments; each frame must be one. Write it "
                "anew"
            )
        return np.array(frames, np.int64).reshape(-1, 2)


def _bands(rows: NDArray[np.int64], most: int) -> Iterator[tuple[int, int]]:
    """Parts of ``rows``, ascending, that span at most ``most`` rows each, at least one."""
    first = 0
    while first < len(rows):
        last = int(np.searchsorted(rows, rows[first] + max(1, most)))
        yield first, last
        first = last
