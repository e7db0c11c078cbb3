"""Writes a TIFF that holds two images of similar size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import tifffile


def write_two_scenes(path: Path) -> None:
    """Write images of 512 x 512 and of 640 x 512 px at 0.5 um/px, tissue-coloured noise in each."""
    with tifffile.TiffWriter(path) as file:
        for width in (512, 640):
            pixels = np.random.default_rng(width).integers((150, 60, 120), (210, 120, 180), (512, width, 3), np.uint8)
            resolution = {"resolution": (2e4, 2e4), "resolutionunit": "CENTIMETER"}
            file.write(pixels, tile=(256, 256), photometric="rgb", metadata=None, **resolution)
