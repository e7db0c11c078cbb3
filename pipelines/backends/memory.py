"""A slide made of numpy arrays: for tests, notebooks and programs that have the pixels already.

Takes one array per level, finest first, and level 0's mpp; gives a ``Slide``. Nothing is copied.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np

from pipelines.backends.padding import pad
from pipelines.backends.resolution import level0_mpp
from pipelines.slides.geometry import Bounds, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import Pixels


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


def memory_slide(
    levels: Sequence[Pixels], mpp: float, *, path: Path = Path("memory"), bounds: Bounds | None = None
) -> PyramidSlide:
    """Return a slide over ``levels``.

    Args:
        levels: uint8 (h, w, 3) each, RGB, finest first.
        mpp: um/px of the first.
        path: what the slide calls itself in messages.
        bounds: as of ``Slide``.

    Raises:
        ValueError: no level, a level of another type or shape, levels not sorted, or an implausible mpp.
    """
    if not levels:
        raise ValueError("a slide has at least one level; got none")
    for i, array in enumerate(levels):
        if array.dtype != np.uint8 or array.ndim != 3 or array.shape[2] != 3 or 0 in array.shape:
            raise ValueError(f"level {i} must be uint8 (height, width, 3), not empty; got {array.dtype} {array.shape}")
    sizes = [(array.shape[1], array.shape[0]) for array in levels]
    if any(w > finer_w or h > finer_h for (finer_w, finer_h), (w, h) in pairwise(sizes)):
        raise ValueError(f"levels must be given finest first; got sizes (width, height) {sizes}")
    return PyramidSlide(path, MemoryReader(levels), levels_from_sizes(sizes, level0_mpp(path, None, None, mpp)), bounds)
