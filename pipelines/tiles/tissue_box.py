"""A whole slide as one tile: the rectangle around its tissue.

Takes the tissue mask of a slide and the resolution to read at; gives the region, whose sides are multiples of what
models ask for. What of it lies outside the slide is read as white.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.slides.geometry import Level, Region, best_level, l0_from_l, l0_from_t
from pipelines.tiles.tissue import Mask, TissueMask

MOST_PIXELS = 1 << 36
"""Of one slide: 262,144 x 262,144 px, 192 GiB. More is a damaged size, or a mistyped --mpp."""


def tissue_box(levels: Sequence[Level], tissue: TissueMask, mpp: float, multiple: int) -> Region:
    """Return the smallest region at ``mpp`` that holds all tissue, widened to the right and downwards to multiples of
    ``multiple`` px; of a slide without any, the whole slide.

    Raises:
        ValueError: no level is fine enough for ``mpp``, or the region has more than ``MOST_PIXELS``.
    """
    best_level(levels, mpp)
    mask = tissue.mask if tissue.mask.any() else ~tissue.mask
    (left, right), (top, bottom) = (_extent(mask, axis) for axis in (0, 1))
    l0_x, l0_right = (tissue.l0_x + l0_from_l(px, tissue.downsample) for px in (left, right))
    l0_y, l0_bottom = (tissue.l0_y + l0_from_l(px, tissue.downsample) for px in (top, bottom))
    width, height = (
        _covering(l0_side, mpp, levels[0].mpp, multiple) for l0_side in (l0_right - l0_x, l0_bottom - l0_y)
    )
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"a whole slide is at most {MOST_PIXELS:,} px; the tissue of this one is {width:,} x {height:,} px at "
            f"{mpp:g} um/px; is its size true? ask for a coarser --mpp"
        )
    return Region(l0_x, l0_y, width, height, mpp)


def _extent(mask: Mask, axis: int) -> tuple[int, int]:
    """First px along the other axis that is set anywhere along ``axis``, and one past the last."""
    hits = np.flatnonzero(mask.any(axis))
    return int(hits[0]), int(hits[-1]) + 1


def _covering(l0_side: int, mpp: float, l0_mpp: float, multiple: int) -> int:
    """Fewest px at ``mpp``, a multiple of ``multiple``, that cover ``l0_side``."""
    l0_thousand = max(1, l0_from_t(1000 * multiple, mpp, l0_mpp))  # as it converts: not everywhere the ratio of mpps
    count = max(1, 1000 * l0_side // l0_thousand - 1)
    while l0_from_t(count * multiple, mpp, l0_mpp) < l0_side:
        count += 1
    return count * multiple
