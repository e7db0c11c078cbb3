"""Which backend opens a slide: the first, in a fixed order, that knows the file by its content.

Takes a path, gives a ``Slide``. The suffix chooses no backend, but content of another kind than it says is refused.
Direct decoding goes before OpenSlide because it gives the same pixels several times faster. When nothing opens the file
there is one error, which says what each backend said.
"""

from __future__ import annotations

import importlib
import logging
import stat
from pathlib import Path
from typing import Final, Protocol, cast

from pipelines.backends.content import check_content, content_kind, refuse_preview
from pipelines.backends.resolution import level0_mpp
from pipelines.backends.tiff_levels import other_tiff_images
from pipelines.backends.tiff_tags import check_tiff
from pipelines.slides.slide import UNEXPECTED, NotThisFormat, Slide, SlideError
from pipelines.slides.slide_url import is_url_name

log = logging.getLogger(__name__)

BACKENDS: Final = ("tiled", "ndpi", "zarr", "openslide", "image")
"""Modules of this package, each with ``open_<name>``, in the order in which they are asked."""

READS_FOLDERS: Final = ("zarr",)


class Opener(Protocol):
    def __call__(self, path: Path, *, mpp: float | None, scene: int | None = None) -> Slide: ...


def open_slide(path: str | Path, *, mpp: float | None = None, backend: str = "auto", scene: int | None = None) -> Slide:
    """Open a slide of any known format.

    Args:
        path: a file, or the folder of a Zarr slide.
        mpp: um/px of level 0, used in place of what the file records.
        backend: one of ``BACKENDS``; ``auto`` takes the first that knows the file.
        scene: which image to read if the file holds several of similar size, counted from 0; None: it holds one.

    Raises:
        ValueError: unknown ``backend``, or ``mpp`` outside 0.05-100.
        SlideError: no such file, empty, damaged, of no known format or of another than its suffix says, or without a
            usable mpp.
    """
    path = Path(path)
    if backend not in ("auto", *BACKENDS):
        raise ValueError(f"backend must be one of auto, {', '.join(BACKENDS)}; got {backend!r} for {path}")
    if mpp is not None:
        level0_mpp(path, None, None, mpp)
    try:
        status = path.stat()
    except OSError as error:
        what = "there is no such file" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise SlideError(f"{path}: {what}") from error
    is_file = stat.S_ISREG(status.st_mode)
    if not is_file and not stat.S_ISDIR(status.st_mode):
        raise SlideError(f"{path}: neither a file nor a folder but a pipe, socket or device; a slide is a file")
    if is_file and status.st_size == 0:
        raise SlideError(f"{path}: the file is empty (0 bytes); copy it again")
    if is_file:
        check_content(path)
    asked = BACKENDS if backend == "auto" else (backend,)
    said: list[str] = []
    for name in asked if is_file else set(asked).intersection(READS_FOLDERS):
        try:
            slide = _opener(name)(path, mpp=mpp, scene=scene)
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


def other_images(path: Path, scene: int | None = None) -> list[str]:
    """Return name and size of the images of a file that opens as a slide and are not the slide.

    Raises:
        SlideError: as ``open_slide``.
    """
    if path.is_dir() or is_url_name(path.name):
        from pipelines.backends.zarr import other_zarr_images  # here, so that no Zarr library is loaded for files

        return other_zarr_images(path, scene)
    return other_tiff_images(path, scene)


def _opener(name: str) -> Opener:
    """Imported when first asked for, so that a run over SVS files loads no Zarr."""
    return cast(Opener, getattr(importlib.import_module(f"pipelines.backends.{name}"), f"open_{name}"))


def _nothing_opens(path: Path, backend: str, said: list[str]) -> str:
    """The one message: what the file seems to be, then each backend's reason."""
    reasons = "".join(f"\n  {line}" for line in said)
    if path.is_dir():
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
