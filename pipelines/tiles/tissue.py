"""Tissue of a slide: a mask at about 8 um/px.

Takes an open slide, reads it once, coarsely and in blocks, and gives a ``TissueMask``. Stained tissue on glass is what
is more saturated than the glass (Otsu, IEEE Trans. SMC 9, 1979, on saturation, as HistoQC and CLAM do); fluorescence on
black is what is brighter than the dark (Otsu on log intensity). Pen marks, black borders and specks are taken out.
The saturation threshold is chosen for each slide. It may be low (pale H&E, IHC) only where what exceeds it has texture,
which tinted glass does not have.
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
would otherwise be split into pale and dark tissue. Pale tissue may have a threshold below the floor."""

PALE_SEPARATION, PALE_STEP = 0.8, 8.0
"""Least part of the variance that lies between glass and pale tissue (0.64 within one normal distribution, 0.75 on a
ramp), and least difference of their mean saturations (0-255)."""

TEXTURE_RATIO, TEXTURE_STEP, TEXTURE_PX = 1.5, 0.3, 5
"""Pale tissue varies so many times as much as glass, and so many grey levels more; side of the squares compared."""

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

DUST_UM2 = 4_000.0
"""Area below which tissue is too small to count on a slide that has none of ``SPECK_UM2``."""


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
    """Tissue per px of an overview: bool (h, w), level-0 px of its top left, level-0 px per px, um/px.

    ``found`` is a sentence about the threshold and the area that exceeds it, for messages about slides without tissue.
    """

    mask: Mask
    l0_x: int
    l0_y: int
    downsample: float
    mpp: float
    found: str = ""

    @property
    def share(self) -> float:
        """Part of the slide that is tissue, 0 to 1."""
        return float(self.mask.mean())


def read_overview(slide: Slide, mpp: float, threads: int) -> Overview:
    """Read what is scanned of ``slide`` at about ``mpp`` um/px; coarser if level 0 is, or to stay in ``OVERVIEW_PX``.

    The resolution is rounded to a whole number of px of the level that is read, so that blocks meet without a seam and
    nothing is resampled twice.

    A damaged place is left white, as small as it can be found, and marked unreadable.

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
    mpp, smooth = overview.mpp, cv2.medianBlur(overview.pixels, 3)
    if is_fluorescence(smooth):
        mask, threshold = _bright(smooth)
        rule = f"fluorescence brighter than {threshold:.0f} of 255 was looked for (darkest px {int(smooth.min())})"
        least = SPECK_UM2
    else:
        marks = _marks(smooth, mpp)
        mask, threshold, shown = _saturated(smooth, ~marks)
        # Coloured areas are counted from the ceiling on: beside pale tissue a pen looks like the stain of the slide.
        all_marks = _marks(smooth, mpp, is_pale=True)
        if ink := int((all_marks & ~marks).sum()):
            pale = _saturated(smooth, ~all_marks)
            if pale[1] < SATURATION_CEILING and pale[0].sum() > ink:
                mask, threshold, shown = pale
        rule = f"stain with a saturation above {threshold} of 255 was looked for; px have {shown}"
        least = DUST_UM2 if threshold >= SATURATION_FLOOR else SPECK_UM2
    closed = _morph(cv2.MORPH_CLOSE, mask, CLOSE_UM, mpp)
    largest = _areas_um2(closed, mpp)[0][1:].max(initial=0)
    found = f"{rule}; it covers {mask.sum() * mpp**2:,.0f} um2"
    if largest:
        least = SPECK_UM2 if largest >= SPECK_UM2 else least
        found += f", the largest area {largest:,.0f} um2, of at least {least:,.0f}"
    closed = _without_small(closed, least, mpp)
    mask = ~_without_small(~closed, HOLE_UM2, mpp) & ~overview.unreadable
    return TissueMask(mask, overview.l0_x, overview.l0_y, overview.downsample, mpp, found)


def is_fluorescence(pixels: Pixels) -> bool:
    """True when most of a picture is dark and what is lit is not pale, as glass and tissue on it are."""
    lit = _largest_channel(pixels) >= DARK
    if lit.mean() > 0.5:
        return False
    return not lit.any() or float(np.percentile(_smallest_channel(pixels)[lit], 90)) < 150


def _largest_channel(pixels: Pixels) -> NDArray[np.uint8]:
    """Return the largest of the three values of each pixel, (h, w); 13 times as fast as ``pixels.max(axis=2)``."""
    return np.maximum(np.maximum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])


def _smallest_channel(pixels: Pixels) -> NDArray[np.uint8]:
    return np.minimum(np.minimum(pixels[..., 0], pixels[..., 1]), pixels[..., 2])


def _bright(pixels: Pixels) -> tuple[Mask, float]:
    """Fluorescence: brighter than the dark between the tissue, on a log scale, since stain is ten times as bright."""
    brightest = cv2.GaussianBlur(_largest_channel(pixels), (0, 0), 2)
    log_scale = 255 / np.log2(256)
    log = np.round(np.log2(brightest.astype(np.float32) + 1) * log_scale).astype(np.uint8)
    glow = FLUORESCENCE_CONTRAST * float(np.percentile(brightest, 1))
    threshold = max(min(2 ** (_otsu(log) / log_scale) - 1, glow), FLUORESCENCE_FLOOR)
    mask: Mask = brightest > threshold
    return mask, threshold


def _saturated(pixels: Pixels, where: Mask) -> tuple[Mask, int, str]:
    """Stain within ``where`` once the tint of the glass is divided out, its threshold, and words about all px."""
    if not where.any():
        return where, SATURATION_FLOOR, "none"
    hsv = cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV)
    texture = _texture(pixels)
    glass = (_smallest_channel(pixels) >= 200) & (hsv[..., 1] < 26)
    if glass.mean() > 0.05:  # less may be the palest tissue of a slide without glass
        # Pale tissue is as light as glass, but not as smooth.
        glass &= texture <= TEXTURE_RATIO * np.percentile(texture[glass], 20) + TEXTURE_STEP
        tint = np.median(pixels[glass], axis=0)
        scaled = np.arange(256)[:, None] * (tint.max() / tint)
        hsv = cv2.cvtColor(cv2.LUT(pixels, np.minimum(scaled, 255).astype(np.uint8)[None]), cv2.COLOR_RGB2HSV)
    saturation = np.ascontiguousarray(hsv[..., 1])
    otsu = _otsu(saturation[where])
    threshold = min(max(otsu, SATURATION_FLOOR), SATURATION_CEILING)
    # A strongly stained control beside pale tissue would otherwise hide it: look again at what is below the threshold.
    rest = where if otsu < SATURATION_FLOOR else where & (saturation <= threshold)
    if rest.any():
        pale = _otsu(saturation[rest])
        enough = where.sum() - rest.sum()
        if _is_pale_tissue(saturation, texture, rest, pale) and (rest & (saturation > pale)).sum() > enough:
            threshold = pale
    mask: Mask = (saturation > threshold) & where
    median, high = np.percentile(saturation[where], (50, 99))
    return mask, threshold, f"{median:.0f} (median) and {high:.0f} (99th percentile)"


def _otsu(values: NDArray[np.uint8]) -> int:
    """Otsu's threshold of ``values``."""
    return int(cv2.threshold(values, 0, 255, cv2.THRESH_BINARY + cv2.THRESH_OTSU)[0])


def _texture(pixels: Pixels) -> NDArray[np.float32]:
    """Standard deviation of the grey levels around each pixel."""
    grey, square = cv2.cvtColor(pixels, cv2.COLOR_RGB2GRAY), (TEXTURE_PX, TEXTURE_PX)
    mean = cv2.boxFilter(grey, cv2.CV_32F, square)
    texture: NDArray[np.float32] = cv2.sqrBoxFilter(grey, cv2.CV_32F, square).astype(np.float32, copy=False)
    texture -= cv2.multiply(mean, mean, dst=mean)
    np.sqrt(np.maximum(texture, 0, out=texture), out=texture)
    return texture


def _is_pale_tissue(saturation: NDArray[np.uint8], texture: NDArray[np.float32], where: Mask, threshold: int) -> bool:
    """Return whether what is more saturated than ``threshold`` within ``where`` is pale tissue, not tinted glass."""
    above, below = where & (saturation > threshold), where & (saturation <= threshold)
    stain = (saturation > threshold).view(np.uint8)
    inside = above & cv2.erode(stain, np.ones((3, 3), np.uint8)).astype(np.bool_)  # an edge has texture anyway
    if not inside.any() or not below.any():
        return False
    part = above.sum() / where.sum()
    saturated = float(saturation[above].mean())
    step = saturated - float(saturation[below].mean())
    separation = part * (1 - part) * step**2 / max(float(saturation[where].var(dtype=np.float64)), 1e-6)
    smooth, rough = (float(np.median(texture[px])) for px in (below, inside))
    has_texture = rough > TEXTURE_RATIO * smooth + TEXTURE_STEP
    return saturated < SATURATION_CEILING and step >= PALE_STEP and separation >= PALE_SEPARATION and has_texture


def _marks(pixels: Pixels, mpp: float, is_pale: bool = False) -> Mask:
    """Black borders and pen strokes with soft edges; the colour of most of the stain is no ink, unless ``is_pale``."""
    hue, saturation, value = (
        np.ascontiguousarray(plane) for plane in np.moveaxis(cv2.cvtColor(pixels, cv2.COLOR_RGB2HSV), 2, 0)
    )
    black = (value < DARK) | ((value < 1.6 * DARK) & (saturation < 60))
    green = (hue > 35) & (hue <= 92) & (saturation > 60)
    blue = (hue > 92) & (hue < 124) & (saturation > 90)  # haematoxylin begins at about 125 (OpenCV counts to 180)
    ink = green | blue
    if not is_pale and ink.sum() > PEN_SHARE * ((saturation > SATURATION_CEILING) & ~black).sum():
        ink[:] = False
    marks = _without_small(black, MARK_UM2, mpp) | _without_small(ink, MARK_UM2, mpp)
    return _morph(cv2.MORPH_DILATE, marks, PEN_MARGIN_UM, mpp)


def _morph(operation: int, mask: Mask, diameter_um: float, mpp: float) -> Mask:
    """A morphological operation with a disc; none when the disc is smaller than a px."""
    side = 2 * round(diameter_um / mpp / 2) + 1
    disc = cv2.getStructuringElement(cv2.MORPH_ELLIPSE, (side, side))
    done: Mask = cv2.morphologyEx(mask.view(np.uint8), operation, disc).astype(np.bool_)
    return done


def _areas_um2(mask: Mask, mpp: float) -> tuple[NDArray[np.float64], NDArray[np.int32]]:
    """Return the um2 of the 8-connected parts of ``mask``, after that of what is unset, and their number per px."""
    _, labels, stats, _ = cv2.connectedComponentsWithStats(mask.view(np.uint8), connectivity=8, ltype=cv2.CV_32S)
    return stats[:, cv2.CC_STAT_AREA] * mpp**2, labels


def _without_small(mask: Mask, area_um2: float, mpp: float) -> Mask:
    """Return ``mask`` without its 8-connected parts that are smaller than ``area_um2``."""
    areas, labels = _areas_um2(mask, mpp)
    large = areas >= area_um2
    large[0] = False
    kept: Mask = large[labels]
    return kept
