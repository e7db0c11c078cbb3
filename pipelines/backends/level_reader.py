"""Parts that all readers share: padding outside a level, um/px of level 0, the choice of a scene, levels in memory."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import MPP_MAX, MPP_MIN, check_mpp
from pipelines.slides.slide import PADDING, Pixels, SlideError

log = logging.getLogger(__name__)


class Inside(NamedTuple):
    """``out`` is a view of the caller's array, never empty; its top left is px (l_x, l_y) of the level."""

    l_x: int
    l_y: int
    out: Pixels


def pad(out: Pixels, l_x: int, l_y: int, l_width: int, l_height: int) -> Inside | None:
    """Paint what lies outside the level, of ``l_width`` x ``l_height`` px, of ``out``, whose top left is px (l_x, l_y)
    of it; return the part inside, None when there is none."""
    rows, columns = out.shape[:2]
    left, top = min(max(0, -l_x), columns), min(max(0, -l_y), rows)
    right, bottom = max(left, min(columns, l_width - l_x)), max(top, min(rows, l_height - l_y))
    out[:top] = PADDING
    out[bottom:] = PADDING
    out[top:bottom, :left] = PADDING
    out[top:bottom, right:] = PADDING
    if left == right or top == bottom:
        return None
    return Inside(l_x + left, l_y + top, out[top:bottom, left:right])


def bands(l_y: int, rows: int, tile_rows: int, most_rows: int) -> Iterator[tuple[int, int]]:
    """Return (start, stop) of each band in which ``rows`` rows from row ``l_y`` of a level are read: at most
    ``most_rows``, or else one row of tiles. Bands end where tiles end, so that no tile is decoded twice."""
    height = max(1, most_rows // tile_rows) * tile_rows
    return pairwise((0, *range(height - l_y % height, rows, height), rows))


_thread = threading.local()


def scratch(size: int) -> NDArray[np.uint8]:
    """Return ``size`` bytes of this thread's memory, reused by later reads: fresh pages cost as much as decoding."""
    buffer: NDArray[np.uint8] | None = getattr(_thread, "buffer", None)
    if buffer is None or buffer.size < size:
        buffer = _thread.buffer = np.empty(size, np.uint8)
    return buffer[:size]


AXES_TOLERANCE = 0.05
"""Largest relative difference of the x and y mpp that is still taken for square pixels."""

OVERRIDE_TOLERANCE = 0.05
"""Largest relative difference between the user's mpp and that of the file without a warning."""

OVERRIDE = "give it with --slide-mpp, or per slide in the column `mpp` of --mpp-table FILE"

Recorded = float | str | None
"""Recorded um/px of a file; or what it records instead, as the end of a sentence; None if it records nothing."""


def level0_mpp(path: Path, mpp_x: Recorded, mpp_y: Recorded, override: float | None) -> float:
    """Return um/px of level 0: ``override``, the user's, or else what the file at ``path`` records. Warn if they
    differ.

    Raises:
        ValueError: ``override`` is implausible.
        SlideError: no override, and the file's values are missing, implausible or not square.
    """
    found = [value for value in (mpp_x, mpp_y) if isinstance(value, float | int)]
    if override is not None:
        if not check_mpp(override):
            raise ValueError(f"the mpp given for {path} must be {MPP_MIN:g} to {MPP_MAX:g} um/px; got {override:g}")
        if found and all(check_mpp(value) and abs(override / value - 1) > OVERRIDE_TOLERANCE for value in found):
            _warn_of_override(path, found[0], override)
        return float(override)
    if not found:
        unread = next((text for text in (mpp_x, mpp_y) if text), None)
        raise SlideError(f"{path}: the file {unread or 'does not record its um/px (mpp)'}; {OVERRIDE}")
    found_x, found_y = found[0], found[-1]
    if not (check_mpp(found_x) and check_mpp(found_y)):
        bad = found_y if check_mpp(found_x) else found_x
        raise SlideError(
            f"{path}: the file records {bad:g} um/px; a slide has {MPP_MIN:g} to {MPP_MAX:g} um/px (mpp); {OVERRIDE}"
        )
    if abs(found_x - found_y) > AXES_TOLERANCE * min(found_x, found_y):
        raise SlideError(
            f"{path}: the file records {found_x:g} um/px in x and {found_y:g} in y; pixels must be square within "
            f"{AXES_TOLERANCE:.0%}; if one of them is right, {OVERRIDE}"
        )
    return (found_x + found_y) / 2


@lru_cache(4096)
def _warn_of_override(path: Path, recorded: float, override: float) -> None:
    """Warn once: a slide is opened several times."""
    log.warning(
        "%s: the file records %.4g um/px; it is read as %.4g, given by --slide-mpp, --mpp-table or the run. "
        "--mpp-table gives slides their own",
        path,
        recorded,
        override,
    )


SIMILAR: Final = 1 / 16
"""An image with at least this part of the largest one's area is another scene; labels and macros are smaller."""

_AUXILIARY: Final = re.compile(r"(?<![a-z])(label|macro|thumbnail|thumb|overview|preview)(?![a-z])", re.IGNORECASE)
_LISTED: Final = 16


class Pictured(Protocol):
    """An image of a file: a name, which may be empty, and a size in px."""

    @property
    def name(self) -> str: ...
    @property
    def width(self) -> int: ...
    @property
    def height(self) -> int: ...


Image = TypeVar("Image", bound=Pictured)


def find_scenes(images: Sequence[Image]) -> list[Image]:
    """Return the largest image that is not named as a label, macro or thumbnail, and those of similar size."""
    scenes = [image for image in images if not _AUXILIARY.search(image.name)] or list(images)
    scenes.sort(key=_area, reverse=True)
    return [image for image in scenes if _area(image) >= SIMILAR * _area(scenes[0])]


def choose_scene(where: str, scenes: Sequence[Image], scene: int | None) -> Image:
    """Return the scene with the number ``scene``; if there is only one, that one, whatever the number.

    Raises:
        SlideError: there are several, and ``scene`` is none of their numbers.
    """
    if len(scenes) == 1:
        return scenes[0]
    if scene is None or scene >= len(scenes):
        listed = ", ".join(f"{number}: {describe(image)}" for number, image in enumerate(scenes[:_LISTED]))
        request = "choose one" if scene is None else f"there is no scene {scene}; choose another"
        raise SlideError(
            f"{where}: the file has {len(scenes)} images of similar size ({listed}); {request} with --scene N, or save "
            "them as files of their own"
        )
    return scenes[scene]


def _area(image: Pictured) -> int:
    """Return px; 0 if a side is damaged."""
    return max(0, image.width) * max(0, image.height)


def describe(image: Pictured) -> str:
    """Return name and size of an image."""
    return f"{image.name!r} {image.width} x {image.height} px" if image.name else f"{image.width} x {image.height} px"


class MemoryReader:
    """A ``LevelReader`` over arrays, uint8 (h, w, 3) each."""

    name = "memory"

    def __init__(self, levels: Sequence[Pixels]) -> None:
        self._levels = tuple(levels)

    def read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        source = self._levels[level]
        if inside := pad(out, l_x, l_y, source.shape[1], source.shape[0]):
            rows, columns = inside.out.shape[:2]
            inside.out[...] = source[inside.l_y : inside.l_y + rows, inside.l_x : inside.l_x + columns]

    def close(self) -> None:
        self._levels = ()
