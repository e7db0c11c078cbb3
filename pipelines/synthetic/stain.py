"""Haematoxylin and eosin: from amounts of dye to colours.

Takes maps of how much of each dye lies at a px (about 0 to 2); gives RGB by the Beer-Lambert law, as the light of a
bright-field scanner would come through. Dye colours are those of Macenko et al. 2009 ("A method for normalizing
histology slides"), varied from slide to slide as laboratories vary.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.synthetic.lattice import Field, cell_rng

HAEMATOXYLIN = (0.5626, 0.7201, 0.4062)
EOSIN = (0.2159, 0.8012, 0.5581)
"""Optical density per unit of dye, for red, green and blue."""


@dataclass(frozen=True)
class Stain:
    """Colours of one slide: optical density per unit of each dye (3 values), and the RGB of bare glass."""

    haematoxylin: tuple[float, float, float]
    eosin: tuple[float, float, float]
    glass: tuple[int, int, int]

    def transmission(self, haematoxylin: Field, eosin: Field) -> NDArray[np.uint8]:
        """Light that comes through, 255 for all of it: uint8 (height, width, 3). Layers multiply."""
        density = haematoxylin[..., None] * np.array(self.haematoxylin, np.float32)
        density += eosin[..., None] * np.array(self.eosin, np.float32)
        light: NDArray[np.uint8] = np.rint(255 * np.exp(-density)).astype(np.uint8)
        return light


def random_stain(seed: int) -> Stain:
    """Return the stain of a slide: strengths within 6%, hues within 2%, white balance within two steps."""
    rng = cell_rng(seed, 0x57A1)
    strength = rng.uniform(0.94, 1.06, 2)
    hue = rng.uniform(0.98, 1.02, (2, 3))
    dyes = np.array([HAEMATOXYLIN, EOSIN]) * hue * strength[:, None]
    red, green, blue = (int(value) for value in rng.integers(242, 247, 3))
    h, e = (tuple(float(v) for v in dye) for dye in dyes)
    return Stain((h[0], h[1], h[2]), (e[0], e[1], e[2]), (red, green, blue))
