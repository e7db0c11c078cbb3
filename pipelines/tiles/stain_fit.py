"""Stain of one slide, measured on its tissue: what stain normalisation takes it from, or to.

Takes an open slide and its tissue; gives a ``StainFit``: the colours and strengths of two stains (Macenko et al. 2009,
"A method for normalizing histology slides for quantitative analysis"), or the mean and the spread of the tissue's
colours in l alpha beta (Reinhard et al. 2001, "Color transfer between images"). The pixels looked at follow from the
slide and ``tissue_mpp`` alone, so that training and prediction, and every rank, find the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Region, l0_from_l
from pipelines.slides.slide import Pixels, Slide, TileReadError
from pipelines.tiles.tissue import Overview, TissueMask, find_tissue, is_fluorescence

Method = Literal["macenko", "reinhard"]

REGIONS, REGION_PX = 128, 64
"""As many squares of tissue are looked at, evenly spread, each of so many px a side: half a million px."""

FIT_MPP = 2.0
"""um/px that tissue is looked at, a low level of a slide; finer where there is so little that px would count twice."""

LEAST_DENSITY = 0.15
"""Optical density that a px of stained tissue has in every channel (Macenko et al., beta)."""

LEAST_PX = 1000
"""Stained px below which nothing is measured."""

PERCENT = 1.0
"""Of the px, as many are beyond either stain's direction, and beyond its greatest amount (Macenko et al., alpha)."""

LEAST_ANGLE = 6.0
"""Degrees between two stains; haematoxylin and eosin have 15 to 40. With less, amounts of them are noise."""

LEAST_AMOUNT = 0.1
"""Optical density of the strongest px of a stain."""

MOST_EOSIN = 1.75
"""Times the greatest amount of haematoxylin that of eosin may be. More is found where the darkest tissue takes more
green than the pale: a blue or violet stain, whose nuclei would become the brightest part of the picture."""

LEAST_SPREAD = (0.12, 0.022, 0.0057)
"""Standard deviations in l, alpha, beta: a fifth of those of an H&E slide. With less, noise would become colour."""

LMS_FROM_RGB = np.array([[0.3811, 0.5783, 0.0402], [0.1967, 0.7244, 0.0782], [0.0241, 0.1288, 0.8444]])
"""Light of the long, middle and short cones (column vector) = LMS_FROM_RGB @ light in R, G, B (Reinhard et al.)."""

LAB_FROM_LOG_LMS = np.array([[1, 1, 1], [1, 1, -2], [1, -1, 0]]) / np.sqrt([[3], [6], [2]])
"""l, alpha, beta (column vector) = LAB_FROM_LOG_LMS @ logarithm of L, M, S (Reinhard et al.)."""


class NoStainFit(Exception):
    """A slide whose stains cannot be measured: says why."""


@dataclass(frozen=True)
class StainFit:
    """Stain of a slide.

    Attributes:
        method: says what the numbers are.
        numbers: macenko: optical density in R, G, B of a unit of haematoxylin, of eosin, and the greatest amount of
            each (8); reinhard: mean of l, alpha, beta, and standard deviation of each, natural logarithms of light
            0 to 1 (6).
    """

    method: Method
    numbers: tuple[float, ...]

    @property
    def stains(self) -> NDArray[np.float64]:
        """Rows haematoxylin and eosin, columns R, G, B."""
        assert self.method == "macenko"
        return np.array(self.numbers[:6]).reshape(2, 3)

    @property
    def amounts(self) -> NDArray[np.float64]:
        """The greatest of haematoxylin and of eosin."""
        return np.array(self.numbers[6:])

    @property
    def mean(self) -> NDArray[np.float64]:
        """Values of l, alpha, beta."""
        assert self.method == "reinhard"
        return np.array(self.numbers[:3])

    @property
    def spread(self) -> NDArray[np.float64]:
        """Standard deviation of l, alpha, beta."""
        return np.array(self.numbers[3:])


PUBLISHED: dict[Method, StainFit] = {
    "macenko": StainFit("macenko", (0.5626, 0.7201, 0.4062, 0.2159, 0.8012, 0.5581, 1.9705, 1.0308)),
    "reinhard": StainFit(
        "reinhard",
        (8.74108109 - math.sqrt(3) * math.log(256), -0.12440419, 0.0444982, 0.6135447, 0.10989545, 0.0286032),
    ),
}
"""What slides are made to look like unless another is asked for. macenko: the reference that the method's published
implementations share (M. Veta's stain normalisation toolbox); reinhard: a region of TCGA-A2-A3XS-DX1 (Amgad et al.
2019, "Structured crowdsourcing enables convolutional segmentation of histology images"), there of light 0 to 255."""


def fit_slide(slide: Slide, overview: Overview, method: Method) -> StainFit:
    """Return how ``slide`` is stained.

    Raises:
        NoStainFit: it is fluorescent, has too little stained tissue, or one stain only.
    """
    if is_fluorescence(cv2.medianBlur(overview.pixels, 3)):
        raise NoStainFit("a fluorescence slide: its stains give light, and do not take it")
    return fit_pixels(tissue_pixels(slide, find_tissue(overview)), method)


def tissue_pixels(slide: Slide, tissue: TissueMask) -> Pixels:
    """Return px of the tissue, uint8 (n, 3): of ``REGIONS`` squares around places evenly spread over it; what cannot
    be read is left out."""
    rows, columns = np.nonzero(tissue.mask)
    places = np.unique(np.linspace(0, len(rows) - 1, min(REGIONS, len(rows))).astype(np.int64))
    mpp = max(slide.mpp, min(FIT_MPP, tissue.mpp * math.sqrt(len(rows) / (REGIONS * REGION_PX**2))))
    l0_px = mpp / slide.mpp
    kept = [np.empty((0, 3), np.uint8)]
    for place in places:
        l0_x, l0_y = (
            origin + l0_from_l(float(cell[place]) + 0.5, tissue.downsample) - round(REGION_PX / 2 * l0_px)
            for origin, cell in ((tissue.l0_x, columns), (tissue.l0_y, rows))
        )
        try:
            pixels = slide.read(Region(l0_x, l0_y, REGION_PX, REGION_PX, mpp))
        except TileReadError:
            continue
        kept.append(pixels[_mask_of(tissue, l0_x, l0_y, l0_px)])
    return np.concatenate(kept)


def _mask_of(tissue: TissueMask, l0_x: int, l0_y: int, l0_px: float) -> NDArray[np.bool_]:
    """Tissue per px of a square at ``l0_x``, ``l0_y``, whose px are ``l0_px`` of level 0."""
    inside, cells = [], []
    for origin, first, length in zip((l0_y, l0_x), (tissue.l0_y, tissue.l0_x), tissue.mask.shape, strict=True):
        cell = np.floor((origin + (np.arange(REGION_PX) + 0.5) * l0_px - first) / tissue.downsample).astype(np.int64)
        inside.append((cell >= 0) & (cell < length))
        cells.append(np.clip(cell, 0, length - 1))
    mask: NDArray[np.bool_] = tissue.mask[np.ix_(*cells)] & np.outer(*inside)
    return mask


def fit_pixels(pixels: Pixels, method: Method) -> StainFit:
    """Return the stain of tissue.

    Args:
        pixels: uint8 (n, 3).

    Raises:
        NoStainFit: too few of them are stained, or by one stain only.
    """
    density = -np.log((pixels.astype(np.float64) + 1) / 256)
    stained = (density >= LEAST_DENSITY).all(1)
    if stained.sum() < LEAST_PX:
        raise NoStainFit(f"{stained.sum()} px of its tissue are stained; at least {LEAST_PX} are needed")
    return (_macenko if method == "macenko" else _reinhard)(density[stained])


def _macenko(density: NDArray[np.float64]) -> StainFit:
    """The two outermost directions of optical density in the plane that holds most of it."""
    plane = np.linalg.eigh(np.cov(density.T))[1][:, [2, 1]]
    plane *= np.where(plane.sum(0) < 0, -1, 1)  # the first points where light is taken from
    projected = density @ plane
    angles = np.percentile(np.arctan2(projected[:, 1], projected[:, 0]), [PERCENT, 100 - PERCENT])
    if np.degrees(angles[1] - angles[0]) < LEAST_ANGLE:
        raise NoStainFit(
            f"its tissue has one stain only: colours lie within {np.degrees(angles[1] - angles[0]):.1f} degrees; "
            f"two stains have {LEAST_ANGLE:g} or more"
        )
    stains = np.stack([plane @ [np.cos(angle), np.sin(angle)] for angle in angles])
    stains = stains[np.argsort(-stains[:, 0])]  # haematoxylin takes more of the red
    amounts = np.percentile(density @ np.linalg.pinv(stains), 100 - PERCENT, axis=0)
    if amounts.min() < LEAST_AMOUNT:
        raise NoStainFit(f"of one stain there is almost nothing: {amounts.min():.2f}, at least {LEAST_AMOUNT:g}")
    if amounts[1] > MOST_EOSIN * amounts[0]:
        raise NoStainFit(
            "it is not stained by haematoxylin and eosin: its darkest tissue would be eosin, "
            f"{amounts[1] / amounts[0]:.1f} times the haematoxylin; at most {MOST_EOSIN:g}"
        )
    return StainFit("macenko", _rounded([*stains.ravel(), *amounts]))


def _reinhard(density: NDArray[np.float64]) -> StainFit:
    lab = np.log(np.exp(-density) @ LMS_FROM_RGB.T) @ LAB_FROM_LOG_LMS.T
    spread = lab.std(0)
    if (spread < LEAST_SPREAD).any():
        raise NoStainFit(
            "its tissue has one colour only: standard deviations in l, alpha, beta of "
            f"{', '.join(f'{value:.3g}' for value in spread)}; at least {', '.join(f'{v:g}' for v in LEAST_SPREAD)}"
        )
    return StainFit("reinhard", _rounded([*lab.mean(0), *spread]))


def _rounded(numbers: Sequence[float]) -> tuple[float, ...]:
    """Six decimals, which no px can tell apart; what is beyond depends on the processor."""
    return tuple(round(float(number), 6) for number in numbers)
