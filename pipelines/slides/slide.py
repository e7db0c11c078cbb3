"""The slide: what every reader offers, whatever the file format.

A backend gives pixels of one level at a time (``LevelReader``); ``pyramid.PyramidSlide`` makes of it a ``Slide`` that
answers regions at any mpp. Rounding happens in ``geometry``, resampling in ``pyramid``, decoding in ``backends``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Bounds, Level, Region, TileBox
from pipelines.slides.printable import printable

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


class Slide(Protocol):
    """An open slide. Safe to read from many threads at once; not to be sent through fork or pickle."""

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
        """
        ...

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        """Fill ``out``, uint8 (box.height, box.width, 3), with ``box`` of what ``read(region)`` gives, px for px.

        Reads the level's px that go into the box; those that a reader draws between stored ones, for all the rows of
        the bands it meets, or for the whole region.

        Raises:
            ValueError, TileReadError: as ``read``; or the box is not inside the region.
        """
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


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
