"""Pixels as OpenSlide itself gives them: the reference that direct decoding is held against."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from openslide import OpenSlide


def openslide_pixels(path: Path, l0_x: int, l0_y: int, width: int, height: int, level: int = 0) -> NDArray[np.uint8]:
    """uint8 (height, width, 3); transparent, that is outside the slide, is white."""
    with OpenSlide(path) as slide:
        rgba = np.asarray(slide.read_region((l0_x, l0_y), level, (width, height)))
    return np.where(rgba[..., 3:] == 0, np.uint8(255), rgba[..., :3])
