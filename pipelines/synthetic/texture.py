"""Connective tissue: two layers that repeat after different periods, so that together they do not seem to repeat.

Takes a seed; gives maps of both dyes on a torus. One layer is collagen with the spindle-shaped nuclei that follow its
fibres, the other scattered lymphocytes over patches of weaker and stronger stain. Fibres are line integral
convolution of noise along a smooth direction field (Cabral and Leedom 1993).
"""

from __future__ import annotations

from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.synthetic.lattice import Field, cell_rng, torus_noise
from pipelines.synthetic.nuclei import Nucleus, draw_nucleus
from pipelines.synthetic.stain import Stain

COLLAGEN_PERIOD, CELL_PERIOD = 1408, 1152
"""Periods of the layers in px; the pair repeats after 12,672 px, where the outline has long changed."""


@dataclass(frozen=True)
class Torus:
    """Dye maps that repeat: float32 (period, period) each."""

    haematoxylin: Field
    eosin: Field


def collagen(seed: int) -> Torus:
    """Wavy bundles of fibres with slits between them and one spindle-shaped nucleus per about 50 x 50 px."""
    rng = cell_rng(seed, 0xC011)
    n = COLLAGEN_PERIOD
    angle = 0.9 * torus_noise(rng, n, 150) + 0.35 * torus_noise(rng, n, 40)
    fine = _fibres(rng, n, angle, grain=1.0, steps=14)
    half = np.ascontiguousarray(angle[::2, ::2])
    coarse = cv2.resize(_fibres(rng, n // 2, half, grain=2.0, steps=20), (n, n), interpolation=cv2.INTER_LINEAR)
    slit = np.clip((coarse - 1.1) * 1.2, 0, 1)  # where bundles part, light comes through
    eosin = np.clip(0.30 + 0.035 * fine + 0.04 * coarse + 0.025 * torus_noise(rng, n, 60), 0.05, 2) * (1 - 0.6 * slit)
    haematoxylin = np.clip(0.04 + 0.008 * fine + 0.01 * coarse, 0, 1) * (1 - 0.6 * slit)
    for _ in range(n * n // 2600):
        x, y = rng.uniform(0, n, 2)
        along = float(angle[int(y), int(x)]) + rng.normal(0, 0.15)
        spindle = Nucleus(x, y, rng.uniform(6, 11), rng.uniform(2.0, 3.4), along, rng.uniform(0.6, 1.2))
        draw_nucleus(haematoxylin, spindle, rng)
    return Torus(haematoxylin.astype(np.float32), eosin.astype(np.float32))


def lymphocytes(seed: int) -> Torus:
    """Small round dark nuclei, denser in some places, on faint blotches."""
    rng = cell_rng(seed, 0x177F)
    n = CELL_PERIOD
    crowd = torus_noise(rng, n, 90)
    haematoxylin = np.clip(0.03 + 0.02 * torus_noise(rng, n, 70), 0, 1)
    eosin = np.clip(0.03 + 0.02 * torus_noise(rng, n, 50), 0, 1)
    for _ in range(n * n // 1500):
        x, y = rng.uniform(0, n, 2)
        if rng.normal(1.3, 0.5) < crowd[int(y), int(x)]:
            size = rng.uniform(4.2, 5.6)
            round_one = Nucleus(x, y, size, size * rng.uniform(0.85, 1), rng.uniform(0, np.pi), rng.uniform(1.3, 1.8))
            draw_nucleus(haematoxylin, round_one, rng)
    return Torus(haematoxylin.astype(np.float32), eosin.astype(np.float32))


def _fibres(rng: np.random.Generator, period: int, angle: Field, grain: float, steps: int) -> Field:
    """Noise of ``grain`` px smeared ``steps`` px both ways along ``angle`` (rad): zero mean, unit deviation."""
    noise = torus_noise(rng, period, grain)
    dx, dy = np.cos(angle), np.sin(angle)
    y, x = np.mgrid[0:period, 0:period].astype(np.float32)
    total = noise.copy()
    for sign in (-1.0, 1.0):
        px, py = x.copy(), y.copy()
        for _ in range(steps):
            step_x = cv2.remap(dx, px, py, cv2.INTER_NEAREST, borderMode=cv2.BORDER_WRAP)
            step_y = cv2.remap(dy, px, py, cv2.INTER_NEAREST, borderMode=cv2.BORDER_WRAP)
            px, py = px + np.float32(sign) * step_x, py + np.float32(sign) * step_y
            total += cv2.remap(noise, px, py, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    standard: Field = (total - total.mean()) / total.std()
    return standard


@dataclass(frozen=True)
class Wallpaper:
    """A torus in the colours of one slide, extended so that any window of up to ``window`` px is one slice.

    Attributes:
        pixels: uint8 (period + window, period + window, 3), transmission.
        period: px after which it repeats.
    """

    pixels: NDArray[np.uint8]
    period: int

    def at(self, l0_x: int, l0_y: int, size: int) -> NDArray[np.uint8]:
        """View of ``size`` x ``size`` px whose top left lies at (l0_x, l0_y) of the endless plane."""
        x, y = l0_x % self.period, l0_y % self.period
        return self.pixels[y : y + size, x : x + size]


def wallpaper(torus: Torus, stain: Stain, window: int) -> Wallpaper:
    """Colour a torus for windows of up to ``window`` px, which is at most its period."""
    colours = stain.transmission(torus.haematoxylin, torus.eosin)
    return Wallpaper(np.pad(colours, ((0, window), (0, window), (0, 0)), mode="wrap"), len(colours))
