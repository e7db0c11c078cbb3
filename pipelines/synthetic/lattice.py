"""Randomness bound to places: a generator per lattice cell, and smooth noise over a coarse grid.

Takes a seed and whole numbers that name a cell or a purpose; gives the same draws whatever has been drawn before, so
that a slide comes out the same in any order of drawing and with any number of workers. The noise is value noise
summed over octaves (Perlin 1985, "An image synthesizer", in its lattice form).
"""

from __future__ import annotations

import cv2
import numpy as np
from numpy.typing import NDArray

Field = NDArray[np.float32]
"""float32 (height, width)."""


def cell_rng(seed: int, *keys: int) -> np.random.Generator:
    """Generator of the cell that ``keys`` name; keys may be negative."""
    return np.random.Generator(np.random.PCG64([seed, *(key & 0xFFFFFFFF for key in keys)]))


def smooth_noise(rng: np.random.Generator, height: int, width: int, coarsest: float, finest: float) -> Field:
    """Noise of about zero mean and unit deviation, each octave half as strong as the one twice as coarse.

    Args:
        height, width: size of the grid.
        coarsest, finest: wavelengths of the first and the last octave, in grid px.
    """
    total = np.zeros((height, width), np.float32)
    power, wavelength, amplitude = 0.0, coarsest, 1.0
    while wavelength >= finest:
        rows, columns = (int(np.ceil(n / wavelength)) + 3 for n in (height, width))
        knots = rng.standard_normal((rows, columns), np.float32)
        x = (np.arange(width, dtype=np.float32) / wavelength + 1)[None].repeat(height, 0)
        y = (np.arange(height, dtype=np.float32) / wavelength + 1)[:, None].repeat(width, 1)
        total += amplitude * cv2.remap(knots, x, y, cv2.INTER_CUBIC)
        power += amplitude**2 * 0.5  # cubic interpolation between knots halves their variance, nearly
        wavelength, amplitude = wavelength / 2, amplitude / 2
    return np.asarray(total / np.sqrt(power), np.float32)


def torus_noise(rng: np.random.Generator, period: int, wavelength: float) -> Field:
    """Noise of zero mean and unit deviation that repeats after ``period`` px, smoothed over ``wavelength`` px."""
    spectrum = np.fft.rfft2(rng.standard_normal((period, period)))
    fy, fx = np.fft.fftfreq(period)[:, None], np.fft.rfftfreq(period)[None]
    noise = np.fft.irfft2(spectrum * np.exp(-0.5 * (fy**2 + fx**2) * (2 * wavelength) ** 2), (period, period))
    return np.asarray((noise - noise.mean()) / noise.std(), np.float32)
