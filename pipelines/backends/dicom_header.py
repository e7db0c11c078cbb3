"""What the files of a DICOM slide say of themselves, read and judged before OpenSlide sees them.

Takes a file; refuses series of which OpenSlide would show the first channel without a word, leave out a level that was
cut short, or bring the process down (libdicom follows a table of frame positions that need not be there). Follows DICOM
PS3.3 section A.32.8 (whole slides); explicit little endian, which is all that OpenSlide reads.
"""

from __future__ import annotations

from enum import IntEnum
from pathlib import Path
from typing import Final

from pipelines.backends.dicom_elements import (
    DEEPEST_READ,
    OTHERWISE_WRITTEN,
    PREAMBLE_BYTES,
    elements,
    exactly,
    is_dicom,
    is_nested_too_deep,
    skip,
)
from pipelines.slides.slide import SlideError


class Tag(IntEnum):
    """The elements that are looked at."""

    SOP_CLASS = 0x00020002
    SYNTAX = 0x00020010
    IMAGE_TYPE = 0x00080008
    SERIES = 0x0020000E
    ORGANIZATION = 0x00209311
    SAMPLES = 0x00280002
    BITS = 0x00280100
    OPTICAL_PATHS = 0x00480302
    FOCAL_PLANES = 0x00480303
    FRAME_POSITIONS = 0x52009230
    PIXELS = 0x7FE00010


_READ: Final = frozenset(map(int, Tag))
_SYNTAXES: Final = {
    "1.2.840.10008.1.2.1": "uncompressed",
    "1.2.840.10008.1.2.4.50": "JPEG",
    "1.2.840.10008.1.2.4.90": "JPEG 2000",
    "1.2.840.10008.1.2.4.91": "JPEG 2000",
}
_WHOLE_SLIDE: Final = "1.2.840.10008.5.1.4.1.1.77.1.6"
_VALUE_BYTES: Final = 1024


def refuse_series(path: Path) -> None:
    """Refuse the slide whose series ``path`` is of, for what any of its files says.

    Raises:
        SlideError: channels, planes, samples or a compression that are not read, no ImageType, sequences nested too
            deep, frames without their positions, or a file that is cut short.
    """
    series = _read(path)[0].get(Tag.SERIES)
    for file in sorted(path.parent.iterdir()):
        if not file.is_file() or not is_dicom(file):
            continue
        status = file.stat()
        if is_nested_too_deep(file, status.st_size, status.st_mtime_ns):  # OpenSlide parses every file of the folder
            raise SlideError(
                f"{path}: {file.name} in its folder has sequences nested more than {DEEPEST_READ} deep, which would "
                "end the process: it is damaged or not made by a scanner; move it out of the folder"
            )
        header, is_cut = _read(file)
        if header.get(Tag.SERIES) == series and _text(header, Tag.SOP_CLASS) == _WHOLE_SLIDE:
            if is_cut:
                raise SlideError(f"{path}: {file.name} of its series ends before its pixels: cut short; copy it again")
            if fault := _fault(header):
                raise SlideError(f"{path}: {file.name} of its series {fault}")


def _fault(header: dict[int, bytes]) -> str:
    """What is wrong with one file of a series, and what to do; empty when it is one image of RGB."""
    if (syntax := _text(header, Tag.SYNTAX)) not in _SYNTAXES:
        kinds = ", ".join(dict.fromkeys(_SYNTAXES.values()))
        return f"has pixels of transfer syntax {syntax}; read are {kinds}; convert it to one of them"
    if Tag.IMAGE_TYPE not in header:
        return (
            "has no ImageType (0008,0008), which tells levels from labels: the file is damaged or was changed by a "
            "program; copy it again, or write ImageType anew, such as ORIGINAL\\PRIMARY\\VOLUME\\NONE"
        )
    if "VOLUME" not in _text(header, Tag.IMAGE_TYPE).split("\\"):
        return ""  # label, overview, thumbnail: no level
    samples, bits = _number(header, Tag.SAMPLES, 3), _number(header, Tag.BITS, 8)
    if (samples, bits) != (3, 8):
        return f"has {samples} sample(s) of {bits} bits per px; a slide has 3 of 8; convert it to 8-bit RGB"
    if (paths := _number(header, Tag.OPTICAL_PATHS, 1)) > 1:
        return f"has {paths} optical paths, of which one would be shown; merge them to 8-bit RGB, or save one alone"
    if (planes := _number(header, Tag.FOCAL_PLANES, 1)) > 1:
        return f"has {planes} focal planes, of which one would be shown; save one alone"
    if _text(header, Tag.ORGANIZATION) == "TILED_SPARSE" and Tag.FRAME_POSITIONS not in header:
        return (
            "has frames in no fixed order (TILED_SPARSE) and does not say where they lie (no per-frame functional "
            "groups); copy it again, or write it anew as TILED_FULL"
        )
    return ""


def _text(header: dict[int, bytes], tag: Tag) -> str:
    return header.get(tag, b"").rstrip(b"\0 ").decode("ascii", "replace")


def _number(header: dict[int, bytes], tag: Tag, default: int) -> int:
    value = header.get(tag, b"")
    return int.from_bytes(value, "little") if len(value) in (2, 4) else default


def _read(path: Path) -> tuple[dict[int, bytes], bool]:
    """Values of the top-level elements in ``Tag`` up to the pixels, and whether the file ends before these.

    What is not explicit little endian is read as far as its head goes, to the transfer syntax, which is refused.
    """
    header: dict[int, bytes] = {}
    with path.open("rb") as file:
        file.seek(PREAMBLE_BYTES)
        try:
            for tag, length in elements(file, 0):
                if tag in (Tag.FRAME_POSITIONS, Tag.PIXELS):
                    header[tag] = b""
                    return header, False
                if tag >> 16 > 2 and _text(header, Tag.SYNTAX) in OTHERWISE_WRITTEN:
                    return header, False
                if tag in _READ and length <= _VALUE_BYTES:
                    header[tag] = exactly(file, length)
                else:
                    skip(file, length, 0)
        except EOFError:
            return header, True
        except ValueError:
            return header, False  # no DICOM data; OpenSlide says so
    return header, True
