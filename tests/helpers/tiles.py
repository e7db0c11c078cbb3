"""Tile tables over slides in memory whose pixels tell the tile they belong to, and damage on request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.handles import SlidePool
from pipelines.slides.geometry import Region, TileBox
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import Pixels, Slide, SlideError, TileReadError
from pipelines.tiles.tile_table import TileTable
from pipelines.tiles.tiling import IndexSettings
from tests.helpers.memory_slide import memory_slide

TILE = 8
MPP = 0.5


def tile_table(counts: Sequence[int], tile: int = TILE) -> TileTable:
    """Slides s0, s1, ... of ``counts`` tiles each, side by side."""
    slide = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    column = np.concatenate([np.arange(count) for count in counts]).astype(np.int64)
    return TileTable(
        tuple(f"s{k}" for k in range(len(counts))),
        slide,
        column * tile,
        np.zeros(len(slide), np.int64),
        np.ones(len(slide), np.float32),
        IndexSettings(tile=tile, mpp=MPP, min_tissue=0.0),
    )


class DamagedSlide(PyramidSlide):
    """A slide of which some tiles cannot be read."""

    bad_l0_x: frozenset[int] = frozenset()

    def read(self, region: Region, out: Pixels | None = None) -> Pixels:
        if region.l0_x in self.bad_l0_x:
            raise TileReadError(f"{self.path}: bad tile at {region.l0_x}")
        return super().read(region, out)

    def read_box(self, region: Region, box: TileBox, out: Pixels) -> None:
        if region.l0_x in self.bad_l0_x:
            raise TileReadError(f"{self.path}: bad tile at {region.l0_x}")
        super().read_box(region, box, out)


@dataclass(frozen=True)
class MemorySpec:
    """A slide of ``count`` tiles; pixel (y, x) of tile t of slide k is (k, t % 256, a number that varies with y, x)."""

    slide_id: str
    number: int
    count: int
    tile: int = TILE
    bad: frozenset[int] = frozenset()
    opens: bool = True
    opened: list[str] = field(default_factory=list, compare=False)

    def verify_unchanged(self) -> None:
        """It is in memory."""

    def open(self) -> Slide:
        self.opened.append(self.slide_id)
        if not self.opens:
            raise SlideError(f"{self.slide_id} does not open")
        slide = memory_slide([self.pixels()], MPP, path=Path(self.slide_id))
        if not self.bad:
            return slide
        damaged = DamagedSlide(slide.path, slide._reader, slide.levels, slide.bounds)
        damaged.bad_l0_x = frozenset(t * self.tile for t in self.bad)
        return damaged

    def pixels(self) -> NDArray[np.uint8]:
        image = np.empty((self.tile, self.count * self.tile, 3), np.uint8)
        y, x = np.mgrid[0 : self.tile, 0 : image.shape[1]]
        image[..., 0] = self.number
        image[..., 1] = (x // self.tile) % 256
        image[..., 2] = (y * 31 + x * 7) % 251
        return image


def memory_specs(
    table: TileTable, change: Callable[[MemorySpec], MemorySpec] = lambda spec: spec
) -> tuple[MemorySpec, ...]:
    """One slide for each of a table, sharing one list of opened ids."""
    opened: list[str] = []
    counts = np.bincount(table.slide, minlength=len(table.slides))
    return tuple(
        change(MemorySpec(slide_id, k, int(counts[k]), table.settings.tile, opened=opened))
        for k, slide_id in enumerate(table.slides)
    )


def pool_of(table: TileTable, capacity: int = 4) -> SlidePool:
    return SlidePool(memory_specs(table), capacity)
