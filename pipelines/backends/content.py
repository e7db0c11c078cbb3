"""Whether a slide file holds what its suffix says, by its first bytes.

A vendor's suffix on a file of another kind (a JPEG preview saved as ``.svs``, an ``.mrxs`` without its folder) would
otherwise be read as a small picture. Content of no known kind is left to the backends, which say what they miss.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from pipelines.slides.slide import SlideError

_KINDS: Final = {
    b"II*\0": "TIFF",
    b"MM\0*": "TIFF",
    b"II+\0": "TIFF",
    b"MM\0+": "TIFF",
    b"\xff\xd8\xff": "JPEG",
    b"\x89PNG": "PNG",
    b"BM": "BMP",
    b"SQLite format 3\0": "SQLite",
    b"GIF8": "GIF",
    b"RIFF": "WebP",
    b"\0\0\0\x0cjP  ": "JPEG 2000",
    b"PK\x03\x04": "ZIP",
    b"\x1f\x8b": "gzip",
    b"%PDF": "PDF",
}
"""Kind of a file by its first bytes; DICOM is known by bytes 128 to 131."""

_TIFF_SUFFIXES: Final = (".svs", ".qptiff", ".tif", ".tiff", ".btf", ".ndpi", ".scn", ".bif")
_EXPECTED: Final = dict.fromkeys(_TIFF_SUFFIXES, "TIFF") | {
    ".svslide": "SQLite",
    ".dcm": "DICOM",
    ".vms": "text",
    ".vmu": "text",
}
_PLAIN_TIFF: Final = (".tif", ".tiff", ".btf")
"""A TIFF of one of these suffixes may be a plain picture; one of a scanner's suffix is none."""

_DICOM_AT: Final = 128
_READ: Final = ("TIFF", "JPEG", "PNG", "BMP", "DICOM", "SQLite")
"""Kinds that a backend may know; it says itself what it misses."""
_TEXT_BYTES: Final = 512


def check_content(path: Path) -> None:
    """Refuse a slide file whose first bytes are of another known kind than its suffix says.

    Raises:
        SlideError: the content is of another kind, or an MRXS file has no data folder.
        OSError: the file cannot be read.
    """
    suffix = path.suffix.lower()
    if suffix == ".mrxs":
        _check_mrxs(path)
    expected = _EXPECTED.get(suffix)
    kind = _kind(path) if expected else None
    if kind and kind != expected:
        raise SlideError(
            f"{path}: named {suffix}, a {expected} file, but its content is {kind}: not this slide, perhaps a preview "
            f"or a renamed file; copy the slide again, or give the file the suffix of what it is"
        )


def refuse_preview(path: Path) -> None:
    """Refuse a plain picture with a scanner's suffix.

    Raises:
        SlideError: it is one.
    """
    suffix = path.suffix.lower()
    if suffix in _EXPECTED and suffix not in _PLAIN_TIFF:
        raise SlideError(
            f"{path}: named {suffix}, but it holds a plain picture and no slide, perhaps a preview; copy the slide "
            "again, or give the file the suffix of a picture (.tif, .png, .jpg)"
        )


def _check_mrxs(path: Path) -> None:
    """An MRXS file is a preview picture; the slide is in the folder of the same name."""
    folder = path.with_suffix("")
    if not (folder / "Slidedat.ini").is_file():
        missing = f"without its file {folder.name}/Slidedat.ini" if folder.is_dir() else f"without its folder {folder}"
        raise SlideError(
            f"{path}: an MRXS slide {missing}: the .mrxs file alone is a preview; copy the folder beside it, complete"
        )


def _kind(path: Path) -> str | None:
    with path.open("rb") as file:
        head = file.read(_DICOM_AT + 4)
    if head[_DICOM_AT:] == b"DICM":
        return "DICOM"
    return next((kind for magic, kind in _KINDS.items() if head.startswith(magic)), None)


def content_kind(path: Path) -> str | None:
    """Return the kind of a file that no backend reads (text, HTML, ZIP, ...), None of any other.

    Never any of the content: a link in the slide folder may lead to a file that must not get into a log.
    """
    if kind := _kind(path):
        return None if kind in _READ else kind
    with path.open("rb") as file:
        head = file.read(_TEXT_BYTES)
    text = head.decode("utf-8", "ignore")
    if len(text.encode()) < len(head) - 3 or any(not (c.isprintable() or c in "\t\r\n\ufeff") for c in text):
        return None
    return "HTML" if text.lstrip("\ufeff \t\r\n").lower().startswith(("<!doctype html", "<html")) else "text"
