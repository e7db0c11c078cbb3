"""Stain colours: haematoxylin, eosin and DAB from RGB, and their jitter.

Takes random factors per stain; gives a 3 x 3 matrix and a shift per sample that jitter a tile's optical density in one
step, so that whoever applies them (numpy here, torch on a device) needs no other stain knowledge.
Separation after Ruifrok & Johnston 2001 ("Quantification of histochemical staining by color deconvolution"), jitter
after Tellez et al. 2018 ("Whole-slide mitosis detection in H&E breast histology"): c' = alpha c + beta per stain.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels

_STAINS = np.array([[0.650, 0.704, 0.286], [0.072, 0.990, 0.105], [0.268, 0.570, 0.776]])
"""Optical density per unit of stain, rows haematoxylin, eosin, DAB, columns R, G, B (Ruifrok & Johnston, table 1)."""

RGB_FROM_HED = _STAINS / np.linalg.norm(_STAINS, axis=1, keepdims=True)
"""Density in RGB (row vector) = stain amounts (row vector) @ RGB_FROM_HED. Rows of length 1."""

HED_FROM_RGB = np.linalg.inv(RGB_FROM_HED)

_DENSITY = -np.log((np.arange(256) + 1) / 256).astype(np.float32)
"""Optical density of each uint8 value: -ln((x + 1) / 256), 0 for white, 5.5 for black."""

_BAND_PIXELS = 1 << 18
"""Pixels in float at a time, so that jitter of a large tile needs little memory of its own."""


def jitter(
    alpha: NDArray[np.float64], beta: NDArray[np.float64], gain: NDArray[np.float64]
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Matrix and shift that do the jitter: density' = density @ matrix + shift.

    Args:
        alpha: (n, 3) factors of the amounts of haematoxylin, eosin, DAB; 1 changes nothing.
        beta: (n, 3) added to the amounts, in units of optical density; 0 changes nothing.
        gain: (n,) factor of the light, > 0; 1 changes nothing.

    Returns:
        float32 (n, 3, 3) and (n, 3).
    """
    matrix = np.einsum("ij,nj,jk->nik", HED_FROM_RGB, alpha, RGB_FROM_HED)
    shift = beta @ RGB_FROM_HED - np.log(gain)[:, None]
    return matrix.astype(np.float32), shift.astype(np.float32)


def apply(image: Pixels, matrix: NDArray[np.float32], shift: NDArray[np.float32]) -> None:
    """Jitter a tile in place: uint8 (h, w, 3), matrix (3, 3) and shift (3,) from ``jitter``."""
    rows = max(1, _BAND_PIXELS // image.shape[1])
    for y in range(0, len(image), rows):
        band = image[y : y + rows]
        light = np.exp(-(_DENSITY[band] @ matrix + shift)) * np.float32(256) - np.float32(1)
        np.copyto(band, np.rint(np.clip(light, 0, 255)), casting="unsafe")
