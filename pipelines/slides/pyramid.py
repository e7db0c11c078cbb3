"""A slide made of levels: chooses the level for a region, reads it, and resamples by area to the mpp asked for."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Self

import cv2
import numpy as np

from pipelines.slides.geometry import Bounds, Level, ReadPlan, Region, plan_read
from pipelines.slides.slide import UNEXPECTED, LevelReader, Pixels, SlideError, TileReadError

BAND_BYTES = 64 << 20
"""Level pixels held at once while an area is reduced: this, or as much as the result if that is more. So an overview
of a 100,000 px slide stays small, and a large tile costs its own size again, not that of the finer pixels it is made
of. Smaller bands would decode more compressed tiles twice, at the two edges of each."""


class PyramidSlide:
    """A ``Slide`` over a ``LevelReader``.

    Args:
        path: the file.
        reader: gives the pixels of a level; closed with the slide.
        levels: finest first.
        bounds: where level 0 holds pixels; all of it by default.
    """

    def __init__(
        self, path: Path, reader: LevelReader, levels: tuple[Level, ...], bounds: Bounds | None = None
    ) -> None:
        self.path = path
        self.levels = levels
        self.bounds = bounds or Bounds(0, 0, levels[0].width, levels[0].height)
        self._reader = reader
        self._closed = False

    @property
    def backend(self) -> str:
        return self._reader.name

    @property
    def mpp(self) -> float:
        return self.levels[0].mpp

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        if self._closed:
            raise SlideError(f"{self.path}: the slide is closed; open it again to read {region}")
        shape = (region.height, region.width, 3)
        if out is None:
            out = np.empty(shape, np.uint8)
        elif out.shape != shape or out.dtype != np.uint8:
            raise ValueError(f"out must be uint8 {shape} for {region}; got {out.dtype} {out.shape}")
        plan = plan_read(self.levels, region)
        if plan.is_native:
            self._read_level(plan.level, plan.l_x, plan.l_y, out)
        else:
            self._resample(plan, out)
        return out

    def _read_level(self, level: int, l_x: int, l_y: int, out: Pixels) -> None:
        """Read, and turn what a slide library raises on damaged bytes into an error of ours, its cause chained."""
        try:
            self._reader.read_level(level, l_x, l_y, out)
        except (SlideError, MemoryError):  # memory is the machine's fault
            raise
        except Exception as error:
            raise TileReadError(
                f"{self.path}: level {level}, x {l_x}, y {l_y}, {out.shape[1]} x {out.shape[0]} px cannot be read: "
                f"{UNEXPECTED} {type(error).__name__}: {error}"
            ) from error

    def _resample(self, plan: ReadPlan, out: Pixels) -> None:
        """Fill ``out`` with the level's box averaged by area, in bands so that the box is never held whole.

        A band begins at a whole row of the level, and ``_band_tops`` puts it where that is nearly exact. What is left,
        some hundredths of a row, makes no seam: both bands at an edge are off there by the same amount.
        """
        rows, columns = plan.l_height // plan.block, plan.l_width // plan.block
        height, width = out.shape[:2]
        assert rows >= height, "the level is not coarser than asked"
        bands = min(height, math.ceil(plan.l_height * plan.l_width * 3 / max(BAND_BYTES, out.nbytes)))
        tops = _band_tops(height, rows, bands)
        firsts = [(2 * rows * top + height) // (2 * height) for top in tops]  # nearest row to rows / height * top
        buffer = np.empty((max(b - a for a, b in pairwise(firsts)) * plan.block, plan.l_width, 3), np.uint8)
        for (top, bottom), (first, last) in zip(pairwise(tops), pairwise(firsts), strict=True):
            band = buffer[: (last - first) * plan.block]
            self._read_level(plan.level, plan.l_x, plan.l_y + first * plan.block, band)
            if plan.block > 1:
                band = cv2.resize(band, (columns, last - first), interpolation=cv2.INTER_AREA)
            if band.shape == out[top:bottom].shape:
                out[top:bottom] = band
            else:
                cv2.resize(band, (width, bottom - top), dst=out[top:bottom], interpolation=cv2.INTER_AREA)

    def close(self) -> None:
        self._closed = True
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _band_tops(height: int, rows: int, bands: int) -> list[int]:
    """Where to cut ``height`` rows made of ``rows`` finer ones: near even parts, where both kinds of row begin.

    Gives ``bands + 1`` rows from 0 to ``height``. Each cut is moved by up to an eighth of a band, to where its place
    among the finer rows is nearest to a whole number.
    """
    reach = height // (8 * bands)

    def misfit(top: int) -> int:
        return min(rows * top % height, -rows * top % height)

    middles = [height * i // bands for i in range(1, bands)]
    return [0, *(min(range(m - reach, m + reach + 1), key=misfit) for m in middles), height]
