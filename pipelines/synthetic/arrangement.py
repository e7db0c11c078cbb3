"""Where glands lie: arrangements on a lattice of cells, each cell a pure function of (seed, cell).

Takes a seed and a cell; gives the glands of that cell. The two classes of `classify` are rows of glands: ``EVEN``
rows lie 512 px apart, ``GROUPED`` rows lie in threes, ``ROWS_APART`` px apart, with a wide gap to the next three.
Three rows per 1,536 px in both, and rows so far apart that no upright window of 256 px touches two: such a window
sees nothing or one row, equally often and of the same make in both classes, and cannot know. ``CROWDED`` is the one
of `segment`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.synthetic.lattice import cell_rng

SMALL_WINDOW = 256
"""Px of a tile that must not know the class."""

VARIANTS = 48
"""Different glands drawn per run; each appears in eight orientations."""

BEND = 30.0
"""Px that rows leave the straight line by, at most. All rows of a slide bend alike."""

_BEND_WAVELENGTHS = (2600.0, 4100.0)

_ROW_RADIUS, _ROW_JITTER, _ROW_PITCH, _ROW_CELL = 44.0, 4.0, 96.0, 1536

ROWS_APART = 384.0
"""Px between grouped rows: 256, plus two radii with halo, two jitters, and 16 px that rows can rise within 256 px."""


@dataclass(frozen=True)
class Gland:
    """One gland: centre in level-0 px, which stamp, and one of the eight turns and flips of a square."""

    l0_x: int
    l0_y: int
    stamp: int
    turn: int


@dataclass(frozen=True)
class Arrangement:
    """How glands are placed.

    Attributes:
        cell: edge of a lattice cell in px.
        radii: smallest and largest outer radius of a gland in px.
        place: gives the centres of one cell's glands relative to its top left, float (n, 2), all within the cell.
    """

    cell: int
    radii: tuple[float, float]
    place: Callable[[np.random.Generator], NDArray[np.float64]]

    def glands(self, seed: int, l0_x: int, l0_y: int, l0_right: int, l0_bottom: int) -> list[Gland]:
        """Return the glands whose centres lie in a box of the endless plane."""
        rng = cell_rng(seed, 0x5F1F)
        shift, turned = rng.integers(0, self.cell, 2), rng.random() < 0.5
        phases = rng.uniform(0, 2 * np.pi, 2)
        low, high = np.array([l0_x, l0_y], float), np.array([l0_right, l0_bottom], float)
        if turned:
            low, high = low[::-1], high[::-1]
        first, last = np.floor((low + shift - BEND) / self.cell), np.floor((high + shift + BEND) / self.cell)
        glands = []
        for row in range(int(first[1]), int(last[1]) + 1):
            for column in range(int(first[0]), int(last[0]) + 1):
                cell = cell_rng(seed, 0x61AD, column, row)
                centres = self.place(cell) + np.array([column, row]) * self.cell - shift
                centres[:, 1] += _bend(centres[:, 0], phases)
                stamps, turns = cell.integers(0, VARIANTS, len(centres)), cell.integers(0, 8, len(centres))
                inside = ((centres >= low) & (centres < high)).all(1)
                for centre, stamp, turn in zip(centres[inside], stamps[inside], turns[inside], strict=True):
                    x, y = np.floor(centre[::-1] if turned else centre)
                    glands.append(Gland(int(x), int(y), int(stamp), int(turn)))
        return glands


def _bend(along: NDArray[np.float64], phases: NDArray[np.float64]) -> NDArray[np.float64]:
    """Px that a row deviates at each place along it: two waves, together at most ``BEND``."""
    waves = [
        np.sin(2 * np.pi * along / length + phase) for length, phase in zip(_BEND_WAVELENGTHS, phases, strict=True)
    ]
    bend: NDArray[np.float64] = BEND / 2 * (waves[0] + waves[1])
    return bend


def _rows(middles: tuple[float, float, float]) -> Callable[[np.random.Generator], NDArray[np.float64]]:
    """Three rows of glands that lie at ``middles`` px of a cell."""

    def place(rng: np.random.Generator) -> NDArray[np.float64]:
        along = (np.arange(16) + 0.5) * _ROW_PITCH
        column, row = np.meshgrid(along, np.array(middles))
        centres = np.stack([column.ravel(), row.ravel()], 1)
        return centres + rng.uniform(-1, 1, centres.shape) * (3 * _ROW_JITTER, _ROW_JITTER)

    return place


def _crowded(rng: np.random.Generator) -> NDArray[np.float64]:
    """Up to sixteen glands, about 256 px apart, every other row shifted."""
    column, row = np.meshgrid(np.arange(4), np.arange(4))
    centres = np.stack([column.ravel() + 0.25 * (-1.0) ** row.ravel(), row.ravel()], 1) * 256.0 + 128
    centres += rng.uniform(-26, 26, centres.shape)
    return centres[rng.random(len(centres)) < 0.8]


EVEN = Arrangement(_ROW_CELL, (36.0, _ROW_RADIUS), _rows((256, 768, 1280)))
GROUPED = Arrangement(_ROW_CELL, (36.0, _ROW_RADIUS), _rows((768 - ROWS_APART, 768, 768 + ROWS_APART)))
CROWDED = Arrangement(1024, (45.0, 100.0), _crowded)
