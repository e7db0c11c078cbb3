"""Header of a DICOM file before its frames: kind, series, place on the glass, and what OpenSlide would misread.

Such series are refused: OpenSlide would show the first channel of several without a word, mix the levels of two slides,
or leave out a level that was cut short. Or the process would end, as libdicom follows a table of frame positions that
may be absent. Follows DICOM PS3.3 section A.32.8 (whole slides), tags of PS3.6.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, Final

from pipelines.backends.dicom_elements import (
    DEEPEST_READ,
    IMPLICIT,
    OTHERWISE_WRITTEN,
    PREAMBLE_BYTES,
    Item,
    Wanted,
    is_dicom,
    is_nested_too_deep,
    read_meta,
    read_until,
)
from pipelines.backends.tiff_levels import is_reduction
from pipelines.slides.slide import SlideError

SEGMENTATIONS: Final = frozenset(("1.2.840.10008.5.1.4.1.1.66.4", "1.2.840.10008.5.1.4.1.1.66.7"))
"""SOP classes: Segmentation Storage, Label Map Segmentation Storage."""


class Tag(IntEnum):
    """The elements that are looked at."""

    SOP_CLASS = 0x00020002
    SYNTAX = 0x00020010
    CHARACTERS = 0x00080005
    IMAGE_TYPE = 0x00080008
    PYRAMID = 0x00080019
    SOURCE_SERIES = 0x00081115
    SERIES = 0x0020000E
    FRAME_OF_REFERENCE = 0x00200052
    PARTS = 0x00209163
    ORGANIZATION = 0x00209311
    SAMPLES = 0x00280002
    PHOTOMETRIC = 0x00280004
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
    OPTICAL_PATHS = 0x00480302
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
_OF_SLIDE: Final = Wanted(WANTED.values, ())
_FRAMES: Final = (Tag.FRAME_POSITIONS, Tag.PIXELS)


@dataclass(frozen=True, slots=True)
class Placement:
    """Place of a matrix of pixels in the coordinates of the glass; None where the file does not say.

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
    return _first(path, 0).text(Tag.SOP_CLASS) in SEGMENTATIONS


def series_uid(path: Path) -> str:
    """Return the SeriesInstanceUID of a DICOM file, not that of a series it refers to; empty where there is none."""
    return _first(path, Tag.SERIES).text(Tag.SERIES)


def _first(path: Path, last: int) -> Item:
    """Single values of a DICOM file up to the tag ``last``, as far as it can be read."""
    item = Item()
    with contextlib.suppress(OSError, EOFError, ValueError), path.open("rb") as file:
        if file.read(PREAMBLE_BYTES)[128:] == b"DICM":
            read_meta(file, _OF_SLIDE, item)
            is_implicit = item.text(Tag.SYNTAX) == IMPLICIT
            read_until((), file, replace(_OF_SLIDE, is_implicit=is_implicit), item, last)
    return item


def source_series(path: Path) -> frozenset[str]:
    """Return the UIDs of the series that a segmentation names as what it was made of; none of a damaged file."""
    try:
        return frozenset(source.text(Tag.SERIES) for source in _head(path).sequences.get(Tag.SOURCE_SERIES, []))
    except (OSError, EOFError, ValueError):
        return frozenset()


def placement_of(path: Path) -> Placement:
    """Return where the matrix of a DICOM slide or segmentation lies. Raises SlideError where the file is damaged."""
    try:
        return head_placement(_head(path))
    except (EOFError, ValueError) as fault:
        raise SlideError(f"{path} is damaged: {fault or 'it is cut short'}. Copy it again") from fault


def _head(path: Path) -> Item:
    """Elements before the frames."""
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        head, wanted = begin(file)
        read_until(_FRAMES, file, wanted, head)
    return head


def begin(file: BinaryIO) -> tuple[Item, Wanted]:
    """Return what group 2 says, the file at its first element and left behind it, and what is wanted of the rest.

    Raises:
        ValueError: the rest is deflated or big endian.
    """
    head = Item()
    read_meta(file, WANTED, head)
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


_SYNTAXES: Final = {
    "1.2.840.10008.1.2.1": "uncompressed",
    "1.2.840.10008.1.2.4.50": "JPEG",
    "1.2.840.10008.1.2.4.90": "JPEG 2000",
    "1.2.840.10008.1.2.4.91": "JPEG 2000",
}
_WHOLE_SLIDE: Final = "1.2.840.10008.5.1.4.1.1.77.1.6"
_PIXELS_IN_FRAGMENTS: Final = b"\xe0\x7f\x10\x00OB\0\0\xff\xff\xff\xff"
_CODESTREAM: Final = b"\xff\x4f\xff\x51"
_SIZ_BYTES: Final = 42
"""Start of a codestream up to the sizes of its components (ITU-T T.800, A.5.1)."""
_STREAM_WITHIN: Final = 1 << 24
"""Bytes of the pixels that are searched for the first codestream: it lies behind the table of the frames."""


def refuse_series(path: Path) -> None:
    """Refuse the slide whose series ``path`` is of, for what any of its files says.

    Raises:
        SlideError: channels, planes, samples or a compression that are not read. No ImageType, or frames without their
            positions. Sequences nested too deep. A file that is cut short, or a .dcm file that cannot be read. Several
            pyramids.
    """
    series = _of_slide(path)[0].text(Tag.SERIES)
    volumes: list[Item] = []
    for file in sorted(path.parent.iterdir()):
        try:
            if not file.is_file() or not is_dicom(file):
                continue
            status = file.stat()
            is_deep = is_nested_too_deep(file, status.st_size, status.st_mtime_ns)
            header, is_cut = _of_slide(file)
        except OSError as error:
            if file.suffix.lower() != ".dcm":
                continue
            raise SlideError(
                f"{path}: {file.name} in its folder cannot be read: {error.strerror or error}; check its permissions"
            ) from error
        if is_deep:  # OpenSlide parses every file of the folder
            raise SlideError(
                f"{path}: {file.name} in its folder has sequences nested more than {DEEPEST_READ} deep, which would "
                "end the process: it is damaged or not made by a scanner; move it out of the folder"
            )
        if header.text(Tag.SERIES) == series and header.text(Tag.SOP_CLASS) == _WHOLE_SLIDE:
            if is_cut:
                raise SlideError(f"{path}: {file.name} of its series ends before its pixels: cut short; copy it again")
            if fault := _fault(header) or _colour_fault(header, file):
                raise SlideError(f"{path}: {file.name} of its series {fault}")
            if _is_volume(header):
                volumes.append(header)
    if len(volumes) > 1:
        _refuse_pyramids(path, volumes)


def _refuse_pyramids(path: Path, volumes: Sequence[Item]) -> None:
    """Refuse a series of several pyramids, such as two pieces of tissue: OpenSlide would mix their levels."""
    uids = {header.text(Tag.PYRAMID) for header in volumes} - {""}
    pairs = {(header.number(Tag.MATRIX_COLUMNS, 0), header.number(Tag.MATRIX_ROWS, 0)) for header in volumes}
    largest, *others = sorted(pairs, reverse=True)
    if len(uids) > 1 or (not uids and not all(is_reduction(largest, size) for size in others)):
        sizes = ", ".join(f"{width} x {height}" for width, height in (largest, *others))
        raise SlideError(
            f"{path}: its series has several slides, of which one would be shown with levels of another: files of "
            f"{sizes} px with {len(uids)} PyramidUIDs (0008,0019); move the files of each into a folder of its own"
        )


def _fault(header: Item) -> str:
    """Error in one file of a series, and the remedy; empty when it is one image of RGB."""
    if (syntax := header.text(Tag.SYNTAX)) not in _SYNTAXES:
        kinds = ", ".join(dict.fromkeys(_SYNTAXES.values()))
        return f"has pixels of transfer syntax {syntax}; read are {kinds}; convert it to one of them"
    if Tag.IMAGE_TYPE not in header.values:
        return (
            "has no ImageType (0008,0008), which tells levels from labels: the file is damaged or was changed by a "
            "program; copy it again, or write ImageType anew, such as ORIGINAL\\PRIMARY\\VOLUME\\NONE"
        )
    if not _is_volume(header):
        return ""
    samples, bits = header.number(Tag.SAMPLES, 3), header.number(Tag.BITS, 8)
    if (samples, bits) != (3, 8):
        return f"has {samples} sample(s) of {bits} bits per px; a slide has 3 of 8; convert it to 8-bit RGB"
    if (paths := header.number(Tag.OPTICAL_PATHS, 1)) > 1:
        return f"has {paths} optical paths, of which one would be shown; merge them to 8-bit RGB, or save one alone"
    if (planes := header.number(Tag.FOCAL_PLANES, 1)) > 1:
        return f"has {planes} focal planes, of which one would be shown; save one alone"
    if header.text(Tag.ORGANIZATION) == "TILED_SPARSE" and Tag.FRAME_POSITIONS not in header.values:
        return (
            "has frames in no fixed order (TILED_SPARSE) and does not say where they lie (no per-frame functional "
            "groups); copy it again, or write it anew as TILED_FULL"
        )
    return ""


def _is_volume(header: Item) -> bool:
    """Return whether a file is a level, not a label, overview or thumbnail."""
    return "VOLUME" in header.text(Tag.IMAGE_TYPE).split("\\")


def _colour_fault(header: Item, path: Path) -> str:
    """Error in a JPEG 2000 level whose first frame is stored without the colour transform that its header names."""
    colours = header.text(Tag.PHOTOMETRIC)
    if colours not in ("YBR_ICT", "YBR_RCT") or not _is_volume(header):
        return ""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        pixels = data.find(_PIXELS_IN_FRAGMENTS)
        stream = data.find(_CODESTREAM, max(0, pixels), pixels + _STREAM_WITHIN)
        cod = data.find(b"\xff\x52", stream + _SIZ_BYTES)  # its byte 8 is the multiple component transform, table A.15
        if min(pixels, stream, cod) < 0 or data[cod + 8 : cod + 9] != b"\0":
            return ""
    return (
        f"has the PhotometricInterpretation {colours}, and JPEG 2000 frames without that colour transform: YCbCr would "
        "be read as RGB; convert the original slide again with another program, or to RGB"
    )


def _of_slide(path: Path) -> tuple[Item, bool]:
    """Single values before the pixels, and whether the file ends before these; of refused syntaxes, group 2 alone."""
    head = Item()
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        try:
            read_meta(file, _OF_SLIDE, head)
            if head.text(Tag.SYNTAX) in OTHERWISE_WRITTEN:
                return head, False
            if (found := read_until(_FRAMES, file, _OF_SLIDE, head)) is None:
                return head, True
            head.values[found[0]] = b""
        except EOFError:
            return head, True
        except ValueError:
            pass  # no DICOM data; OpenSlide says so
    return head, False
