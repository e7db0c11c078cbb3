"""Slides whose class is a relation of two places 6,000 px apart, and nothing that a smaller window shows.

Takes how many; gives slides of 8,192 x 4,096 px with labels.csv. Each has a cluster of glands on the left and one on
the right, each of them dense or sparse with equal chance; the class says whether both are alike. Of one cluster alone,
dense and sparse are equally frequent in both classes, wherever it lies: a window that holds one knows nothing.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size
from pipelines.synthetic.arrangement import VARIANTS, Arrangement, Gland
from pipelines.synthetic.lattice import cell_rng
from pipelines.synthetic.painter import paint
from pipelines.synthetic.scene import Scene, SceneSpec

SIZE = Size(8192, 4096)
APART = 6000
"""Level-0 px from the middle of one cluster to that of the other; the clusters themselves are 4,800 px apart."""

REACH = 600
"""Level-0 px from the middle of a cluster that no gland's centre is beyond."""

GLANDS = 64
PITCH = {"dense": 84.0, "sparse": 128.0}
"""Level-0 px between neighbouring glands: as many in both kinds of cluster, on a smaller or a larger disc."""

CLASSES = ("alike", "different")
DRAWING = 1
"""Raised whenever the same seed would give other slides."""


@dataclass(frozen=True)
class Kinds:
    """Of the clusters of one slide."""

    left: str
    right: str

    @property
    def label(self) -> str:
        return CLASSES[self.left != self.right]


def kinds_of(seed: int, number: int) -> Kinds:
    """Return the clusters of slide ``number``: of four slides in a row, each of the four pairs once."""
    pairs = [Kinds(left, right) for left in PITCH for right in PITCH]
    return pairs[int(cell_rng(seed, 0x4B1D, number // 4).permutation(4)[number % 4])]


@dataclass(frozen=True)
class Clusters(Arrangement):
    """Two clusters of glands in the middle of a slide.

    Attributes:
        kinds: of the clusters.
    """

    kinds: Kinds = Kinds("dense", "dense")

    def glands(self, seed: int, l0_x: int, l0_y: int, l0_right: int, l0_bottom: int) -> list[Gland]:
        """Return the glands whose centres lie in a box of the slide."""
        rng = cell_rng(seed, 0xC105)
        shift = rng.uniform(-150, 150)
        glands = []
        for side, kind in ((-1, self.kinds.left), (1, self.kinds.right)):
            middle = (SIZE.width / 2 + shift + side * APART / 2, SIZE.height / 2 + rng.uniform(-700, 700))
            centres = middle + _disc(rng, PITCH[kind])
            stamps, turns = rng.integers(0, VARIANTS, len(centres)), rng.integers(0, 8, len(centres))
            for (x, y), stamp, turn in zip(centres.tolist(), stamps.tolist(), turns.tolist(), strict=True):
                if l0_x <= x < l0_right and l0_y <= y < l0_bottom:
                    glands.append(Gland(int(x), int(y), stamp, turn))
        return glands


def _disc(rng: np.random.Generator, pitch: float) -> NDArray[np.float64]:
    """``GLANDS`` centres around (0, 0), float (n, 2): the innermost of a lattice, jittered and turned."""
    steps = np.arange(-8, 9)
    x, y = (axis.ravel() for axis in np.meshgrid(steps, steps))
    lattice = np.stack([x + 0.5 * (y % 2), y * 3**0.5 / 2], 1) * pitch
    centres = lattice[np.argsort(np.hypot(*lattice.T), kind="stable")[:GLANDS]]
    angle = rng.uniform(0, 2 * np.pi)
    turned = centres @ np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    return turned + rng.uniform(-6, 6, centres.shape)


def make_slides(out: Path, count: int, seed: int = 0) -> Path:
    """Write ``count`` slides and their labels into ``out``; slides that are there are kept.

    Raises:
        ValueError: ``out`` holds others.
    """
    out.mkdir(parents=True, exist_ok=True)
    record, made_with = out / "made_with.json", {"drawing": DRAWING, "seed": seed}
    if record.exists() and json.loads(record.read_text()) != made_with:
        raise ValueError(f"{out} holds slides made with {record.read_text()}; remove it")
    record.write_text(json.dumps(made_with))
    lines = ["slide,label,patient"]
    for number in range(count):
        kinds, name = kinds_of(seed, number), f"slide_{number:03d}"
        lines.append(f"{name},{kinds.label},patient_{number:03d}")
        if (out / f"{name}.tif").exists():
            continue
        slide_seed = int(cell_rng(seed, 0x51D3, number).integers(1 << 31))
        scene = Scene(SceneSpec(seed, slide_seed, SIZE, Clusters(1024, (36.0, 44.0), _nowhere, kinds)))
        partial = out / f".{name}.part"
        paint(
            scene,
            partial,
            None,
            mpp=0.5,
            description=f"megatile slide_context {number}",
            workers=1,
            progress=lambda done, total: None,
        )
        os.replace(partial, out / f"{name}.tif")
    (out / "labels.csv").write_text("\n".join(lines) + "\n")
    return out


def _nowhere(rng: np.random.Generator) -> NDArray[np.float64]:
    """Of an endless lattice; these slides have none."""
    return np.empty((0, 2))
