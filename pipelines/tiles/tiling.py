"""Which tiles a slide is cut into: level-0 origins on a grid, and how much of each tile is tissue.

Takes the levels, the tile's size, mpp and stride, and a ``TissueMask``; gives a ``TileGrid`` and fractions. The last
row and column are shifted inwards so that the border is covered by whole tiles, as in nnU-Net's sliding window
(Isensee et al., Nature Methods 18, 2021). Rounding is left to ``geometry``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Bounds, Level, best_level, l0_from_t, l_from_l0
from pipelines.tiles.tissue import TissueMask

MOST_TILES = 10_000_000
"""Of one slide: 200,000 x 200,000 px have as many tiles of 64 px. More is a damaged size, or a mistyped --tile."""


@dataclass(frozen=True, eq=False)
class TileGrid:
    """Tiles at every crossing of columns and rows.

    Attributes:
        l0_x: int64 (columns,), ascending, left edges in level-0 px.
        l0_y: int64 (rows,), ascending, top edges in level-0 px.
        l0_size: width and height of a tile in level-0 px.
        size: the same in px at the mpp that it is read at.
    """

    l0_x: NDArray[np.int64]
    l0_y: NDArray[np.int64]
    l0_size: tuple[int, int]
    size: tuple[int, int]


def tile_grid(levels: Sequence[Level], bounds: Bounds, tile: int, mpp: float, stride: int) -> TileGrid:
    """Tiles of ``tile`` px at ``mpp`` every ``stride`` px over ``bounds``.

    Raises:
        ValueError: a tile is larger than the slide, no level is fine enough for ``mpp``, or more than ``MOST_TILES``.
    """
    best_level(levels, mpp)
    l0_mpp = levels[0].mpp
    l0_tile = max(1, l0_from_t(tile, mpp, l0_mpp))
    shorter = min(bounds.width, bounds.height)
    if l0_tile > shorter:
        largest = next(t for t in range(tile, 0, -1) if t == 1 or l0_from_t(t, mpp, l0_mpp) <= shorter)
        raise ValueError(
            f"a tile of {tile} px at {mpp:g} um/px is {l0_tile} px of level 0 and larger than the slide "
            f"({bounds.width} x {bounds.height} px at {l0_mpp:.4g} um/px); the largest that fits is --tile {largest} "
            f"at --mpp {mpp:g}"
        )

    l0_stride = max(1, l0_from_t(stride, mpp, l0_mpp))
    tiles = -(-bounds.width // l0_stride) * -(-bounds.height // l0_stride)
    if tiles > MOST_TILES:
        raise ValueError(
            f"a slide has at most {MOST_TILES:,} tiles; every {stride} px at {mpp:g} um/px there would be {tiles:,} on "
            f"this one of {bounds.width} x {bounds.height} px; is its size true? ask for a larger --tile or --stride"
        )

    def origins(l0_start: int, l0_length: int) -> NDArray[np.int64]:
        last = l0_length - l0_tile
        strides = (l0_from_t(i * stride, mpp, l0_mpp) for i in itertools.count())
        return l0_start + np.array([*itertools.takewhile(lambda l0: l0 < last, strides), last], np.int64)

    l0_x, l0_y = origins(bounds.l0_x, bounds.width), origins(bounds.l0_y, bounds.height)
    return TileGrid(l0_x, l0_y, (l0_tile, l0_tile), (tile, tile))


def tissue_fractions(tissue: TissueMask, grid: TileGrid) -> NDArray[np.float32]:
    """Return the part of each tile that is tissue: float32 (rows, columns), 0 to 1.

    A tile counts the mask px between its edges, each rounded to the nearest; an integral image (Crow, SIGGRAPH 1984)
    makes that four look-ups whatever the tile's size.
    """
    integral = cv2.integral(tissue.mask.view(np.uint8)).astype(np.int64, copy=False)
    left, right = _edges(grid.l0_x - tissue.l0_x, grid.l0_size[0], tissue.downsample, tissue.mask.shape[1])
    top, bottom = _edges(grid.l0_y - tissue.l0_y, grid.l0_size[1], tissue.downsample, tissue.mask.shape[0])
    counts = (
        integral[np.ix_(bottom, right)]
        - integral[np.ix_(top, right)]
        - integral[np.ix_(bottom, left)]
        + integral[np.ix_(top, left)]
    )
    fractions: NDArray[np.float32] = (counts / np.outer(bottom - top, right - left)).astype(np.float32)
    return fractions


def _edges(
    l0_starts: NDArray[np.int64], l0_tile: int, downsample: float, mask_px: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First mask px and one past the last, at least one px apart and inside the mask."""
    first = np.array([l_from_l0(float(x), downsample) for x in l0_starts], np.int64).clip(0, mask_px - 1)
    past = np.array([l_from_l0(float(x + l0_tile), downsample) for x in l0_starts], np.int64).clip(1, mask_px)
    return first, np.maximum(past, first + 1)
