"""Where on a slide the tissue is: a mask at about 8 um/px.

Takes an open slide, reads it once, coarsely and in blocks, and gives a ``TissueMask``. Stained tissue on glass is what
is more saturated than the glass (Otsu, IEEE Trans. SMC 9, 1979, on saturation, as HistoQC and CLAM do); fluorescence on
black is what is brighter than the dark (Otsu on log intensity). Pen marks, black borders and specks are taken out.
"""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.geometry import Region, best_level, l0_from_l, l_from_l0
from pipelines.slides.slide import PADDING, Pixels, Slide, SlideError, TileReadError

Mask = NDArray[np.bool_]

BLOCK_LEVEL_PX = 4096
"""Side of the blocks that a level is read in (48 MiB): enough to decode few compressed tiles twice, little to hold."""

DAMAGE_LEVEL_PX = 256
"""Side down to which a damaged block is taken apart to save what can be read: about one compressed tile."""

MOST_UNREADABLE = 0.5
"""A slide of which more is damaged is not worth training on."""

OVERVIEW_PX = 40_000_000
"""Most px of an overview, which bounds memory at about 0.9 GB: a coarser one is read of what would have more."""

MOST_LEVEL_PX = 40_000_000_000
"""Most px of the level that an overview is read of: 200,000 x 200,000 px without a coarser level take minutes."""

SATURATION_FLOOR, SATURATION_CEILING = 14, 40
"""Otsu's threshold (0-255) is kept in here. Glass with JPEG noise stays below the floor; a picture full of tissue
would otherwise be split into pale and dark tissue."""

DARK = 60
"""Brightest channel (0-255) below which a px of a stained slide shows no light: border, fold or black marker."""

FLUORESCENCE_FLOOR = 5
"""Least brightest channel (0-255) that counts as fluorescence: below it a camera shows noise."""

FLUORESCENCE_CONTRAST = 4.0
"""Times as bright as the darkest px is tissue in any case: between nuclei there is only its faint glow."""

PEN_SHARE = 0.5
"""More than this part of the coloured area in a marker's colour is a stain (trichrome, Alcian blue), not a pen."""

CLOSE_UM, PEN_MARGIN_UM, SPECK_UM2, HOLE_UM2, MARK_UM2 = 40.0, 40.0, 20_000.0, 60_000.0, 40_000.0
"""Gaps closed, soft edge of a pen stroke, and the areas below which tissue, a hole or a mark is too small to count."""


@dataclass(frozen=True, eq=False)
class Overview:
    """A whole slide, coarsely.

    Attributes:
        pixels: uint8 (h, w, 3), RGB.
        l0_x, l0_y: level-0 px of its top left.
        downsample: level-0 px per px.
        mpp: um/px.
        unreadable: bool (h, w), where the file is damaged; white in ``pixels``.
    """

    pixels: Pixels
    l0_x: int
    l0_y: int
    downsample: float
    mpp: float
    unreadable: Mask


@dataclass(frozen=True, eq=False)
class TissueMask:
    """Tissue per px of an overview: bool (h, w), level-0 px of its top left, level-0 px per px, um/px."""

    mask: Mask
    l0_x: int
    l0_y: int
    downsample: float
    mpp: float

    @property
    def share(self) -> float:
        """Part of the slide that is tissue, 0 to 1."""
        return float(self.mask.mean())


def read_overview(slide: Slide, mpp: float, threads: int) -> Overview:
    """Read what is scanned of ``slide`` at about ``mpp`` um/px; coarser if level 0 is, or to stay in ``OVERVIEW_PX``.

    The resolution is rounded to a whole number of px of the level that is read, so that blocks meet without a seam and
    nothing is resampled twice.

    A damaged place is left white, as small as it can be told apart, and marked unreadable.

    Raises:
        SlideError: the level to be read has more than ``MOST_LEVEL_PX``.
        TileReadError: more than ``MOST_UNREADABLE`` of the slide is damaged; the first fault found.
    """
    bounds = slide.bounds
    least_mpp = slide.mpp * math.sqrt(bounds.width * bounds.height / OVERVIEW_PX)
    mpp = max(mpp, slide.mpp, least_mpp)
    level = best_level(slide.levels, mpp)
    if bounds.width * bounds.height / level.downsample**2 > MOST_LEVEL_PX:
        raise SlideError(
            f"{slide.path}: tissue is looked for on a level of at most {MOST_LEVEL_PX:,} px; the coarsest that is fine "
            f"enough has {level.width:,} x {level.height:,} px; convert the slide to a pyramid with coarser levels "
            "(for example with `vips tiffsave --tile --pyramid`)"
        )
    reduction = max(1, round(mpp / level.mpp), math.ceil(least_mpp / level.mpp))
    downsample = level.downsample * reduction
    width, height = (max(1, l_from_l0(side, downsample)) for side in (bounds.width, bounds.height))
    pixels = np.empty((height, width, 3), np.uint8)
    unreadable = np.zeros((height, width), np.bool_)
    side, least_side = max(1, BLOCK_LEVEL_PX // reduction), max(1, DAMAGE_LEVEL_PX // reduction)
    faults: list[TileReadError] = []

    def read_block(x: int, y: int, side: int) -> None:
        out = pixels[y : y + side, x : x + side]
        l0_x, l0_y = bounds.l0_x + l0_from_l(x, downsample), bounds.l0_y + l0_from_l(y, downsample)
        try:
            slide.read(Region(l0_x, l0_y, out.shape[1], out.shape[0], level.mpp * reduction), out)
        except TileReadError as fault:
            faults.append(fault)
            if side <= least_side:
                out[...], unreadable[y : y + side, x : x + side] = PADDING, True
                return
            half = (side + 1) // 2
            for corner_y in range(y, y + out.shape[0], half):
                for corner_x in range(x, x + out.shape[1], half):
                    read_block(corner_x, corner_y, half)

    with ThreadPoolExecutor(threads) as pool:
        blocks = [(x, y, side) for y in range(0, height, side) for x in range(0, width, side)]
        for _ in pool.map(read_block, *zip(*blocks, strict=True)):
            pass
    if unreadable.mean() > MOST_UNREADABLE:
        raise faults[0]
    return Overview(pixels, bounds.l0_x, bounds.l0_y, downsample, level.mpp * reduction, unreadable)


def find_tissue(overview: Overview) -> TissueMask:
    """Return the tissue of a slide's overview."""
    mask = tissue_of(overview.pixels, overview.mpp) & ~overview.unreadable
    return TissueMask(mask, overview.l0_x, overview.l0_y, overview.downsample, overview.mpp)


def tissue_of(pixels: Pixels, mpp: float) -> Mask:
    """Tissue per px, bool (h, w), of a picture uint8 (h, w, 3) at ``mpp`` um/px."""
    smooth = cv2.medianBlur(pixels, 3)
    if is_fluorescence(smooth):
        mask = _bright(smooth)
    else:
        marks = _marks(smooth, mpp)
        mask = _saturated(smooth, ~marks) & ~marks
    return _tidied(mask, mpp)


def is_fluorescence(pixels: Pixels) -> bool:
    """True when most of a picture is dark and what is lit is not pale, as glass and tissue on it are."""
    lit = pixels.max(axis=2) >= DARK
    if lit.mean() > 0.5:
        return False
    return not lit.any() or float(np.percentile(pixels.min(axis=2)[lit], 90)) < 150


def _bright(pixels: Pixels) -> Mask:
    """Fluorescence: brighter than the dark between the tissue, on a log scale, since stain is ten times as bright."""
    brightest = cv2.GaussianBlur(pixels.max(axis=2), (0, 0), 2)
    log_scale = 255 / np.log2(256)
    log = np.round(np.log2(brightest.astype(np.float32) + 1) * log_scale).astype(np.uint8)
    otsu, _ = cv2.threshold(log, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    glow = FLUORESCENCE_CONTRAST * float(np.percentile(brightest, 1))
    threshold = max(min(2 ** (otsu / log_scale) - 1, glow), FLUORESCENCE_FLOOR)
    mask: Mask = brightest > threshold
    return mask


def _saturated(pixels: Pixels, where: Mask) -> Mask:
    """Stain: more saturated than the glass, whose own tint is divided out first."""
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    glass = (pixels.min(axis=2) >= 200) & (hsv[..., 1] < 26)
    if glass.mean() > 0.05:  # less may be the palest tissue of a slide without glass
        tint = np.median(pixels[glass], axis=0)
        scaled = np.arange(256)[:, None] * (tint.max() / tint)
        hsv = cv2.cvtColor(cv2.LUT(pixels, np.minimum(scaled, 255).astype(np.uint8)[None]), cv2.COLOR_RGB2HSV)
    saturation = hsv[..., 1]
    if not where.any():
        return where
    otsu, _ = cv2.threshold(saturation[where], 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)
    mask: Mask = saturation > min(max(otsu, SATURATION_FLOOR), SATURATION_CEILING)
    return mask


def _marks(pixels: Pixels, mpp: float) -> Mask:
    """Black borders and pen strokes with their soft edges: large areas that are near black, or green or blue as ink."""
    hue, saturation, value = (
        np.ascontiguousarray(plane) for plane in np.moveaxis(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV), 2, 0)
    )
    black = (value < DARK) | ((value < 1.6 * DARK) & (saturation < 60))
    ink = ink_of(hue, saturation, black)
    marks = without_small(black, MARK_UM2, mpp) | without_small(ink, MARK_UM2, mpp)
    return _morph(cv2.MORPH_DILATE, marks, PEN_MARGIN_UM, mpp)


def ink_of(hue: NDArray[np.uint8], saturation: NDArray[np.uint8], black: Mask) -> Mask:
    """Return where hue and saturation (0-180, 0-255) are those of green or blue ink; nowhere if most is: a stain."""
    green = (hue > 35) & (hue <= 92) & (saturation > 60)
    blue = (hue > 92) & (hue < 124) & (saturation > 90)  # haematoxylin begins at about 125 (OpenCV counts to 180)
    ink: Mask = green | blue
    if ink.sum() > PEN_SHARE * ((saturation > SATURATION_CEILING) & ~black).sum():
        ink[:] = False
    return ink


def _tidied(mask: Mask, mpp: float) -> Mask:
    """``mask`` with small gaps closed, specks removed and small holes filled."""
    closed = without_small(_morph(cv2.MORPH_CLOSE, mask, CLOSE_UM, mpp), SPECK_UM2, mpp)
    return ~without_small(~closed, HOLE_UM2, mpp)


def _morph(operation: int, mask: Mask, diameter_um: float, mpp: float) -> Mask:
    """A morphological operation with a disc; none when the disc is smaller than a px."""
    side = 2 * round(diameter_um / mpp / 2) + 1
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    done: Mask = cv2.morphologyEx(mask.view(np.uint8), operation, disc).astype(np.bool_)
    return done


def without_small(mask: Mask, area_um2: float, mpp: float) -> Mask:
    """Return ``mask`` without its 8-connected parts that are smaller than ``area_um2``."""
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask.view(np.uint8), connectivity=8, ltype=cv2.CV_32S)
    large = stats[:, cv2.CC_STAT_AREA] * mpp**2 >= area_um2
    large[0] = False
    kept: Mask = large[labels]
    return kept
