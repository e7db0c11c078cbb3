"""What is wrong with a slide to look at: out of focus, or drawn on with a pen.

Takes an open slide, its overview and its tiles; gives ``Quality``, figures that a page shows; nothing is left out for
them. Focus is the variance of the Laplacian (Pech-Pacheco et al. 2000) of windows of tissue at 1 um/px, divided by the
variance of the grey values, which a pale stain lowers as much. Pens are large areas of hues that haematoxylin and eosin
do not have, or nearly black, as in HistoQC (Janowczyk et al. 2019). Error rates: ``benchmarks/slide_quality``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Region, l0_from_t
from pipelines.slides.slide import Pixels, Slide, TileReadError
from pipelines.tiles.tissue import (
    DARK,
    MARK_UM2,
    Mask,
    Overview,
    ink_of,
    is_fluorescence,
    largest_channel,
    smallest_channel,
    without_small,
)

FOCUS_MPP, COARSEST_MPP = 1.0, 2.0
"""um/px that focus is judged at, which blurs of 2 um change ten times and more, and from which on it is not judged."""

WINDOW_PX, WINDOWS = 256, 24
"""Side of a window, and windows of a slide, evenly spread over its tiles: a tenth of a second of reading."""

STAINED, LEAST_STAINED = 20, 0.1
"""Difference of a px's channels (0-255) from which on it is tissue, and the part of a window that has to be."""

SHARP = 0.09
"""Sharpness below which a window is out of focus."""

MOST_BLURRED = 0.5
"""Part of a slide's windows out of focus from which on the slide is flagged."""

UNSCANNED = 0.1
"""Part of a picture's border along which a black area lies that was not scanned; a stroke crosses it with its width."""

RED_SATURATION = 190
"""Least saturation (0-255) of red ink; blood and eosin have less."""


@dataclass(frozen=True, slots=True)
class Quality:
    """Figures of one slide; None: not judged (fluorescence, too coarse a scan, no window of tissue).

    Attributes:
        sharpness: median over the windows; a slide in focus has 0.1 to 4.
        blurred: part of the windows out of focus, 0 to 1.
        pen_mm2: area of pen marks.
    """

    sharpness: float | None = None
    blurred: float | None = None
    pen_mm2: float | None = None

    @property
    def flags(self) -> tuple[str, ...]:
        """What a reader should look at: blur, pen."""
        is_blurred = self.blurred is not None and self.blurred >= MOST_BLURRED
        return (*(("blur",) if is_blurred else ()), *(("pen",) if self.pen_mm2 else ()))


def slide_quality(
    slide: Slide, overview: Overview, l0_x: NDArray[np.int64], l0_y: NDArray[np.int64], l0_size: tuple[int, int]
) -> Quality:
    """Return the quality of a slide.

    Args:
        slide: open.
        overview: of it.
        l0_x, l0_y: int64 (n,), top left of its tiles in level-0 px.
        l0_size: width and height of a tile in level-0 px.
    """
    if is_fluorescence(overview.pixels):
        return Quality()
    pen_mm2 = float(pen_of(overview.pixels, overview.mpp).sum()) * overview.mpp**2 / 1e6
    if slide.mpp > COARSEST_MPP:
        return Quality(pen_mm2=pen_mm2)
    measured = [
        value for region in _windows(slide, l0_x, l0_y, l0_size) if (value := _sharpness_at(slide, region)) is not None
    ]
    if not measured:
        return Quality(pen_mm2=pen_mm2)
    values = np.array(measured)
    return Quality(float(np.median(values)), float((values < SHARP).mean()), pen_mm2)


def sharpness_of(pixels: Pixels) -> float | None:
    """Return the sharpness of a picture uint8 (h, w, 3) at ``FOCUS_MPP``; None of one that shows too little tissue."""
    stained = cv2.medianBlur(largest_channel(pixels) - smallest_channel(pixels), 5) > STAINED
    if stained.mean() < LEAST_STAINED:
        return None
    grey = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY).astype(np.float32)
    edges = cv2.Laplacian(grey, cv2.CV_32F)
    return float(edges[stained].var() / max(float(grey[stained].var()), 1.0))


def pen_of(pixels: Pixels, mpp: float) -> Mask:
    """Return where a picture uint8 (h, w, 3) at ``mpp`` um/px of a stained slide is drawn on, bool (h, w).

    Black that lies along more than ``UNSCANNED`` of the border was not scanned.
    """
    smooth = cv2.medianBlur(pixels, 3)
    hue, saturation, value = np.moveaxis(cv2.cvtColor(smooth, cv2.COLOR_RGB2HSV), 2, 0)
    red = ((hue <= 8) | (hue >= 172)) & (saturation >= RED_SATURATION) & (value > DARK)
    dark = without_small(value < DARK, MARK_UM2, mpp)
    _, parts = cv2.connectedComponents(dark.view(np.uint8), connectivity=8)
    border = np.concatenate([parts[0], parts[-1], parts[:, 0], parts[:, -1]])
    unscanned = np.flatnonzero(np.bincount(border) > UNSCANNED * len(border))
    ink = without_small(ink_of(hue, saturation, dark) | red, MARK_UM2, mpp)
    marks: Mask = ink | (dark & ~np.isin(parts, unscanned))
    return marks


def _windows(slide: Slide, l0_x: NDArray[np.int64], l0_y: NDArray[np.int64], l0_size: tuple[int, int]) -> list[Region]:
    """Windows in the middle of evenly chosen tiles; over a tile that is one of few they are spread out."""
    mpp = max(FOCUS_MPP, slide.mpp)
    side = l0_from_t(WINDOW_PX, mpp, slide.mpp)
    chosen = np.unique(np.linspace(0, max(0, len(l0_x) - 1), min(WINDOWS, len(l0_x))).round().astype(np.int64))
    each = max(1, math.isqrt(WINDOWS // max(1, len(chosen))))  # along both sides of a tile
    return [
        Region(
            int(l0_x[k] + l0_size[0] * (2 * column + 1) / (2 * each) - side / 2),
            int(l0_y[k] + l0_size[1] * (2 * row + 1) / (2 * each) - side / 2),
            *(WINDOW_PX, WINDOW_PX, mpp),
        )
        for k in chosen
        for row in range(each)
        for column in range(each)
    ]


def _sharpness_at(slide: Slide, region: Region) -> float | None:
    try:
        return sharpness_of(slide.read(region))
    except TileReadError:  # which is told where tiles are checked and read
        return None
