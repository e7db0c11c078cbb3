"""Artificial stained tissue, drawn block by block: stroma, glands, the edge of the tissue, glass.

Every object is a function of (seed, place), so blocks come out the same in any order and on any thread. Amounts of dye
become colours by the Beer-Lambert law, with the colours of Macenko et al. 2009 ("A method for normalizing histology
slides"); fibres are noise smeared along a smooth field (line integral convolution, Cabral and Leedom 1993).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Size

BLOCK, PERIOD, STEP = 512, 1408, 64
"""Edge in px of what is drawn at once; px after which the stroma repeats; px per px of the grid of the outline."""

GLAND, VARIANTS, HALO = 1, 48, 6
"""Class id in a mask; different glands of a tissue, each in eight orientations; px of the gap around a gland."""

DYES = ((0.5626, 0.7201, 0.4062), (0.2159, 0.8012, 0.5581))
"""Optical density per unit of haematoxylin and of eosin, for red, green and blue."""

_FINER, _EDGE, _INLAND = 2, 5.0, 40.0
"""Glands are drawn so many times larger and reduced; px over which tissue fades into glass, and glands keep from it."""

Field = NDArray[np.float32]
"""float32 (height, width)."""

Image = NDArray[np.uint8]


def cell_rng(seed: int, *keys: int) -> np.random.Generator:
    """Return the generator of the place or purpose that ``keys`` name; they may be negative."""
    return np.random.Generator(np.random.PCG64([seed, *(key & 0xFFFFFFFF for key in keys)]))


@dataclass(frozen=True)
class Gland:
    """One gland: centre in level-0 px, which stamp, and one of the eight turns and flips of a square."""

    l0_x: int
    l0_y: int
    stamp: int
    turn: int


@dataclass(frozen=True)
class Arrangement:
    """Glands on a lattice, every other row shifted, of which a share is there.

    Attributes:
        share: of the places that have a gland.
        radii: smallest and largest outer radius of a gland in px.
        pitch: px between places, at least 2 x (largest radius + ``HALO``) for glands that stay apart.
    """

    share: float
    radii: tuple[float, float] = (45.0, 100.0)
    pitch: int = 256

    def glands(self, seed: int, l0_x: int, l0_y: int, l0_right: int, l0_bottom: int) -> list[Gland]:
        """Return the glands whose centres lie in a box of the endless plane."""
        glands = []
        for row in range(l0_y // self.pitch - 1, l0_bottom // self.pitch + 2):
            for column in range(l0_x // self.pitch - 1, l0_right // self.pitch + 2):
                rng = cell_rng(seed, 0x61AD, column, row)
                centre = np.array([column + 0.5 + 0.25 * (-1) ** row, row + 0.5]) + rng.uniform(-0.1, 0.1, 2)
                x, y = np.floor(centre * self.pitch).astype(int).tolist()
                stamp, turn = int(rng.integers(VARIANTS)), int(rng.integers(8))
                if rng.random() < self.share and l0_x <= x < l0_right and l0_y <= y < l0_bottom:
                    glands.append(Gland(x, y, stamp, turn))
        return glands


class Scene:
    """Draws one slide; holds its stroma and stamps in the slide's colours, about 25 MB. Safe in many threads.

    Args:
        tissue_seed, slide_seed: of textures and stamps, which slides share; of everything else.
        arrangement: place of glands.
    """

    def __init__(self, tissue_seed: int, slide_seed: int, size: Size, arrangement: Arrangement) -> None:
        self.size, self.arrangement, self._seed = size, arrangement, slide_seed
        self.columns, self.rows = -(-size.width // BLOCK), -(-size.height // BLOCK)
        rng = cell_rng(slide_seed, 0x57A1)
        strength, hue = rng.uniform(0.94, 1.06, (2, 1)), rng.uniform(0.98, 1.02, (2, 3))
        self._dyes = (np.array(DYES) * strength * hue).astype(np.float32)
        self.glass = rng.integers(242, 247, 3).astype(np.uint8)
        self._shift = rng.integers(0, PERIOD, 2)
        self._depth = _outline(slide_seed, size)
        lit = np.rint(self._light(*_stroma(tissue_seed)) * (self.glass / 255.0)).astype(np.uint8)
        self._stroma = np.pad(lit, ((0, BLOCK), (0, BLOCK), (0, 0)), mode="wrap")
        self._stamps = [
            (np.rint(self._light(h, e) * (self.glass / 255.0)).astype(np.uint8), opacity, mask)
            for h, e, opacity, mask in _stamps(tissue_seed, arrangement.radii)
        ]

    def _light(self, haematoxylin: Field, eosin: Field) -> Field:
        """Light that comes through, 255 for all of it, (height, width, 3)."""
        density = haematoxylin[..., None] * self._dyes[0] + eosin[..., None] * self._dyes[1]
        return np.asarray(255 * np.exp(-density), np.float32)

    def draw(self, column: int, row: int) -> tuple[Image, Image]:
        """Return pixels, RGB uint8 (BLOCK, BLOCK, 3), and class ids, uint8 (BLOCK, BLOCK), of the block with its top
        left at (column, row) times ``BLOCK``; whole even where it leaves the slide."""
        l0_x, l0_y = column * BLOCK, row * BLOCK
        x, y = (l0_x + self._shift[0]) % PERIOD, (l0_y + self._shift[1]) % PERIOD
        pixels, mask = self._stroma[y : y + BLOCK, x : x + BLOCK].copy(), np.zeros((BLOCK, BLOCK), np.uint8)
        for gland in self.glands(l0_x, l0_y, BLOCK):
            self._stamp(pixels, mask, gland, l0_x, l0_y)
        n = BLOCK // STEP
        part = self._depth[row * n : row * n + n + 2, column * n : column * n + n + 2]
        if part.min() < 4 * _EDGE:
            side = (n + 2) * STEP
            depth = cv2.resize(part, (side, side), interpolation=cv2.INTER_LINEAR)[STEP:-STEP, STEP:-STEP]
            fibres = np.clip((200.0 - pixels[..., 1].astype(np.float32)) * 0.12, -_EDGE, _EDGE)  # reach out farther
            tissue = np.clip((depth + fibres) / _EDGE + 0.5, 0, 1)[..., None]
            pixels = np.rint(self.glass + tissue * (pixels - self.glass.astype(np.float32))).astype(np.uint8)
        return pixels, mask

    def glands(self, l0_x: int, l0_y: int, size: int) -> list[Gland]:
        """Return glands that a square of ``size`` px may show: those whose centre lies in it or near enough."""
        reach = int(self.arrangement.radii[1]) + HALO + 1
        box = (l0_x - reach, l0_y - reach, l0_x + size + reach, l0_y + size + reach)
        glands = self.arrangement.glands(self._seed, *box)
        return [gland for gland in glands if self._depth_at(gland.l0_x, gland.l0_y) > reach + _INLAND]

    def _depth_at(self, l0_x: int, l0_y: int) -> float:
        x, y = l0_x // STEP + 1, l0_y // STEP + 1
        inside = 0 <= x < self._depth.shape[1] and 0 <= y < self._depth.shape[0]
        return float(self._depth[y, x]) if inside else -np.inf

    def _stamp(self, pixels: Image, mask: Image, gland: Gland, l0_x: int, l0_y: int) -> None:
        turned = (np.rot90(image, gland.turn % 4) for image in self._stamps[gland.stamp])
        colours, opacity, inside = (image[:, ::-1] if gland.turn >= 4 else image for image in turned)
        n = len(opacity)
        x, y = gland.l0_x - n // 2 - l0_x, gland.l0_y - n // 2 - l0_y
        left, top, right, bottom = max(0, x), max(0, y), min(BLOCK, x + n), min(BLOCK, y + n)
        if left >= right or top >= bottom:
            return
        part = np.s_[top - y : bottom - y, left - x : right - x]
        under, share = pixels[top:bottom, left:right], opacity[part][..., None].astype(np.uint16)
        under[...] = (colours[part] * share + under * (255 - share) + 127) // 255
        mask[top:bottom, left:right][inside[part]] = GLAND


def _outline(seed: int, size: Size) -> Field:
    """Px inside the tissue (negative: on glass) on a grid of a px per ``STEP``, one more on every side."""
    rng = cell_rng(seed, 0x0071)
    columns, rows = (-(-n // BLOCK) * (BLOCK // STEP) + 2 for n in (size.width, size.height))
    x, y = ((np.arange(n, dtype=np.float32) - 0.5) * STEP for n in (columns, rows))
    u, v = np.abs(x / size.width * 2 - 1)[None], np.abs(y / size.height * 2 - 1)[:, None]
    reach = min(size.width, size.height) / 2
    bumps = np.zeros((rows, columns), np.float32)
    for octave in range(4):
        knots = rng.standard_normal((2 + 2**octave, 2 + 2**octave), np.float32)
        bumps += cv2.resize(knots, (columns, rows), interpolation=cv2.INTER_CUBIC) / 2**octave
    rounded = (u**5 + v**5) ** 0.2  # a square with round corners, so that most of the slide is tissue
    return np.asarray((0.86 - rounded) * reach + bumps * min(0.045 * reach, 1200), np.float32)


def _torus_noise(rng: np.random.Generator, period: int, wavelength: float) -> Field:
    """Noise of zero mean and unit deviation that repeats after ``period`` px, smoothed over ``wavelength`` px."""
    spectrum = np.fft.rfft2(rng.standard_normal((period, period)))
    fy, fx = np.fft.fftfreq(period)[:, None], np.fft.rfftfreq(period)[None]
    noise = np.fft.irfft2(spectrum * np.exp(-0.5 * (fy**2 + fx**2) * (2 * wavelength) ** 2), (period, period))
    return np.asarray((noise - noise.mean()) / noise.std(), np.float32)


def _add_nucleus(
    dye: Field, rng: np.random.Generator, x: float, y: float, axes: tuple[float, float], angle: float, strength: float
) -> None:
    """Raise ``dye``, a torus, to a soft-edged, mottled ellipse with half axes in px; its long one lies at ``angle``."""
    steps = np.arange(-int(axes[0] * 1.3) - 2, int(axes[0] * 1.3) + 3)
    dx, dy = (int(x) + steps - x)[None], (int(y) + steps - y)[:, None]
    c, s = np.cos(angle), np.sin(angle)
    square = ((dx * c + dy * s) / axes[0]) ** 2 + ((dy * c - dx * s) / axes[1]) ** 2
    inside = np.clip((1 - np.sqrt(square)) / 0.28 + 0.5, 0, 1)
    chromatin = 0.85 + 0.2 * np.exp(-((square - 0.75) ** 2) / 0.05) + rng.normal(0, 0.12, square.shape)
    box = np.ix_((int(y) + steps) % dye.shape[0], (int(x) + steps) % dye.shape[1])
    dye[box] = np.maximum(dye[box], (strength * chromatin * inside).astype(np.float32))


@lru_cache(maxsize=1)
def _stroma(seed: int) -> tuple[Field, Field]:
    """Dye maps on a torus: bundles of fibres with slits between them, spindle-shaped nuclei, lymphocytes."""
    rng, n = cell_rng(seed, 0xC011), PERIOD
    angle = 0.9 * _torus_noise(rng, n, 150) + 0.35 * _torus_noise(rng, n, 40)
    fibres = _torus_noise(rng, n, 1.5)
    y, x = np.mgrid[0:n, 0:n].astype(np.float32)
    total = fibres.copy()
    for sign in (-1.0, 1.0):
        px, py = x, y
        for _ in range(16):
            field = cv2.remap(angle, px, py, cv2.INTER_NEAREST, borderMode=cv2.BORDER_WRAP)
            px, py = px + np.float32(sign) * np.cos(field), py + np.float32(sign) * np.sin(field)
            total += cv2.remap(fibres, px, py, cv2.INTER_LINEAR, borderMode=cv2.BORDER_WRAP)
    smeared = (total - total.mean()) / total.std()
    slit = 1 - 0.6 * np.clip((smeared - 1.3) * 1.2, 0, 1)  # where bundles part, light comes through
    thick = _torus_noise(rng, n, 60)
    eosin = np.clip(0.33 + 0.05 * smeared + 0.035 * thick, 0.05, 2) * slit
    haematoxylin = (np.clip(0.06 + 0.012 * smeared + 0.02 * _torus_noise(rng, n, 70), 0, 1) * slit).astype(np.float32)
    crowd = _torus_noise(rng, n, 90)
    for number in range(n * n // 950):
        x0, y0 = rng.uniform(0, n, 2).tolist()
        here = int(y0), int(x0)
        if number % 3 == 0:  # spindles follow the fibres
            axes = rng.uniform(6, 11), rng.uniform(2.0, 3.4)
            _add_nucleus(
                haematoxylin, rng, x0, y0, axes, float(angle[here]) + rng.normal(0, 0.15), rng.uniform(0.6, 1.2)
            )
        elif rng.normal(1.3, 0.5) < crowd[here]:
            side = rng.uniform(4.2, 5.6)
            _add_nucleus(haematoxylin, rng, x0, y0, (side, 0.9 * side), rng.uniform(0, np.pi), rng.uniform(1.3, 1.8))
    return haematoxylin, eosin.astype(np.float32)


@lru_cache(maxsize=2)
def _stamps(seed: int, radii: tuple[float, float]) -> list[tuple[Field, Field, Image, NDArray[np.bool_]]]:
    sizes = np.linspace(*radii, VARIANTS).tolist()
    return [_gland(cell_rng(seed, 0x57A9, k), radius) for k, radius in enumerate(sizes)]


def _gland(rng: np.random.Generator, radius: float) -> tuple[Field, Field, Image, NDArray[np.bool_]]:
    """Haematoxylin, eosin, opacity and mask of a gland, each (n, n), whose border is ``radius`` px from its centre."""
    half = int(np.ceil(radius)) + HALO
    n = 2 * half * _FINER
    axis = (np.arange(n, dtype=np.float32) + 0.5) / _FINER - half
    r, theta = np.hypot(axis[None], axis[:, None]), np.arctan2(axis[:, None], axis[None])
    waves = [_waves(rng, theta, strength, count) for strength, count in ((0.16, 5), (0.12, 7))]
    border = radius * (1 + waves[0] - waves[0].max())
    inner = border * (rng.uniform(0.24, 0.38) + waves[1])
    depth = np.clip((r - inner) / (border - inner), 0, 1)  # 0 at the lumen, 1 at the border
    grain = cv2.GaussianBlur(rng.standard_normal((n, n), np.float32), (0, 0), 1.6 * _FINER)
    grain /= grain.std()
    gland, lumen = r <= border, r <= inner
    haematoxylin = np.where(gland, 0.42 + 0.14 * depth + 0.05 * grain, 0.01)
    eosin = np.where(gland, 0.30 - 0.10 * depth + 0.03 * grain, 0.03)
    for edge, width, strength in ((border, 1.3, 0.28), (inner, 1.6, 0.10)):
        eosin += strength * np.exp(-(((r - edge) / width) ** 2))
    haematoxylin[lumen], eosin[lumen] = 0.01, 0.015

    cells = np.zeros((n, n), np.float32)
    mean_border, mean_inner = float(border.mean()), float(inner.mean())
    thickness = mean_border - mean_inner
    for ring in [0.62] if thickness < 24 else [0.74, 0.40]:
        at = mean_inner + ring * thickness
        count = max(5, round(2 * np.pi * at / rng.uniform(9.0, 10.5)))
        for k in range(count):
            angle = 2 * np.pi * (k + rng.uniform(-0.25, 0.25)) / count
            distance = at + rng.normal(0, 0.06 * thickness)
            x, y = ((half + distance * turn) * _FINER for turn in (np.cos(angle), np.sin(angle)))
            axes = rng.uniform(5.2, 7.2) * _FINER, rng.uniform(3.2, 4.4) * _FINER
            _add_nucleus(cells, rng, x, y, axes, angle + rng.normal(0, 0.15), rng.uniform(0.95, 1.4))
    haematoxylin = np.maximum(haematoxylin, np.where(gland & ~lumen, cells, 0))

    # The halo is a thin slit of light on one side, where the section tore.
    reach = 1.5 + (HALO - 1.5) * (0.5 + 0.5 * np.cos(theta - rng.uniform(-np.pi, np.pi))) * rng.uniform(0.2, 1.0)
    opacity = np.clip((border + reach - r) / 1.5 + 0.5, 0, 1)
    size = (n // _FINER, n // _FINER)
    h, e, o, m = (
        np.asarray(cv2.resize(image.astype(np.float32), size, interpolation=cv2.INTER_AREA), np.float32)
        for image in (haematoxylin, eosin, opacity, gland)
    )
    return h, e, np.rint(o * 255).astype(np.uint8), m >= 0.5


def _waves(rng: np.random.Generator, theta: Field, strength: float, highest: int) -> Field:
    """Sum of 2 to ``highest`` waves around the circle, each weaker than the one before."""
    waves = np.arange(2, highest + 1)
    heights, phases = strength * rng.normal(0, 1 / waves), rng.uniform(0, 2 * np.pi, len(waves))
    total = sum(h * np.cos(k * theta + p) for k, h, p in zip(waves, heights, phases, strict=True))
    return np.asarray(total, np.float32)
