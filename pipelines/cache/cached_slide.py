"""A slide whose tiles are taken from a cache where that has them, and kept there where it has not.

Takes an open slide and a cache, and is a slide like it: the same pixels, the same faults. What is no tile of the
cache's kind, an overview for example, is read as ever.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from pipelines.cache.tile_cache import TileCache
from pipelines.cache.tile_kind import slide_number
from pipelines.catalog.catalog import SlideSpec
from pipelines.slides.geometry import Bounds, Level, Region
from pipelines.slides.slide import Pixels, Slide, SlideError
from pipelines.slides.tile_box import TileBox


@dataclass(frozen=True, eq=False)
class CachedSpec:
    """How to open one slide, so that its tiles go through ``cache``."""

    spec: SlideSpec
    cache: TileCache

    @property
    def slide_id(self) -> str:
        return self.spec.slide_id

    def check_unchanged(self) -> None:
        """Refuse a slide that was replaced since it was indexed.

        Raises:
            SlideError: it is not the same.
        """
        self.spec.check_unchanged()

    def open(self) -> Slide:
        """Open the slide, which the caller closes.

        Raises:
            SlideError: as ``SlideSpec.open``.
        """
        slide = self.spec.open()
        try:
            return CachedSlide(slide, self.cache, self.spec.scene)
        except OSError as fault:
            slide.close()
            raise SlideError(f"{slide.path}: the file cannot be read: {fault.strerror or fault}") from fault


class CachedSlide:
    """A ``Slide`` over a slide and a cache; closes the slide, not the cache.

    Args:
        scene: of several images of the file, the one that was opened.

    Raises:
        OSError: the slide's file cannot be read.
    """

    def __init__(self, slide: Slide, cache: TileCache, scene: int | None = None) -> None:
        self._slide, self._cache = slide, cache
        self._number = slide_number(slide, scene)

    @property
    def path(self) -> Path:
        return self._slide.path

    @property
    def backend(self) -> str:
        return self._slide.backend

    @property
    def mpp(self) -> float:
        return self._slide.mpp

    @property
    def levels(self) -> tuple[Level, ...]:
        return self._slide.levels

    @property
    def bounds(self) -> Bounds:
        return self._slide.bounds

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        cache, shape = self._cache, (region.height, region.width, 3)
        if out is None:
            out = np.empty(shape, np.uint8)
        fits = out.shape == shape and out.dtype == np.uint8 and out.flags.c_contiguous
        if not (fits and cache.kind.has(region)):
            return self._slide.read(region, out)
        place = (*self._number, region.l0_x, region.l0_y)
        if cache.get(place, out):
            return out
        begun = time.perf_counter()
        self._slide.read(region, out)
        cache.missed(time.perf_counter() - begun)
        cache.add(place, out)
        return out

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        if self._cache.kind.has(region):
            out[...] = box.crop(self.read(region))  # tiles are kept whole: whoever reads one first, for all
        else:
            self._slide.read_box(region, box, out)

    def close(self) -> None:
        self._slide.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
