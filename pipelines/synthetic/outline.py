"""The outline of the tissue on its glass, and slow changes of thickness, on a grid of one px per 64.

Takes a seed and a slide's size; gives, for any square of the slide, how far inside the tissue each px lies. The grid
of a 100,000 px slide is 10 MB; nothing else of the slide is held as a whole.
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size
from pipelines.synthetic.lattice import Field, cell_rng, smooth_noise
from pipelines.synthetic.stain import Stain

STEP = 64
"""Px of the slide per px of the grid."""


class Contour:
    """Depth and tone of one slide's tissue.

    Args:
        seed: of the slide.
        size: of level 0 in px.
        stain: colours the tone.
        block: edge in px of the squares asked for, a multiple of ``STEP``; asked only at multiples of itself.
    """

    def __init__(self, seed: int, size: Size, stain: Stain, block: int) -> None:
        rng = cell_rng(seed, 0x0071)
        self._per_block = block // STEP
        columns, rows = (-(-n // block) * self._per_block + 2 for n in (size.width, size.height))
        l0_x, l0_y = ((np.arange(n, dtype=np.float32) - 0.5) * STEP for n in (columns, rows))
        u, v = np.abs(l0_x / size.width * 2 - 1)[None], np.abs(l0_y / size.height * 2 - 1)[:, None]
        reach = min(size.width, size.height) / 2
        rounded = (u**5 + v**5) ** 0.2  # a square with round corners, so that most of the slide is tissue
        longest = reach / STEP / 1.2
        bumps = smooth_noise(rng, rows, columns, longest, max(2.5, longest / 16))
        self._depth: Field = (0.88 - rounded).astype(np.float32) * reach + bumps * min(0.075 * reach, 1500)
        thick, dark = (smooth_noise(rng, rows, columns, 48, 3) for _ in range(2))
        tone = stain.transmission(np.clip(0.03 + 0.02 * dark, 0, 1), np.clip(0.06 + 0.035 * thick, 0, 1))
        self._tone = np.rint(tone * (np.array(stain.glass) / 255)).astype(np.uint8)

    def depth(self, column: int, row: int) -> Field:
        """Px inside the tissue (negative: on glass) of each px of a block: float32 (block, block)."""
        return self._block(self._depth, column, row)

    def tone(self, column: int, row: int) -> NDArray[np.uint8]:
        """Transmission of the glass and of the section's thickness over a block: uint8 (block, block, 3)."""
        return self._block(self._tone, column, row)

    def depth_range(self, column: int, row: int) -> tuple[float, float]:
        """Least and greatest depth within a block, without drawing it."""
        depths = self._part(self._depth, column, row)
        return float(depths.min()), float(depths.max())

    def depth_at(self, l0_x: int, l0_y: int) -> float:
        """Depth at the grid px nearest to a place; far outside for places beyond the grid."""
        x, y = l0_x // STEP + 1, l0_y // STEP + 1
        inside = 0 <= x < self._depth.shape[1] and 0 <= y < self._depth.shape[0]
        return float(self._depth[y, x]) if inside else -np.inf

    def _part(self, grid: NDArray[np.generic], column: int, row: int) -> NDArray[np.generic]:
        n = self._per_block
        return grid[row * n : row * n + n + 2, column * n : column * n + n + 2]

    def _block(self, grid: NDArray, column: int, row: int) -> NDArray:  # type: ignore[type-arg]
        side = (self._per_block + 2) * STEP
        enlarged = cv2.resize(self._part(grid, column, row), (side, side), interpolation=cv2.INTER_LINEAR)
        return np.asarray(enlarged[STEP:-STEP, STEP:-STEP])
