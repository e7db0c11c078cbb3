"""Slides whose class is in how rows of glands are spaced over 1,536 px, and nothing that a window of 256 px shows.

Rows of the class ``even`` lie 512 px apart, those of ``grouped`` in threes, ``ROWS_APART`` px apart, with a wide gap to
the next three. Three rows per 1,536 px in both, and rows so far apart that no upright window of 256 px touches two: it
sees nothing or one row, equally often and of the same make in both classes. ``BANDS`` are the same over 3,072 px, with
bands of three rows in place of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size
from pipelines.synthetic.collection import paint
from pipelines.synthetic.tissue import VARIANTS, Arrangement, Gland, Scene, cell_rng

SMALL_WINDOW = 256
"""Px of a tile that must not know the class."""

ROWS_APART = 384.0
"""Px between grouped rows: 256, plus two radii with halo, two jitters, and 16 px that rows can rise within 256 px."""

BANDS_APART = 768.0
"""Px between the middles of grouped bands; even ones are 1,024 px apart."""

BEND, WAVELENGTHS = 30.0, (2600.0, 4100.0)
"""Px that rows leave the straight line by, at most, in two waves; all rows of a slide bend alike."""

CELL, PITCH, JITTER = 1536, 96.0, 4.0


@dataclass(frozen=True)
class Rows(Arrangement):
    """Rows of glands at ``middles`` px of every ``period`` px, a multiple of ``CELL``."""

    middles: tuple[float, ...] = (256, 768, 1280)
    period: int = CELL

    def glands(self, seed: int, l0_x: int, l0_y: int, l0_right: int, l0_bottom: int) -> list[Gland]:
        """Return the glands whose centres lie in a box of the endless plane."""
        rng = cell_rng(seed, 0x5F1F)
        size = np.array([CELL, self.period])
        shift, turned = rng.integers(0, CELL, 2) * (size // CELL), rng.random() < 0.5
        phases = rng.uniform(0, 2 * np.pi, 2)
        low, high = np.array([l0_x, l0_y], float), np.array([l0_right, l0_bottom], float)
        if turned:
            low, high = low[::-1], high[::-1]
        first, last = np.floor((low + shift - BEND) / size), np.floor((high + shift + BEND) / size)
        glands = []
        for row in range(int(first[1]), int(last[1]) + 1):
            for column in range(int(first[0]), int(last[0]) + 1):
                cell = cell_rng(seed, 0x61AD, column, row)
                centres = self._centres(cell) + np.array([column, row]) * size - shift
                waves = (np.sin(2 * np.pi * centres[:, 0] / w + p) for w, p in zip(WAVELENGTHS, phases, strict=True))
                centres[:, 1] += BEND / 2 * sum(waves)
                stamps, turns = cell.integers(0, VARIANTS, len(centres)), cell.integers(0, 8, len(centres))
                inside = ((centres >= low) & (centres < high)).all(1)
                for centre, stamp, turn in zip(centres[inside], stamps[inside], turns[inside], strict=True):
                    x, y = np.floor(centre[::-1] if turned else centre)
                    glands.append(Gland(int(x), int(y), int(stamp), int(turn)))
        return glands

    def _centres(self, rng: np.random.Generator) -> NDArray[np.float64]:
        column, row = np.meshgrid((np.arange(16) + 0.5) * PITCH, np.array(self.middles))
        centres = np.stack([column.ravel(), row.ravel()], 1)
        return centres + rng.uniform(-1, 1, centres.shape) * (3 * JITTER, JITTER)


EVEN = Rows(1.0, (36.0, 44.0))
GROUPED = Rows(1.0, (36.0, 44.0), middles=(768 - ROWS_APART, 768, 768 + ROWS_APART))


def _bands(middles: tuple[float, ...]) -> Rows:
    lines = tuple(middle + line * PITCH for middle in middles for line in (-1, 0, 1))
    return Rows(1.0, (36.0, 44.0), middles=lines, period=2 * CELL)


ROWS, BANDS = (EVEN, GROUPED), (_bands((512, 1536, 2560)), _bands((1536 - BANDS_APART, 1536, 1536 + BANDS_APART)))
"""Arrangements of the classes ``even`` and ``grouped``."""


def make_slides(out: Path, count: int, side: int, seed: int = 0, arrangements: tuple[Rows, Rows] = ROWS) -> Path:
    """Write ``count`` slides of ``side`` px and their labels into ``out``; slides that are there are kept."""
    kinds = list(zip(("even", "grouped"), arrangements, strict=True))
    return write_slides(out, [kinds[number % 2] for number in range(count)], Size(side, side), seed)


def write_slides(out: Path, slides: Sequence[tuple[str, Arrangement]], size: Size, seed: int) -> Path:
    """Write slides, each of a label and glands, with a patient of its own, and ``labels.csv``; those that are there are
    kept."""
    out.mkdir(parents=True, exist_ok=True)
    lines = ["slide,label,patient"]
    for number, (label, glands) in enumerate(slides):
        name = f"slide_{number:03d}"
        lines.append(f"{name},{label},patient_{number:03d}")
        if not (out / f"{name}.tif").exists():
            scene = Scene(seed, int(cell_rng(seed, 0x51D3, number).integers(1 << 31)), size, glands)
            paint(scene, out / f"{name}.tif", None, mpp=0.5, description=f"megatile {out.name} {number}")
    (out / "labels.csv").write_text("\n".join(lines) + "\n")
    return out
