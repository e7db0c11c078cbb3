"""Which tiles of a slide are cut: the settings, and a grid with the tissue of each tile or one box.

The last row and column of a grid are shifted inwards so that whole tiles cover the border, as in nnU-Net's sliding
window (Isensee et al., Nature Methods 18, 2021). Sides of the box are multiples of what models need.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines import Rare
from pipelines.slides.geometry import MPP_MAX, MPP_MIN, Bounds, Level, Region, l0_from_l, l0_step, l_from_l0
from pipelines.tiles.tissue import TissueMask

WHOLE_SLIDE_MULTIPLE = 32
"""px that the sides of a whole slide are multiples of: models halve them five times."""


@dataclass(frozen=True)
class IndexSettings:
    """Which tiles are cut. Two indexes are interchangeable when these agree."""

    tile: int | Literal["slide"] = 1024
    """Side of the square tiles, in px at --mpp. slide: one tile for each slide, the rectangle around its tissue, of
    whatever size that has."""
    mpp: float = 0.5
    """Resolution the tiles are read at, in um/px."""
    stride: Rare[int | None] = None
    """Step from tile to tile, px at --mpp; default: the tile's side. --tile slide: sides are multiples of it (32)."""
    min_tissue: float = 0.25
    """Least part of a tile that is tissue, 0 to 1; 0 keeps every tile. --tile slide: any tissue is enough."""
    pictures: Rare[Literal["tiles", "resize"]] = "tiles"
    """PNG and JPEG files. tiles: slides, cut into tiles; resize: each one image with one class, resized to --tile."""
    tissue_mpp: Rare[float] = 8.0
    """Resolution at which tissue is looked for, in um/px; coarser where that would take more than 40 million px."""

    @property
    def whole_pictures(self) -> bool:
        """Return whether each slide is a picture that is resized to a tile."""
        return self.pictures == "resize"

    @property
    def one_tile_each(self) -> bool:
        """Return whether a slide is one tile."""
        return self.tile == "slide" or self.whole_pictures

    @property
    def side(self) -> int:
        """Side of the tiles in px, where they are squares of one size."""
        assert self.tile != "slide"
        return self.tile

    def validate(self) -> list[str]:
        """Return every fault of these settings, each with its rule and the value received."""
        if self.whole_pictures:
            return self._picture_faults()
        faults = []
        if self.tile == "slide":
            if self.stride is not None and self.stride < 1:
                faults.append(f"--stride is at least 1 px with --tile slide; got {self.stride}")
        elif self.tile < 1:
            faults.append(f"--tile is at least 1 px, or slide; got {self.tile}")
        elif self.stride is not None and not 1 <= self.stride <= self.tile:
            faults.append(f"--stride is 1 to --tile ({self.tile}) px, or tiles leave gaps; got {self.stride}")
        if not MPP_MIN <= self.mpp <= MPP_MAX:
            faults.append(f"--mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.mpp:g}")
        if not 0 <= self.min_tissue <= 1:
            faults.append(f"--min-tissue is a part of a tile, 0 to 1; got {self.min_tissue:g}")
        if not MPP_MIN <= self.tissue_mpp <= MPP_MAX:
            faults.append(f"--tissue-mpp is {MPP_MIN:g} to {MPP_MAX:g} um/px; got {self.tissue_mpp:g}")
        elif not faults and self.tile != "slide" and self.tile * self.mpp < self.tissue_mpp:
            faults.append(
                f"a tile ({self.tile} px at {self.mpp:g} um/px) is smaller than one px of the tissue mask "
                f"({self.tissue_mpp:g} um); ask for a larger --tile or a finer --tissue-mpp"
            )
        return faults

    def _picture_faults(self) -> list[str]:
        """Errors of settings for whole pictures, which need the tile alone."""
        faults = []
        if self.tile == "slide" or self.tile < 1:
            faults.append(f"--pictures resize needs a --tile of at least 1 px; got {self.tile}")
        for name in ("mpp", "stride", "min_tissue"):
            if (value := getattr(self, name)) != getattr(IndexSettings, name):
                flag = name.replace("_", "-")
                faults.append(f"--{flag} says nothing of --pictures resize, which takes whole pictures; got {value:g}")
        return faults


def check_settings(made_with: IndexSettings, asked: IndexSettings, where: Path) -> None:
    """Refuse an index that was made with other settings.

    Raises:
        ValueError: names every differing key, the value found, the value asked for, the file, and what to do.
    """
    differing = [
        f"{f.name} is {getattr(made_with, f.name)} there, {getattr(asked, f.name)} was asked for"
        for f in fields(IndexSettings)
        if getattr(made_with, f.name) != getattr(asked, f.name)
    ]
    refuse_other_settings(differing, where)


def refuse_other_settings(differing: Sequence[str], where: Path) -> None:
    """Raise ValueError for an index, a file, that was made with settings ``differing`` from those asked for."""
    if differing:
        raise ValueError(
            f"{where} was made with other settings: {'; '.join(differing)}. "
            "Give another --out, or the same settings as before"
        )


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
    step, l0_mpp = l0_step(levels, tile, mpp), levels[0].mpp
    l0_tile = max(1, l0_from_l(tile, step))
    shorter = min(bounds.width, bounds.height)
    if l0_tile > shorter:
        fitting = (t for t in range(tile, 1, -1) if l0_from_l(t, l0_step(levels, t, mpp)) <= shorter)
        largest = next(fitting, 1)
        raise ValueError(
            f"a tile of {tile} px at {mpp:g} um/px is {l0_tile} px of level 0 and larger than the slide "
            f"({bounds.width} x {bounds.height} px at {l0_mpp:.4g} um/px); the largest that fits is --tile {largest} "
            f"at --mpp {mpp:g}"
        )

    l0_stride = max(1, l0_from_l(stride, step))
    tiles = -(-bounds.width // l0_stride) * -(-bounds.height // l0_stride)
    if tiles > MOST_TILES:
        raise ValueError(
            f"a slide has at most {MOST_TILES:,} tiles; every {stride} px at {mpp:g} um/px there would be {tiles:,} on "
            f"this one of {bounds.width} x {bounds.height} px; is its size true? ask for a larger --tile or --stride"
        )

    def origins(l0_start: int, l0_length: int) -> NDArray[np.int64]:
        last = l0_length - l0_tile
        strides = (l0_from_l(i * stride, step) for i in itertools.count())
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


MOST_PIXELS = 1 << 36
"""Of one slide: 262,144 x 262,144 px, 192 GiB. More is a damaged size, or a mistyped --mpp."""


def tissue_box(levels: Sequence[Level], tissue: TissueMask, mpp: float, multiple: int) -> Region:
    """Return the smallest region at ``mpp`` that holds all tissue, widened to the right and downwards to multiples of
    ``multiple`` px; of a slide without any, the whole slide.

    Raises:
        ValueError: no level is fine enough for ``mpp``, or the region has more than ``MOST_PIXELS``.
    """
    mask = tissue.mask if tissue.mask.any() else ~tissue.mask
    columns, rows = (np.flatnonzero(mask.any(axis)) for axis in (0, 1))
    l0_x, l0_right = (tissue.l0_x + l0_from_l(int(px), tissue.downsample) for px in (columns[0], columns[-1] + 1))
    l0_y, l0_bottom = (tissue.l0_y + l0_from_l(int(px), tissue.downsample) for px in (rows[0], rows[-1] + 1))
    width, height = (_covering(levels, l0_side, mpp, multiple) for l0_side in (l0_right - l0_x, l0_bottom - l0_y))
    if width * height > MOST_PIXELS:
        raise ValueError(
            f"a whole slide is at most {MOST_PIXELS:,} px; the tissue of this one is {width:,} x {height:,} px at "
            f"{mpp:g} um/px; is its size true? ask for a coarser --mpp"
        )
    return Region(l0_x, l0_y, width, height, mpp)


def _covering(levels: Sequence[Level], l0_side: int, mpp: float, multiple: int) -> int:
    """Fewest px at ``mpp``, a multiple of ``multiple``, that cover ``l0_side``."""
    count = max(1, int(l0_side / (multiple * l0_step(levels, 1000 * multiple, mpp))) - 1)
    while count * multiple * l0_step(levels, count * multiple, mpp) < l0_side:
        count += 1
    return count * multiple
