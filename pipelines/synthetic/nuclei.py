"""Cell nuclei: soft-edged, mottled ellipses added to a map of haematoxylin.

Takes a map and where, how large and how dark each nucleus is; changes the map in place. On a torus nuclei that cross
an edge go on at the opposite one.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipelines.synthetic.lattice import Field

EDGE = 0.28
"""Width of the soft rim as a share of the radius: the blur of the objective."""


@dataclass(frozen=True)
class Nucleus:
    """Centre and half axes in px, the angle of the long axis in rad, and the amount of haematoxylin."""

    x: float
    y: float
    long: float
    short: float
    angle: float
    dye: float


def draw_nucleus(dye: Field, nucleus: Nucleus, rng: np.random.Generator) -> None:
    """Raise ``dye`` to the nucleus's where it lies; the map is treated as a torus."""
    reach = int(np.ceil(nucleus.long * 1.3)) + 1
    x0, y0 = int(np.floor(nucleus.x)), int(np.floor(nucleus.y))
    steps = np.arange(-reach, reach + 1)
    dx, dy = (x0 + steps - nucleus.x)[None], (y0 + steps - nucleus.y)[:, None]
    c, s = np.cos(nucleus.angle), np.sin(nucleus.angle)
    u, v = (dx * c + dy * s) / nucleus.long, (dy * c - dx * s) / nucleus.short
    inside = np.clip((1 - np.sqrt(u * u + v * v)) / EDGE + 0.5, 0, 1)
    rim = np.exp(-(((u * u + v * v) - 0.75) ** 2) / 0.05)  # chromatin gathers under the membrane
    chromatin = 0.85 + 0.2 * rim + rng.normal(0, 0.12, inside.shape)
    ys, xs = (y0 + steps) % dye.shape[0], (x0 + steps) % dye.shape[1]
    box = np.ix_(ys, xs)
    dye[box] = np.maximum(dye[box], (nucleus.dye * chromatin * inside).astype(np.float32))
