"""Regions, levels, boxes of tiles, and the conversions between their coordinate planes.

Planes are part of every name, as in openslide-python's ``deepzoom.py``: ``l0_`` is level-0 px, ``l_`` px of one level,
``t_`` px of a tile at the requested mpp. Conversions are named ``l0_from_l``. This is the only module that rounds
coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from numpy.typing import NDArray

MPP_MIN, MPP_MAX = 0.05, 100.0
"""Plausible um/px of a level 0. Anything outside is a scanner's placeholder, not a resolution."""

MAGNIFICATIONS = frozenset({10.0, 20.0, 40.0, 60.0, 63.0, 80.0, 100.0})

NATIVE_TOLERANCE = 0.01
"""A level this close to the asked mpp is read as it is: resampling 0.499 to 0.5 would only blur."""


@dataclass(frozen=True, slots=True)
class Size:
    """Width and height in px of some plane."""

    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Level:
    """One resolution of a slide: size in its own px, level-0 px per px, um per px."""

    index: int
    width: int
    height: int
    downsample: float
    mpp: float


@dataclass(frozen=True, slots=True)
class Bounds:
    """The part of level 0 that holds scanned pixels, in level-0 px (OpenSlide's ``openslide.bounds-*``)."""

    l0_x: int
    l0_y: int
    width: int
    height: int


@dataclass(frozen=True, slots=True)
class Region:
    """Region of a slide: origin in level-0 px (top left), size in px **at** ``mpp``, mpp in um/px."""

    l0_x: int
    l0_y: int
    width: int
    height: int
    mpp: float

    def __post_init__(self) -> None:
        if self.width < 1 or self.height < 1:
            raise ValueError(f"a region is at least 1 x 1 px; got {self.width} x {self.height}")


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """Plan to read a region: a box of one level, then a whole-number reduction, then a fractional one.

    Attributes:
        level: the coarsest level that is not coarser than asked.
        l_x, l_y: origin in px of that level; may lie outside it.
        l_width, l_height: size of the box in px of that level.
        block: each ``block x block`` px are averaged first (1: none). ``l_width`` and ``l_height`` are multiples of it.
        out: size of the result; a fractional area resampling leads to it when it is not ``l_size / block``.
    """

    level: int
    l_x: int
    l_y: int
    l_width: int
    l_height: int
    block: int
    out: Size

    @property
    def is_native(self) -> bool:
        """True when the level's pixels are the result: nothing is resampled."""
        return self.block == 1 and (self.l_width, self.l_height) == (self.out.width, self.out.height)


def mpp_fault(mpp: float) -> str:
    """Return why a user's ``mpp`` cannot be the um/px of a slide's level 0; empty if it can."""
    if not check_mpp(mpp):
        return f"must be between {MPP_MIN:g} and {MPP_MAX:g} um/px; got {mpp:g}"
    if mpp in MAGNIFICATIONS:
        return (
            f"is in um/px; got {mpp:g}, which is a magnification: {mpp:g}x is about {10 / mpp:.2g} um/px. "
            f"For px of {mpp:g} um write {mpp + 0.01:g}"
        )
    return ""


def check_mpp(mpp: float) -> bool:
    """True when ``mpp`` (um/px) is finite and within ``MPP_MIN``..``MPP_MAX``."""
    return math.isfinite(mpp) and MPP_MIN <= mpp <= MPP_MAX


def levels_from_sizes(sizes: Sequence[tuple[int, int]], mpp: float) -> tuple[Level, ...]:
    """Levels from (width, height) of each, finest first, and level 0's mpp. Downsample is the mean of both axes."""
    w0, h0 = sizes[0]
    downsamples = [(w0 / w + h0 / h) / 2 for w, h in sizes]
    return tuple(Level(i, w, h, d, mpp * d) for i, ((w, h), d) in enumerate(zip(sizes, downsamples, strict=True)))


def l_from_l0(l0: float, downsample: float) -> int:
    """Nearest px of a level to a level-0 coordinate."""
    return math.floor(l0 / downsample + 0.5)


def l0_from_l(l: float, downsample: float) -> int:  # noqa: E741 - the plane's name
    """Nearest level-0 px to a coordinate of a level."""
    return math.floor(l * downsample + 0.5)


def best_level(levels: Sequence[Level], mpp: float) -> Level:
    """Return the coarsest level that is not coarser than ``mpp``, ``NATIVE_TOLERANCE`` allowed.

    Raises:
        ValueError: level 0 is coarser than asked; pixels cannot be invented.
    """
    fine_enough = [level for level in levels if level.mpp <= mpp * (1 + NATIVE_TOLERANCE)]
    if not fine_enough:
        raise ValueError(
            f"mpp {mpp:g} cannot be had: the finest level of this slide has {levels[0].mpp:.4g} um/px; "
            f"ask for --mpp {levels[0].mpp:.4g} or coarser; app.predict takes the --mpp of training, so train at that"
        )
    return max(fine_enough, key=lambda level: level.mpp)


def plan_read(levels: Sequence[Level], region: Region) -> ReadPlan:
    """Choose the level and the box to read for ``region``. Raises ValueError where no level is fine enough for it."""
    level, out = best_level(levels, region.mpp), Size(region.width, region.height)
    scale = region.mpp / level.mpp
    l_x, l_y = l_from_l0(region.l0_x, level.downsample), l_from_l0(region.l0_y, level.downsample)
    if abs(scale - 1) <= NATIVE_TOLERANCE:
        return ReadPlan(level.index, l_x, l_y, region.width, region.height, 1, out)
    block = math.floor(scale + 0.5)
    if not (is_whole := abs(scale / block - 1) <= NATIVE_TOLERANCE):
        block = math.floor(scale)

    def box(t_px: int) -> int:
        blocks = t_px if is_whole else math.floor(t_px * scale / block + 0.5)
        return max(1, blocks) * block

    return ReadPlan(level.index, l_x, l_y, box(region.width), box(region.height), block, out)


def l0_step(levels: Sequence[Level], side: int, mpp: float) -> float:
    """Return the level-0 px from one px to the next of a region of ``side`` px at ``mpp``, as it is read; raises
    ValueError where no level is fine enough."""
    plan = plan_read(levels, Region(0, 0, side, side, mpp))
    return plan.l_width / side * levels[plan.level].downsample


@dataclass(frozen=True, slots=True)
class TileBox:
    """Rows [row_start, row_stop) and columns [column_start, column_stop) of a tile.

    Raises:
        ValueError: it is empty, or begins before the tile.
    """

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    def __post_init__(self) -> None:
        if not (0 <= self.row_start < self.row_stop and 0 <= self.column_start < self.column_stop):
            raise ValueError(f"a box of a tile begins inside it and holds 1 px at least; got {self}")

    @classmethod
    def full(cls, height: int, width: int) -> Self:
        """Return the box that is all of a tile."""
        return cls(0, height, 0, width)

    @property
    def height(self) -> int:
        return self.row_stop - self.row_start

    @property
    def width(self) -> int:
        return self.column_stop - self.column_start

    def __str__(self) -> str:
        return f"rows {self.row_start}-{self.row_stop}, columns {self.column_start}-{self.column_stop}"

    def holds(self, other: TileBox) -> bool:
        """Return whether all of ``other`` lies inside."""
        rows = self.row_start <= other.row_start and other.row_stop <= self.row_stop
        return rows and self.column_start <= other.column_start and other.column_stop <= self.column_stop

    def within(self, outer: TileBox) -> TileBox:
        """Return the same px, counted from the corner of ``outer``, which holds them."""
        top, left = outer.row_start, outer.column_start
        return TileBox(self.row_start - top, self.row_stop - top, self.column_start - left, self.column_stop - left)

    def crop(self, tile: NDArray[Any]) -> NDArray[Any]:
        """Return a view of these rows and columns of ``tile``, (h, w, ...)."""
        return tile[self.row_start : self.row_stop, self.column_start : self.column_stop]

    def before_turning(self, quarter_turns: int, flip: bool, height: int, width: int) -> TileBox:
        """Return where these px lay in a tile that was turned counter-clockwise and then flipped left to right.

        Args:
            quarter_turns: that were made; an oblong tile takes two or none (``turns_that_fit``).
            height, width: of the tile before.
        """
        top, bottom, left, right = self.row_start, self.row_stop, self.column_start, self.column_stop
        if flip:
            turned_width = (width, height)[quarter_turns % 2]
            left, right = turned_width - right, turned_width - left
        for turns_before in reversed(range(quarter_turns)):
            # row r and column c of what a turn gives were row c, column -1 - r
            side = (width, height)[turns_before % 2]
            top, bottom, left, right = left, right, side - bottom, side - top
        return TileBox(top, bottom, left, right)


def turns_that_fit(quarter_turns: int, height: int, width: int) -> int:
    """Return the quarter turns made of a tile: of an oblong one, which would not fit, that number of half turns."""
    return quarter_turns if height == width else 2 * quarter_turns % 4
