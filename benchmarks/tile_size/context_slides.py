"""Slides whose class is a relation of two places 6,000 px apart, and nothing that a smaller window shows.

Takes how many; gives slides of 8,192 x 4,096 px with labels.csv. There is room for a field of glands on the left and
one on the right, and each is there with equal chance; the class says whether both are there or neither (``alike``), or
one of them (``different``). Of either room alone, a field is as frequent in both classes, so a window that reaches into
one of them knows nothing, and neither does a sum over such windows of whatever they tell: one field and one empty room
add up to half of what two fields and two empty rooms do.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.tile_size.row_slides import write_slides
from pipelines.slides.geometry import Size
from pipelines.synthetic.tissue import VARIANTS, Arrangement, Gland, cell_rng

SIZE = Size(8192, 4096)
APART = 6000
"""Level-0 px from the middle of one room to that of the other; the rooms are 4,300 px apart, windows at most 4,096."""

RADIUS, PITCH = 800.0, 96.0
"""Level-0 px: of a field of glands, and between neighbouring glands."""

CLASSES = ("alike", "different")


@dataclass(frozen=True)
class Fields:
    """Which of the rooms of a slide have a field of glands."""

    left: bool
    right: bool

    @property
    def label(self) -> str:
        return CLASSES[self.left != self.right]


def fields_of(seed: int, number: int) -> Fields:
    """Return the fields of slide ``number``: of four slides in a row, each of the four pairs once."""
    pairs = [Fields(left, right) for left in (False, True) for right in (False, True)]
    return pairs[int(cell_rng(seed, 0x4B1D, number // 4).permutation(4)[number % 4])]


@dataclass(frozen=True)
class TwoRooms(Arrangement):
    """Glands of one slide.

    Attributes:
        fields: which there are.
    """

    fields: Fields = Fields(left=True, right=True)

    def glands(self, seed: int, l0_x: int, l0_y: int, l0_right: int, l0_bottom: int) -> list[Gland]:
        """Return the glands whose centres lie in a box of the slide."""
        rng = cell_rng(seed, 0xC105)
        shift = rng.uniform(-100, 100)
        glands = []
        for side, is_there in ((-1, self.fields.left), (1, self.fields.right)):
            middle = (SIZE.width / 2 + shift + side * APART / 2, SIZE.height / 2 + rng.uniform(-500, 500))
            centres = middle + _disc(rng)
            stamps, turns = rng.integers(0, VARIANTS, len(centres)), rng.integers(0, 8, len(centres))
            for (x, y), stamp, turn in zip(centres.tolist(), stamps.tolist(), turns.tolist(), strict=True):
                if is_there and l0_x <= x < l0_right and l0_y <= y < l0_bottom:
                    glands.append(Gland(int(x), int(y), stamp, turn))
        return glands


def _disc(rng: np.random.Generator) -> NDArray[np.float64]:
    """Centres of a field around (0, 0), float (n, 2): a lattice within ``RADIUS``, turned and jittered."""
    reach = int(RADIUS / PITCH) + 2
    x, y = (axis.ravel() for axis in np.meshgrid(*[np.arange(-2 * reach, 2 * reach + 1)] * 2))
    lattice = np.stack([x + 0.5 * (y % 2), y * 3**0.5 / 2], 1) * PITCH
    centres = lattice[np.hypot(*lattice.T) <= RADIUS]
    angle = rng.uniform(0, 2 * np.pi)
    turned = centres @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    jittered: NDArray[np.float64] = turned + rng.uniform(-8, 8, centres.shape)
    return jittered


def make_slides(out: Path, count: int, seed: int = 0) -> Path:
    """Write ``count`` slides and their labels into ``out``; slides that are there are kept."""
    every = [fields_of(seed, number) for number in range(count)]
    slides = [(fields.label, TwoRooms(1.0, (36.0, 44.0), fields=fields)) for fields in every]
    return write_slides(out, slides, SIZE, seed)
