"""Header of a DICOM Segmentation: segments, frames and their places on the slide.

Takes a file of Segmentation Storage or Label Map Segmentation Storage (DICOM PS3.3 sections A.51, C.8.20), gives a
``Segmentation``; what would be misread is refused by name. Read without a library: pydicom takes nine times as long for
the three numbers of a frame (117 us against 13), says nothing of a file that is cut short, and nests without a bound.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO, Final, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.dicom_elements import PREAMBLE_BYTES, UNDEFINED, Item, Wanted, items, read_until
from pipelines.backends.dicom_head import Placement, Tag, begin, decimals, head_placement, is_segmentation
from pipelines.slides.slide import SlideError

FRAMES = 4 << 20
"""Most frames of a file; more, of a damaged one, would fill the memory with their places."""

MOST_SEGMENTS = 255
"""Largest number of a segment: masks are bytes."""


_OF_FRAMES: Final = Wanted(
    frozenset(map(int, (Tag.FRAME_COLUMN, Tag.FRAME_ROW, Tag.FRAME_SEGMENT))),
    frozenset(map(int, (Tag.POSITION, Tag.IDENTIFICATION))),
)
_CHARACTERS: Final = {"ISO_IR 192": "utf-8", "ISO_IR 100": "latin-1", "ISO_IR 101": "iso8859-2"} | {
    "ISO_IR 144": "iso8859-5",
    "ISO_IR 13": "shift_jis",
    "GB18030": "gb18030",
    "GBK": "gbk",
}
"""Python's name by SpecificCharacterSet (PS3.3 section C.12.1.1.2), for labels that are not ASCII."""


@dataclass(frozen=True, slots=True)
class Segmentation:
    """The header of a segmentation of a whole slide.

    Attributes:
        kind: BINARY, a frame for each segment, or LABELMAP, numbers of segments as pixels.
        syntax: UID of how frames are compressed.
        labels: of the segments by their number, without the background.
        width, height: of the whole in px.
        columns, rows: of a frame.
        bits: of a pixel: 1, 8 or 16.
        x, y: int64 (frames,) upper left px of each frame.
        segment: int64 (frames,) number of each frame's segment; 0 in a label map.
        mpp: um/px across and down, None where it is not said.
        placement: of the whole.
        pixels_at, pixels_bytes: where the pixels lie in the file; ``UNDEFINED`` bytes of compressed ones.
    """

    kind: str
    syntax: str
    labels: Mapping[int, str]
    width: int
    height: int
    columns: int
    rows: int
    bits: int
    x: NDArray[np.int64]
    y: NDArray[np.int64]
    segment: NDArray[np.int64]
    mpp: tuple[float, float] | None
    placement: Placement
    pixels_at: int
    pixels_bytes: int


def read_segmentation(path: Path) -> Segmentation:
    """Return what the file says of itself.

    Raises:
        SlideError: no DICOM Segmentation, damaged, or one whose pixels would be misread.
    """
    try:
        with path.open("rb") as file:
            if not is_segmentation(path):
                raise SlideError(f"mask {path} must be a DICOM Segmentation; it is another file. Give the SEG file")
            file.seek(PREAMBLE_BYTES)
            return _Reader(path, file, os.fstat(file.fileno()).st_size).read()
    except EOFError:
        raise SlideError(f"mask {path} is cut short: it ends before its pixels do. Copy it again") from None
    except OSError as fault:
        raise SlideError(f"mask {path} cannot be read: {fault.strerror or fault}") from fault
    except ValueError as fault:
        raise SlideError(f"mask {path} is damaged: {fault}. Export it again") from fault


class _Reader:
    """Reads one file from its first element; raises EOFError and ValueError as ``dicom_elements`` does."""

    def __init__(self, path: Path, file: BinaryIO, size_bytes: int) -> None:
        self._path, self._file, self._size_bytes = path, file, size_bytes
        self._head = Item()
        self._places = array("q")
        """Column, row and segment of each frame, where the file lists them."""

    def read(self) -> Segmentation:
        pixels = self._read_elements()
        head = self._head
        kind, bits = head.text(Tag.KIND), head.number(Tag.BITS, 1)
        width, height = head.number(Tag.MATRIX_COLUMNS, 0), head.number(Tag.MATRIX_ROWS, 0)
        columns, rows = head.number(Tag.COLUMNS, 0), head.number(Tag.ROWS, 0)
        frames = int(head.text(Tag.FRAMES, "1"))
        self._check(kind, bits, (width, height, columns, rows, frames))
        labels = self._labels(kind)
        place = self._grid if head.text(Tag.ORGANIZATION) == "TILED_FULL" else self._listed
        x, y, segment = place([0] if kind == "LABELMAP" else sorted(labels), frames)
        if pixels[1] != UNDEFINED and pixels[1] * 8 < frames * rows * columns * bits:
            raise EOFError
        spacing = decimals(head.first(Tag.SHARED).first(Tag.MEASURES), Tag.SPACING)
        if spacing and (len(spacing) != 2 or not all(np.isfinite(mm) and mm > 0 for mm in spacing)):
            raise ValueError(f"PixelSpacing must be two lengths in mm; it is {spacing}")
        mpp = (spacing[1] * 1000, spacing[0] * 1000) if spacing else None  # down first, then across
        syntax = head.text(Tag.SYNTAX)
        return Segmentation(
            *(kind, syntax, labels, width, height, columns, rows, bits, x, y, segment, mpp, head_placement(head)),
            *pixels,
        )

    def _read_elements(self) -> tuple[int, int]:
        """Fill ``_head`` and ``_places``; return where the pixels lie and how many bytes they are."""
        file = self._file
        self._head, wanted = begin(file)
        of_frames = replace(_OF_FRAMES, is_implicit=wanted.is_implicit)
        while found := read_until((Tag.FRAME_POSITIONS, Tag.PIXELS), file, wanted, self._head):
            tag, length = found
            if tag == Tag.PIXELS:
                start = file.tell()
                if length != UNDEFINED and start + length > self._size_bytes:
                    raise EOFError
                return start, length
            for frame in items(file, length, of_frames, 1):
                place, segment = frame.first(Tag.POSITION), frame.first(Tag.IDENTIFICATION)
                self._places.extend((_signed(place, Tag.FRAME_COLUMN), _signed(place, Tag.FRAME_ROW)))
                self._places.append(segment.number(Tag.FRAME_SEGMENT, 0))
        raise EOFError

    def _check(self, kind: str, bits: int, sizes: tuple[int, ...]) -> None:
        head = self._head
        if kind == "FRACTIONAL":
            self._refuse("is FRACTIONAL, probabilities that are no classes", "write it as BINARY or LABELMAP")
        if kind not in ("BINARY", "LABELMAP"):
            self._refuse(f"has SegmentationType {kind!r}; read are BINARY and LABELMAP", "export it again")
        if (parts := head.number(Tag.PARTS, 1)) > 1:
            self._refuse(f"is one of {parts} files of a concatenation", "write it as one file")
        if (planes := head.number(Tag.FOCAL_PLANES, 1)) > 1:
            self._refuse(f"has {planes} focal planes, of which one would be used", "save one alone")
        if Tag.MATRIX_COLUMNS not in head.values or Tag.MATRIX_ROWS not in head.values:
            self._refuse(
                "does not say how large its TotalPixelMatrix is: it is not of a whole slide",
                "write it as tiles of the slide's TotalPixelMatrix (TILED_FULL or TILED_SPARSE)",
            )
        width, height, columns, rows, frames = sizes
        if min(sizes) < 1 or frames > FRAMES:
            self._refuse(
                f"has {frames} frames of {columns} x {rows} px for {width} x {height} px; each must be at least 1, "
                f"frames at most {FRAMES}",
                "export it again",
            )
        if bits not in ((1,) if kind == "BINARY" else (8, 16)):
            self._refuse(f"is {kind} with {bits} bits per px; BINARY has 1, LABELMAP 8 or 16", "export it again")

    def _labels(self, kind: str) -> dict[int, str]:
        """Labels by number, without the background of a label map."""
        codec = _CHARACTERS.get(stated := self._head.text(Tag.CHARACTERS).split("\\")[0], "ascii")
        labels: dict[int, str] = {}
        for segment in self._head.sequences.get(Tag.SEGMENTS, []):
            number = segment.number(Tag.NUMBER, -1)
            if not 0 <= number <= MOST_SEGMENTS or number in labels:
                self._refuse(
                    f"has a segment {number}; numbers must be 1 to {MOST_SEGMENTS}, each once", "number them anew"
                )
            try:
                labels[number] = segment.values.get(Tag.LABEL, b"").strip(b"\0 ").decode(codec)
            except UnicodeDecodeError:
                self._refuse(
                    f"has a label for segment {number} that is not in its character set, {stated or 'ASCII'}",
                    "write it in UTF-8 (ISO_IR 192)",
                )
        padding = self._head.number(Tag.PADDING, -1)
        if (kind == "LABELMAP" and padding > 0) or (0 in labels and padding != 0):
            self._refuse(
                f"has {f'the background {padding}' if padding > 0 else 'a segment 0'}; the background must be 0",
                "number the segments from 1",
            )
        labels.pop(0, None)
        if not labels:
            self._refuse("has no segments (SegmentSequence)", "export it again")
        return labels

    def _grid(self, segments: list[int], frames: int) -> tuple[NDArray[np.int64], ...]:
        """Places of frames in the order of TILED_FULL: row by row, segment by segment (PS3.3 section C.7.6.17.3)."""
        head = self._head
        columns, rows = head.number(Tag.COLUMNS, 0), head.number(Tag.ROWS, 0)
        across, down = -(-head.number(Tag.MATRIX_COLUMNS, 0) // columns), -(-head.number(Tag.MATRIX_ROWS, 0) // rows)
        if frames != len(segments) * across * down:
            self._refuse(
                f"is TILED_FULL with {frames} frames; {len(segments)} x {across} x {down} (segments, columns and rows "
                f"of tiles) would be {len(segments) * across * down}",
                "export it again",
            )
        x, y = np.arange(across) * columns, np.arange(down) * rows
        segment, row, column = np.meshgrid(np.array(segments, np.int64), y, x, indexing="ij")
        return column.ravel(), row.ravel(), segment.ravel()

    def _listed(self, segments: list[int], frames: int) -> tuple[NDArray[np.int64], ...]:
        """Places of frames as the file lists them; in a label map, of segment 0, whatever it says."""
        head = self._head
        x, y, segment = np.array(self._places, np.int64).reshape(-1, 3).T
        shared = head.first(Tag.SHARED).first(Tag.IDENTIFICATION).number(Tag.FRAME_SEGMENT, 0)
        segment = np.zeros_like(segment) if segments == [0] else np.where(segment == 0, shared, segment)
        if len(x) != frames:
            self._refuse(
                f"has {frames} frames and says of {len(x)} where they lie (per-frame functional groups)",
                "copy it again, or write it as TILED_FULL",
            )
        width, height = head.number(Tag.MATRIX_COLUMNS, 0), head.number(Tag.MATRIX_ROWS, 0)
        for is_wrong, rule in (
            ((x < 1) | (x > width) | (y < 1) | (y > height), f"its place must be within 1..{width}, 1..{height}"),
            (~np.isin(segment, segments), f"its segment must be one of {segments}"),
        ):
            if is_wrong.any():
                k = int(np.argmax(is_wrong))
                self._refuse(f"has frame {k + 1} at {x[k]}, {y[k]}, of segment {segment[k]}; {rule}", "export it again")
        return x - 1, y - 1, segment

    def _refuse(self, fault: str, remedy: str) -> NoReturn:
        raise SlideError(f"mask {self._path} {fault}; {remedy}")


def _signed(item: Item, tag: int) -> int:
    """A binary value of four bytes; 0, which is no place, where there is none."""
    value = item.values.get(tag, b"")
    return int.from_bytes(value, "little", signed=True) if len(value) == 4 else 0
