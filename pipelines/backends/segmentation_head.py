"""What a DICOM file says before its frames: what it is, of which series, and where its pixels lie on the glass.

Takes a file, slide or segmentation; gives single facts of it, and the tags that are looked at (DICOM PS3.6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Final

from pipelines.backends.dicom_elements import (
    IMPLICIT,
    OTHERWISE_WRITTEN,
    PREAMBLE_BYTES,
    Item,
    Wanted,
    elements,
    keep,
    read_meta,
    sop_class,
)
from pipelines.slides.slide import SlideError

SEGMENTATIONS: Final = frozenset(("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"))
"""SOP classes: Segmentation Storage, Label Map Segmentation Storage."""


class Tag(IntEnum):
    """The elements that are looked at."""

    SOP_CLASS = 0x00020002
    SYNTAX = 0x00020010
    CHARACTERS = 0x00080005
    SOURCE_SERIES = 0x00081115
    SERIES = 0x0020000E
    FRAME_OF_REFERENCE = 0x00200052
    PARTS = 0x00209163
    ORGANIZATION = 0x00209311
    FRAMES = 0x00280008
    ROWS = 0x00280010
    COLUMNS = 0x00280011
    SPACING = 0x00280030
    BITS = 0x00280100
    PADDING = 0x00280120
    MEASURES = 0x00289110
    X_OFFSET = 0x0040072A
    Y_OFFSET = 0x0040073A
    MATRIX_COLUMNS = 0x00480006
    MATRIX_ROWS = 0x00480007
    ORIGIN = 0x00480008
    ORIENTATION = 0x00480102
    POSITION = 0x0048021A
    FRAME_COLUMN = 0x0048021E
    FRAME_ROW = 0x0048021F
    FOCAL_PLANES = 0x00480303
    KIND = 0x00620001
    SEGMENTS = 0x00620002
    NUMBER = 0x00620004
    LABEL = 0x00620005
    IDENTIFICATION = 0x0062000A
    FRAME_SEGMENT = 0x0062000B
    SHARED = 0x52009229
    FRAME_POSITIONS = 0x52009230
    PIXELS = 0x7FE00010


_SEQUENCES: Final = frozenset(
    map(int, (Tag.SOURCE_SERIES, Tag.MEASURES, Tag.ORIGIN, Tag.POSITION, Tag.SEGMENTS, Tag.IDENTIFICATION, Tag.SHARED))
)
WANTED: Final = Wanted(frozenset(map(int, Tag)) - _SEQUENCES, _SEQUENCES)


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a matrix of pixels lies in the coordinates of the glass; None where the file does not say.

    Attributes:
        frame_of_reference: UID of the coordinates.
        origin_mm: x, y of its first pixel.
        orientation: direction of its rows, then of its columns, three cosines each.
    """

    frame_of_reference: str | None
    origin_mm: tuple[float, float] | None
    orientation: tuple[float, ...] | None


def is_segmentation(path: Path) -> bool:
    """Return whether a file is a DICOM Segmentation; what cannot be read is none."""
    try:
        with path.open("rb") as file:
            return sop_class(file) in SEGMENTATIONS
    except OSError:
        return False


def source_series(path: Path) -> frozenset[str]:
    """Return the UIDs of the series that a segmentation names as what it was made of; none of a damaged file."""
    try:
        return frozenset(source.text(Tag.SERIES) for source in _head(path).sequences.get(Tag.SOURCE_SERIES, []))
    except (OSError, EOFError, ValueError):
        return frozenset()


def series_of(path: Path) -> str:
    """Return the UID of the series that a DICOM file is of; empty where there is none, or the file is damaged."""
    try:
        return _head(path).text(Tag.SERIES)
    except (OSError, EOFError, ValueError):
        return ""


def placement_of(path: Path) -> Placement:
    """Return where the matrix of a DICOM file, slide or segmentation, lies.

    Raises:
        SlideError: the file is damaged.
    """
    try:
        return head_placement(_head(path))
    except (EOFError, ValueError) as fault:
        raise SlideError(f"{path} is damaged: {fault or 'it is cut short'}. Copy it again") from fault


def _head(path: Path) -> Item:
    """What is said before the frames."""
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        head, wanted = begin(file)
        for tag, length in elements(file, 0, wanted.is_implicit):
            if tag in (Tag.FRAME_POSITIONS, Tag.PIXELS):
                break
            keep(head, tag, length, wanted, file, 0)
    return head


def begin(file: BinaryIO) -> tuple[Item, Wanted]:
    """Return what group 2 says, the file at its first element and left behind it, and what is wanted of the rest.

    Raises:
        ValueError: the rest is deflated or big endian.
    """
    head = read_meta(file, WANTED)
    syntax = head.text(Tag.SYNTAX)
    if syntax in OTHERWISE_WRITTEN - {IMPLICIT}:
        raise ValueError(f"transfer syntax {syntax}, deflated or big endian: write it as Explicit VR Little Endian")
    return head, replace(WANTED, is_implicit=syntax == IMPLICIT)


def head_placement(head: Item) -> Placement:
    """Return where the matrix lies whose elements ``head`` has."""
    origin = head.first(Tag.ORIGIN)
    x, y = decimals(origin, Tag.X_OFFSET), decimals(origin, Tag.Y_OFFSET)
    return Placement(
        head.text(Tag.FRAME_OF_REFERENCE) or None,
        (x[0], y[0]) if x and y else None,
        decimals(head, Tag.ORIENTATION) or None,
    )


def decimals(item: Item, tag: int) -> tuple[float, ...]:
    """Return the numbers of a decimal string; empty where there is none."""
    text = item.text(tag)
    return tuple(map(float, text.split("\\"))) if text else ()
