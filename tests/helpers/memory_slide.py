"""A slide over arrays, in place of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipelines.backends.level_reader import MemoryReader
from pipelines.slides.geometry import Bounds, levels_from_sizes
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import Pixels


def memory_slide(
    levels: Sequence[Pixels], mpp: float, *, path: Path = Path("memory"), bounds: Bounds | None = None
) -> PyramidSlide:
    """Return a slide over ``levels``, uint8 (h, w, 3) each, finest first."""
    sizes = [(array.shape[1], array.shape[0]) for array in levels]
    return PyramidSlide(path, MemoryReader(levels), levels_from_sizes(sizes, mpp), bounds)
