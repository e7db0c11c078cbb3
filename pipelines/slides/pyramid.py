"""A slide made of levels: chooses the level for a region, reads it, and resamples by area to the mpp asked for."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path

import cv2
import numpy as np

from pipelines.slides.geometry import Bounds, Level, ReadPlan, Region, Size, TileBox, plan_read
from pipelines.slides.slide import UNEXPECTED, Closing, LevelReader, Pixels, SlideError, TileReadError, is_disk_error

BAND_BYTES = 64 << 20
"""Level pixels held in memory while an area is reduced: this, or as much as the result if that is more. So an overview
of a 100,000 px slide stays small, and a large tile costs its own size again, not that of the finer pixels it is made
of. Smaller bands would decode more compressed tiles twice, at the two edges of each."""


class PyramidSlide(Closing):
    """A ``Slide`` over a ``LevelReader``.

    Args:
        reader: gives the pixels of a level; closed with the slide.
        levels: finest first.
        bounds: where level 0 holds pixels; all of it by default.
        drawn_levels: whose px ``reader`` draws between those that are stored, so that they depend on where a read
            begins.
    """

    def __init__(
        self,
        path: Path,
        reader: LevelReader,
        levels: tuple[Level, ...],
        bounds: Bounds | None = None,
        drawn_levels: frozenset[int] = frozenset(),
    ) -> None:
        self.path, self.levels = path, levels
        self.bounds = bounds or Bounds(0, 0, levels[0].width, levels[0].height)
        self.backend, self.mpp = reader.name, levels[0].mpp
        self._reader = reader
        self._drawn_levels = drawn_levels
        self._closed = False

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        if out is None:
            out = np.empty((region.height, region.width, 3), np.uint8)
        self.read_box(region, TileBox.full(region.height, region.width), out)
        return out

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        if self._closed:
            raise SlideError(f"{self.path}: the slide is closed; open it again to read {region}")
        whole = TileBox.full(region.height, region.width)
        if not whole.holds(box):
            raise ValueError(f"a box lies inside its region, {whole}; got {box}")
        shape = (box.height, box.width, 3)
        if out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 {shape} for {region}; got {out.dtype} {out.shape}")
        plan = plan_read(self.levels, region)
        exact = _plan_of_box(plan, box) if box == whole or plan.level not in self._drawn_levels else None
        if exact is None and plan.is_native:
            out[...] = box.crop(self.read(region))
        elif exact is None:
            self._resample(plan, box, out)
        elif exact.is_native:
            self._read_level(exact.level, exact.l_x, exact.l_y, out)
        else:
            self._resample(exact, TileBox.full(*shape[:2]), out)

    def _read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        """Read, and turn what a slide library raises on damaged bytes into an error of ours, its cause chained."""
        try:
            self._reader.read_level(level, l_x, l_y, out)
        except (SlideError, MemoryError):  # memory is the machine's fault
            raise
        except Exception as error:
            place = f"{self.path}: level {level}, x {l_x}, y {l_y}, {out.shape[1]} x {out.shape[0]} px cannot be read"
            if is_disk_error(error):
                raise SlideError(f"{place}: {error}; check the disk or share, then run the command again") from error
            raise TileReadError(f"{place}: {UNEXPECTED} {type(error).__name__}: {error}") from error

    def _resample(self, plan: ReadPlan, box: TileBox, out: Pixels) -> None:
        """Fill ``out`` with ``box`` of the level's box averaged by area, in bands so that that is never held whole.

        A band begins at a whole row of the level, and ``_band_tops`` puts it where that is nearly exact. What is left,
        some hundredths of a row, makes no seam: both bands at an edge are off there by the same amount. Of a box, bands
        are those of the whole, and resized as a whole, with no more px in them than go into the box: so it has the px
        of the whole, bit for bit.
        """
        rows = plan.l_height // plan.block
        height, width = plan.out.height, plan.out.width
        assert rows >= height, "the level is not coarser than asked"
        held = max(BAND_BYTES, height * width * 3)
        tops = _band_tops(height, rows, min(height, math.ceil(plan.l_height * plan.l_width * 3 / held)))
        firsts = [(2 * rows * top + height) // (2 * height) for top in tops]  # nearest row to rows / height * top
        buffer = np.empty(max(b - a for a, b in pairwise(firsts)) * plan.block * plan.l_width * 3, np.uint8)
        for (top, bottom), (first, last) in zip(pairwise(tops), pairwise(firsts), strict=True):
            if bottom <= box.row_start or box.row_stop <= top:
                continue
            inner = TileBox(
                max(top, box.row_start) - top, min(bottom, box.row_stop) - top, box.column_start, box.column_stop
            )
            band = self._band(plan, (first, last), inner, bottom - top, buffer)
            target = out[top + inner.row_start - box.row_start :][: inner.height]
            if band.shape == (bottom - top, width, 3):
                target[...] = inner.crop(band)
            elif target.shape == (bottom - top, width, 3):
                cv2.resize(band, (width, bottom - top), dst=target, interpolation=cv2.INTER_AREA)
            else:
                target[...] = inner.crop(cv2.resize(band, (width, bottom - top), interpolation=cv2.INTER_AREA))

    def _band(self, plan: ReadPlan, rows: tuple[int, int], inner: TileBox, height: int, buffer: Pixels) -> Pixels:
        """Return rows [first, last) of the plan's blocks, in ``buffer`` if possible; only those px ``inner`` needs."""
        (first, last), block = rows, plan.block
        shape = (last - first, plan.l_width // block, 3)
        needed = whole = TileBox.full(*shape[:2])
        if plan.level not in self._drawn_levels:
            needed = TileBox(
                *_finer(inner.row_start, inner.row_stop, whole.height, height),
                *_finer(inner.column_start, inner.column_stop, whole.width, plan.out.width),
            )
        l_x, l_y = plan.l_x + needed.column_start * block, plan.l_y + (first + needed.row_start) * block
        if block == 1:
            band = buffer[: math.prod(shape)].reshape(shape)
            self._read_level(plan.level, l_x, l_y, needed.crop(band))
            return band
        blocks = buffer[: needed.height * needed.width * block * block * 3]
        blocks = blocks.reshape(needed.height * block, needed.width * block, 3)
        self._read_level(plan.level, l_x, l_y, blocks)
        reduced: Pixels = cv2.resize(blocks, (needed.width, needed.height), interpolation=cv2.INTER_AREA)
        if needed == whole:
            return reduced
        band = np.empty(shape, np.uint8)
        needed.crop(band)[...] = reduced
        return band

    def close(self) -> None:
        self._closed = True
        self._reader.close()


def _plan_of_box(plan: ReadPlan, box: TileBox) -> ReadPlan | None:
    """Return how ``box`` is read alone, px for px as in the whole; None: its px depend on where the whole begins."""
    block = plan.block
    if (plan.l_width, plan.l_height) != (block * plan.out.width, block * plan.out.height):
        return None
    l_x, l_y = plan.l_x + block * box.column_start, plan.l_y + block * box.row_start
    return ReadPlan(plan.level, l_x, l_y, block * box.width, block * box.height, block, Size(box.width, box.height))


def _finer(start: int, stop: int, finer: int, count: int) -> tuple[int, int]:
    """Return which of ``finer`` px are averaged to [start, stop) of ``count`` px, one more on either side."""
    if finer == count:
        return start, stop
    return max(0, start * finer // count - 1), min(finer, -(-stop * finer // count) + 1)


def _band_tops(height: int, rows: int, bands: int) -> list[int]:
    """Return ``bands + 1`` cuts of ``height`` rows, each where a finer row begins as nearly as in its neighbourhood."""
    reach = height // (8 * bands)

    def misfit(top: int) -> int:
        return min(rows * top % height, -rows * top % height)

    middles = [height * i // bands for i in range(1, bands)]
    return [0, *(min(range(m - reach, m + reach + 1), key=misfit) for m in middles), height]
