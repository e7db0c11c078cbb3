"""Glands: stamps of a lumen, a ring of epithelium with its row of nuclei, and the halo around them.

Takes a seed and an outer radius; gives maps of both dyes, an opacity that cuts the stamp out of the stroma, and the
mask of what counts as gland (epithelium and lumen). Stamps are drawn at twice the size and reduced by area.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.synthetic.lattice import Field, cell_rng
from pipelines.synthetic.nuclei import Nucleus, draw_nucleus

HALO = 6
"""Px around a gland where the stroma draws back from it; the stamp reaches this far beyond the outer radius."""

_OVER = 2
"""Stamps are drawn this many times larger and reduced, which softens every edge."""


@dataclass(frozen=True)
class GlandStamp:
    """One gland, square, its centre in the middle.

    Attributes:
        haematoxylin, eosin: float32 (n, n).
        opacity: uint8 (n, n), 255 where the stamp replaces what lies under it.
        mask: bool (n, n), the gland itself.
    """

    haematoxylin: Field
    eosin: Field
    opacity: NDArray[np.uint8]
    mask: NDArray[np.bool_]


def gland_stamp(seed: int, radius: float) -> GlandStamp:
    """Return a gland whose farthest border lies ``radius`` px from its centre."""
    rng = cell_rng(seed, 0x61A4)
    half = int(np.ceil(radius)) + HALO
    n = 2 * half * _OVER
    axis = (np.arange(n, dtype=np.float32) + 0.5) / _OVER - half
    x, y = axis[None], axis[:, None]
    r, theta = np.hypot(x, y), np.arctan2(y, x)
    outer_wave, inner_wave = _wave(rng, 0.16, 5), _wave(rng, 0.12, 7)
    widest = float(outer_wave(np.linspace(-np.pi, np.pi, 720)).max())
    inner_share = rng.uniform(0.24, 0.38)
    border = radius * (1 + outer_wave(theta) - widest)
    inner = border * (inner_share + inner_wave(theta))
    depth = (r - inner) / (border - inner)  # 0 at the lumen, 1 at the border
    grain = cv2.GaussianBlur(rng.standard_normal((n, n), np.float32), (0, 0), 1.6 * _OVER)
    grain /= grain.std()

    gland, lumen = r <= border, r <= inner
    haematoxylin = np.where(gland, 0.42 + 0.14 * np.clip(depth, 0, 1) + 0.05 * grain, 0.01).astype(np.float32)
    eosin = np.where(gland, 0.30 - 0.10 * np.clip(depth, 0, 1) + 0.03 * grain, 0.03).astype(np.float32)
    membrane = np.exp(-(((r - border) / 1.3) ** 2))
    eosin += 0.28 * membrane.astype(np.float32)
    brush = np.exp(-(((r - inner) / 1.6) ** 2))
    eosin += 0.10 * brush.astype(np.float32)
    haematoxylin[lumen], eosin[lumen] = 0.01, 0.015
    if rng.random() < 0.4:
        wisps = cv2.GaussianBlur(rng.standard_normal((n, n), np.float32), (0, 0), 5 * _OVER)
        secretion = np.clip(wisps / wisps.std() - 0.2, 0, 1.5) * (r < 0.8 * inner)
        eosin += (0.16 * secretion).astype(np.float32)

    cells = np.zeros((n, n), np.float32)
    mean_border, mean_inner = float(border.mean()), float(inner.mean())
    thickness = mean_border - mean_inner
    for ring in [0.62] if thickness < 24 else [0.74, 0.40]:
        at = mean_inner + ring * thickness
        count = max(5, round(2 * np.pi * at / rng.uniform(9.0, 10.5)))
        for k in range(count):
            angle = 2 * np.pi * (k + rng.uniform(-0.25, 0.25)) / count
            there = radius * (1 + float(outer_wave(np.array(angle))) - widest)
            distance = at * there / mean_border + rng.normal(0, 0.06 * thickness)
            centre = half + distance * np.cos(angle), half + distance * np.sin(angle)
            nucleus = Nucleus(
                centre[0] * _OVER,
                centre[1] * _OVER,
                rng.uniform(5.2, 7.2) * _OVER,
                rng.uniform(3.2, 4.4) * _OVER,
                angle + rng.normal(0, 0.15),
                rng.uniform(0.95, 1.4),
            )
            draw_nucleus(cells, nucleus, rng)
    haematoxylin = np.maximum(haematoxylin, np.where(gland & ~lumen, cells, 0))

    # The halo is a thin slit of light on one side, where the section tore: open at `tear`, closed opposite.
    tear = 0.5 + 0.5 * np.cos(theta - rng.uniform(-np.pi, np.pi))
    reach = 1.5 + (HALO - 1.5) * tear * rng.uniform(0.2, 1.0)
    opacity = np.clip((border + reach - r) / 1.5 + 0.5, 0, 1)
    return GlandStamp(
        _reduced(haematoxylin),
        _reduced(eosin),
        np.rint(_reduced(opacity.astype(np.float32)) * 255).astype(np.uint8),
        _reduced(gland.astype(np.float32)) >= 0.5,
    )


def _wave(rng: np.random.Generator, strength: float, highest: int) -> Callable[[NDArray[Any]], NDArray[Any]]:
    """Sum of 2 to ``highest`` waves around the circle, each weaker than the one before, as a function of the angle."""
    waves = np.arange(2, highest + 1)
    heights, phases = strength * rng.normal(0, 1 / waves), rng.uniform(0, 2 * np.pi, len(waves))

    def wave(theta: NDArray[Any]) -> NDArray[Any]:
        total = np.zeros_like(theta)
        for k, height, phase in zip(waves, heights, phases, strict=True):
            total = total + height * np.cos(k * theta + phase)
        return total

    return wave


def _reduced(drawing: Field) -> Field:
    size = drawing.shape[0] // _OVER
    return np.asarray(cv2.resize(drawing, (size, size), interpolation=cv2.INTER_AREA), np.float32)
