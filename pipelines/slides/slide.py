"""The slide: regions at any mpp, whatever the file format; its errors, the URL of one on a server, and printable text.

A backend gives pixels of one level at a time (``LevelReader``); ``pyramid.PyramidSlide`` makes of it a ``Slide``.
Text that comes from a file (table cells, class names, paths, errors) passes through ``printable`` where it is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Bounds, Level, Region, TileBox

UNPRINTABLE = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters (the escape that starts terminal sequences among them), line separators, characters that reverse
the direction of text, and bytes of a file name that are not UTF-8."""


def printable(text: str, keep: str = "") -> str:
    """Return ``text`` with each character escaped that a terminal would obey; those in ``keep`` stay."""
    return UNPRINTABLE.sub(lambda found: found[0] if found[0] in keep else _escaped(ord(found[0])), text)


def _escaped(code: int) -> str:
    if 0xDC80 <= code <= 0xDCFF:  # how Python holds a byte of a file name that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def printable_values(value: Any) -> Any:
    """Return a value of nested dictionaries, lists and tuples with every text in it, keys too, made printable."""
    if isinstance(value, str):
        return printable(value, keep="\n\t")
    if isinstance(value, dict):
        return {printable_values(key): printable_values(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(printable_values, value))
    return value


Pixels = NDArray[np.uint8]
"""uint8 (height, width, 3), RGB, C-contiguous rows."""

PADDING = 255
"""Value of pixels outside the slide: white, as the glass around tissue is."""

UNEXPECTED = "unexpected"
"""Word in the message of an error that no rule of ours foresaw; its cause is chained."""


class SlideError(Exception):
    """A slide that cannot be used: says the file, what is wrong with it and what to do.

    Messages quote what files and slide libraries say, so they are made printable here.
    """

    def __str__(self) -> str:
        return printable(super().__str__(), keep="\n\t")


class NotThisFormat(SlideError):
    """A file that this backend does not read; another backend may."""


class TileReadError(SlideError):
    """Pixels that cannot be read from a slide that opened: a damaged or missing compressed tile."""


def is_disk_error(error: Exception) -> bool:
    """Return whether a disk or share failed, which is no damage of the slide: decoders give their errors no number."""
    return isinstance(error, OSError) and error.errno is not None


class Slide(Protocol):
    """An open slide. Safe to read from many threads; not to be sent through fork or pickle."""

    @property
    def path(self) -> Path: ...
    @property
    def backend(self) -> str: ...
    @property
    def mpp(self) -> float: ...
    @property
    def levels(self) -> tuple[Level, ...]: ...
    @property
    def bounds(self) -> Bounds: ...

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        """Pixels of ``region``: uint8 (region.height, region.width, 3), RGB; white outside the slide.

        Args:
            region: what to read; origin in level-0 px, size in px at ``region.mpp``.
            out: written and returned when given; uint8 (region.height, region.width, 3).

        Raises:
            ValueError: ``region.mpp`` is finer than level 0, or ``out`` has another shape or type.
            TileReadError: the file is damaged here.
            SlideError: its disk, share or server cannot be read now.
        """
        ...

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        """Fill ``out``, uint8 (box.height, box.width, 3), with ``box`` of what ``read(region)`` gives, px for px.

        Reads the px of the level which go into the box. A reader that draws px between stored ones draws them for all
        rows of the bands that the box meets, or for the whole region.

        Raises:
            ValueError, SlideError: as ``read``; or the box is not inside the region.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class Closing:
    """Base of what a ``with`` block closes at its end."""

    def close(self) -> None:
        raise NotImplementedError

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class LevelReader(Protocol):
    """Decoded pixels of one level. The one thing a new backend has to write."""

    name: str
    """Name of the backend, as ``--backend`` takes it."""

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        """Fill all of ``out`` with the box of ``level`` whose top left is (l_x, l_y), ``PADDING`` outside the level.

        Raises:
            TileReadError: the file is damaged here.
        """
        ...

    def close(self) -> None: ...


URL = re.compile(r"(https?|s3):/+(.+)")


def url_of(path: Path) -> str | None:
    """Return the URL that ``path`` stands for, None of a file or folder. A path has one slash where a URL has two."""
    match = URL.fullmatch(str(path))
    return f"{match[1]}://{match[2]}" if match else None


def url_path(url: str) -> Path:
    """Return the path that stands for the URL of an OME-Zarr image.

    Raises:
        ValueError: it is none that can be asked for, or holds a password.
    """
    try:
        parts = urlsplit(url)
        usable = URL.fullmatch(url) and parts.hostname and url.isprintable() and " " not in url
    except ValueError:  # a bracket that is not closed, for example
        usable = False
    if not usable:
        raise ValueError(f"the URL of an OME-Zarr image begins with http://, https:// or s3://; got {url!r}")
    if parts.username is not None or parts.password is not None:
        raise ValueError("the URL holds a user name or password; take it out: docs/slides.md says where it goes")
    if parts.query or parts.fragment:
        raise ValueError(f"the files of a slide are asked for below its URL, which so has no `?` and no `#`; got {url}")
    return Path(url)
