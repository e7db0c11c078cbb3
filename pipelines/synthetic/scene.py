"""One slide's tissue, drawn block by block: stroma, glands, outline, glass.

Takes what a slide shows (``SceneSpec``); gives any block of ``BLOCK`` x ``BLOCK`` px and the mask of its glands, the
same whatever has been drawn before. Layers are transmissions that multiply, as absorbing layers do; glands are
stamped over the stroma. Safe in many threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size
from pipelines.synthetic.arrangement import VARIANTS, Arrangement, Gland
from pipelines.synthetic.glands import HALO, GlandStamp, gland_stamp
from pipelines.synthetic.lattice import cell_rng
from pipelines.synthetic.outline import Contour
from pipelines.synthetic.stain import random_stain
from pipelines.synthetic.texture import Torus, collagen, lymphocytes, wallpaper

BLOCK = 1024
"""Edge in px of what is drawn at once."""

GLAND = 1
"""Class id of gland in a mask; 0 is everything else."""

_EDGE = 5.0
"""Px over which tissue fades into glass."""

_INLAND = 40.0
"""Px that a gland's border keeps from the edge of the tissue."""


@dataclass(frozen=True)
class SceneSpec:
    """What one slide shows.

    Attributes:
        tissue_seed: of the textures and stamps, which slides of one run share.
        slide_seed: of everything else.
        size: of level 0 in px.
        arrangement: of the glands.
    """

    tissue_seed: int
    slide_seed: int
    size: Size
    arrangement: Arrangement


@dataclass(frozen=True)
class DrawnSquare:
    """Drawn square: RGB uint8 (BLOCK, BLOCK, 3) and class ids uint8 (BLOCK, BLOCK)."""

    pixels: NDArray[np.uint8]
    mask: NDArray[np.uint8]


@dataclass(frozen=True)
class _Stamp:
    """A gland in the colours of one slide."""

    pixels: NDArray[np.uint8]
    opacity: NDArray[np.uint8]
    mask: NDArray[np.bool_]

    def turned(self, turn: int) -> _Stamp:
        def one(image: NDArray) -> NDArray:  # type: ignore[type-arg]
            image = np.rot90(image, turn % 4)
            return image[:, ::-1] if turn >= 4 else image

        return _Stamp(one(self.pixels), one(self.opacity), one(self.mask))


class Scene:
    """Draws one slide. Holds its textures and stamps in the slide's colours, about 40 MB."""

    def __init__(self, spec: SceneSpec) -> None:
        self.spec = spec
        self.stain = random_stain(spec.slide_seed)
        self._outline = Contour(spec.slide_seed, spec.size, self.stain, BLOCK)
        self._collagen = wallpaper(_layers(spec.tissue_seed)[0], self.stain, BLOCK)
        self._cells = wallpaper(_layers(spec.tissue_seed)[1], self.stain, BLOCK)
        self._stamps = [
            _Stamp(self.stain.transmission(stamp.haematoxylin, stamp.eosin), stamp.opacity, stamp.mask)
            for stamp in _stamps(spec.tissue_seed, spec.arrangement.radii)
        ]
        self._shift = [int(value) for value in cell_rng(spec.slide_seed, 0x0FF5).integers(0, 1 << 20, 4)]

    @property
    def columns(self) -> int:
        return -(-self.spec.size.width // BLOCK)

    @property
    def rows(self) -> int:
        return -(-self.spec.size.height // BLOCK)

    def is_glass(self, column: int, row: int) -> bool:
        """True when a block holds no tissue at all: all of it is ``stain.glass``."""
        return self._outline.depth_range(column, row)[1] < -4 * _EDGE

    def draw(self, column: int, row: int) -> DrawnSquare:
        """Return the block with its top left at (column, row) times ``BLOCK``; whole even where it leaves the slide."""
        l0_x, l0_y = column * BLOCK, row * BLOCK
        x1, y1, x2, y2 = self._shift
        pixels = cv2.multiply(
            self._collagen.at(l0_x + x1, l0_y + y1, BLOCK), self._cells.at(l0_x + x2, l0_y + y2, BLOCK), scale=1 / 255
        )
        mask = np.zeros((BLOCK, BLOCK), np.uint8)
        for gland in self.glands(l0_x, l0_y, BLOCK):
            self._stamp(pixels, mask, gland, l0_x, l0_y)
        pixels = cv2.multiply(pixels, self._outline.tone(column, row), scale=1 / 255)
        shallowest, _ = self._outline.depth_range(column, row)
        if shallowest < 4 * _EDGE:
            self._fade(pixels, self._outline.depth(column, row))
        return DrawnSquare(pixels, mask)

    def glands(self, l0_x: int, l0_y: int, size: int) -> list[Gland]:
        """Glands that a square of ``size`` px may show: those whose centre lies in it or near enough."""
        arrangement = self.spec.arrangement
        reach = int(arrangement.radii[1]) + HALO + 1
        box = (l0_x - reach, l0_y - reach, l0_x + size + reach, l0_y + size + reach)
        return [
            gland
            for gland in arrangement.glands(self.spec.slide_seed, *box)
            if self._outline.depth_at(gland.l0_x, gland.l0_y) > reach + _INLAND
        ]

    def _stamp(self, pixels: NDArray[np.uint8], mask: NDArray[np.uint8], gland: Gland, l0_x: int, l0_y: int) -> None:
        stamp = self._stamps[gland.stamp].turned(gland.turn)
        n = len(stamp.opacity)
        x, y = gland.l0_x - n // 2 - l0_x, gland.l0_y - n // 2 - l0_y
        left, top, right, bottom = max(0, x), max(0, y), min(BLOCK, x + n), min(BLOCK, y + n)
        if left >= right or top >= bottom:
            return
        inside = np.s_[top - y : bottom - y, left - x : right - x]
        under = pixels[top:bottom, left:right]
        share = stamp.opacity[inside][..., None].astype(np.uint16)
        under[...] = (stamp.pixels[inside] * share + under * (255 - share) + 127) // 255
        mask[top:bottom, left:right][stamp.mask[inside]] = GLAND

    def _fade(self, pixels: NDArray[np.uint8], depth: NDArray[np.float32]) -> None:
        """Let tissue end where ``depth`` crosses 0, raggedly: dense fibres reach out farther."""
        fibres = (200.0 - pixels[..., 1].astype(np.float32)) * np.float32(0.12)
        tissue = np.clip((depth + np.clip(fibres, -_EDGE, _EDGE)) / _EDGE + np.float32(0.5), 0, 1)[..., None]
        glass = np.array(self.stain.glass, np.float32)
        pixels[...] = np.rint(glass + tissue * (pixels - glass)).astype(np.uint8)


@lru_cache(maxsize=1)
def _layers(tissue_seed: int) -> tuple[Torus, Torus]:
    return collagen(tissue_seed), lymphocytes(tissue_seed)


@lru_cache(maxsize=2)
def _stamps(tissue_seed: int, radii: tuple[float, float]) -> tuple[GlandStamp, ...]:
    radius = np.linspace(*radii, VARIANTS)
    return tuple(gland_stamp(int(cell_rng(tissue_seed, 0x57A9, k).integers(1 << 31)), r) for k, r in enumerate(radius))
