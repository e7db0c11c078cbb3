"""Choice of the backend that opens a slide: the first, in a fixed order, that knows the file by its content.

The suffix chooses no backend, but content of another kind than it says is refused. Direct decoding goes before
OpenSlide: same pixels, several times faster. If nothing opens the file, one error quotes every backend.
"""

from __future__ import annotations

import importlib
import logging
import os
import stat
from pathlib import Path
from typing import Final

from pipelines.backends.level_reader import level0_mpp
from pipelines.backends.tiff_levels import other_tiff_images
from pipelines.backends.tiff_tags import check_tiff
from pipelines.slides.slide import UNEXPECTED, NotThisFormat, Slide, SlideError, printable, url_of

log = logging.getLogger(__name__)

BACKENDS: Final = ("tiled", "ndpi", "zarr", "openslide", "image")
"""In the order in which they are asked: each is ``open_<name>`` in a module of that name, ``ndpi`` in ``tiled``."""


def open_slide(path: str | Path, *, mpp: float | None = None, backend: str = "auto", scene: int | None = None) -> Slide:
    """Open a slide of any known format.

    Args:
        path: a file, or the folder of a Zarr slide.
        mpp: um/px of level 0, used in place of what the file records.
        backend: one of ``BACKENDS``; ``auto`` takes the first that knows the file.
        scene: which image to read if the file holds several of similar size, counted from 0; None: it holds one.

    Raises:
        ValueError: unknown ``backend``, or ``mpp`` outside 0.05-100.
        SlideError: no such file, empty, damaged, of no known format or of another than its suffix says, without a
            usable mpp, or with a name that cannot be printed; a folder that cannot be listed.
    """
    path = Path(path)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {backend!r} for {path}")
    if mpp is not None:
        level0_mpp(path, None, None, mpp)
    is_file = url_of(path) is None and _is_file(path)
    if is_file:
        check_content(path)
    asked = BACKENDS if backend == "auto" else (backend,)
    said: list[str] = []
    for name in asked if is_file else {"zarr"}.intersection(asked):  # the only one that reads folders and URLs
        # Imported when first asked for, so that a run over SVS files loads no Zarr.
        module = importlib.import_module(f"pipelines.backends.{'tiled' if name == 'ndpi' else name}")
        try:
            slide: Slide = getattr(module, f"open_{name}")(path, mpp=mpp, scene=scene)
            if name == "image":
                refuse_preview(path)
        except NotThisFormat as reason:
            said.append(f"{name}: {str(reason).removeprefix(f'{path}: ')}")
        except OSError as error:
            raise SlideError(f"{path}: the file cannot be read: {error.strerror or error}") from error
        except SlideError:
            raise
        except Exception as error:  # the last net: a damaged file ends no command, whatever a library makes of it
            raise SlideError(f"{path}: {name} cannot open it: {UNEXPECTED} {type(error).__name__}: {error}") from error
        else:
            log.debug("%s: opened with %s (asked: %s), %g um/px", path, name, backend, slide.mpp)
            return slide
    raise SlideError(_nothing_opens(path, backend, said))


def _is_file(path: Path) -> bool:
    """Return whether a path is a file, not a folder; refuse what would fail, or block, when it is read or printed."""
    if (name := printable(str(path))) != str(path):
        raise SlideError(f"{name}: a slide's path must be UTF-8 without control characters; rename the file or folder")
    try:
        status = path.stat()
    except OSError as fault:
        link = " (a link that leads nowhere)" if path.is_symlink() else ""
        raise SlideError(f"{path}: there is no such file{link}: {fault.strerror}; copy it again") from fault
    if stat.S_ISDIR(status.st_mode):
        try:
            os.scandir(path).close()
        except OSError as fault:
            raise SlideError(f"{path}: the folder cannot be listed: {fault.strerror}; check its permissions") from fault
        return False
    if not stat.S_ISREG(status.st_mode):
        raise SlideError(f"{path}: neither a file nor a folder but a pipe, socket or device: take it away")
    if status.st_size == 0:
        raise SlideError(f"{path}: the file is empty (0 bytes); copy it again")
    return True


def other_images(path: Path, scene: int | None = None) -> list[str]:
    """Return name and size of a file's images that are not its slide; raises SlideError as ``open_slide`` does."""
    if path.is_dir() or url_of(path) is not None:
        from pipelines.backends.zarr import other_zarr_images  # here, so that no Zarr library is loaded for files

        return other_zarr_images(path, scene)
    return other_tiff_images(path, scene)


def _nothing_opens(path: Path, backend: str, said: list[str]) -> str:
    """The one message: what the file seems to be, then each backend's reason."""
    reasons = "".join(f"\n  {line}" for line in said)
    if path.is_dir() or url_of(path) is not None:
        what = "this folder is no Zarr slide; give a folder with Zarr metadata (--backend zarr or auto), or a file"
    elif faults := check_tiff(path):
        what = f"this TIFF is damaged or cut short: {'; '.join(faults)}"
    elif kind := content_kind(path):
        what = f"the content is {kind}, not a slide; is it a link to another file, or a web page saved as a download?"
    elif backend == "auto":
        what = "no backend knows this format; is the file cut short, or not a slide?"
    else:
        what = f"not readable with --backend {backend}; --backend auto tries all"
    return f"{path}: {what}{reasons}"


_KINDS: Final = {
    **dict.fromkeys((b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "TIFF"),
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
_EXPECTED: Final = {
    **dict.fromkeys(_TIFF_SUFFIXES, "TIFF"),
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
    suffix, folder = path.suffix.lower(), path.with_suffix("")
    if suffix == ".mrxs" and not (folder / "Slidedat.ini").is_file():
        missing = f"without its file {folder.name}/Slidedat.ini" if folder.is_dir() else f"without its folder {folder}"
        raise SlideError(
            f"{path}: an MRXS slide {missing}: the .mrxs file alone is a preview; copy the folder beside it, complete"
        )
    expected = _EXPECTED.get(suffix)
    kind = _kind(path) if expected else None
    if kind and kind != expected:
        raise SlideError(
            f"{path}: named {suffix}, a {expected} file, but its content is {kind}: not this slide, perhaps a preview "
            f"or a renamed file; copy the slide again, or give the file the suffix of what it is"
        )


def refuse_preview(path: Path) -> None:
    """Raise SlideError for a plain picture with a scanner's suffix."""
    suffix = path.suffix.lower()
    if suffix in _EXPECTED and suffix not in _PLAIN_TIFF:
        raise SlideError(
            f"{path}: named {suffix}, but it holds a plain picture and no slide, perhaps a preview; copy the slide "
            "again, or give the file the suffix of a picture (.tif, .png, .jpg)"
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
