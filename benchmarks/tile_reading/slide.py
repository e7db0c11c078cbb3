"""The slide of the tile-reading benchmark: one level of 256 px JPEG tiles made of real tissue.

Takes the pixels of the shipped slide, mirrored so that no edge shows, and repeats them; gives a tiled
TIFF of any size. The content of a tile, and so the work of its decoder, is that of a stained section and not of noise
or of flat colour.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region

SOURCE = Path(__file__).parents[2] / "data" / "real" / "CMU-1-Small-Region.svs"
TILE, QUALITY = 256, 80


def make_slide(path: Path, side: int) -> Path:
    """Write ``side`` x ``side`` px to ``path`` unless it is there."""
    if path.exists():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_slide(SOURCE) as slide:
        level = slide.levels[0]
        tissue = slide.read(Region(0, 0, level.width, level.height, slide.mpp))
    tissue = np.concatenate([tissue, tissue[:, ::-1]], axis=1)
    tissue = np.concatenate([tissue, tissue[::-1]], axis=0)

    def tiles() -> Iterator[NDArray[np.uint8]]:
        for y in range(0, side, TILE):
            rows = np.arange(y, y + TILE) % tissue.shape[0]
            for x in range(0, side, TILE):
                yield tissue[rows[:, None], np.arange(x, x + TILE) % tissue.shape[1]]

    partial = path.with_suffix(".partial")
    tifffile.imwrite(
        partial,
        tiles(),
        shape=(side, side, 3),
        dtype=np.uint8,
        tile=(TILE, TILE),
        photometric="rgb",
        subsampling=(2, 2),
        compression="jpeg",
        compressionargs={"level": QUALITY},
        resolution=(20_000, 20_000),
        resolutionunit="CENTIMETER",
    )
    partial.rename(path)
    return path
