"""Overlay pictures of indexed slides: the slide, small, with its tissue, its tiles and a caption."""

from __future__ import annotations

import math
from dataclasses import replace

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import Pixels, Slide
from pipelines.tiles.tissue import Overview, TissueMask, is_fluorescence, read_overview

LONGER_SIDE_PX, CAPTION_PX = 1600, 44
TISSUE_RGB, INK_RGB = (0, 170, 60), (30, 30, 30)
ON_GLASS, ON_DARK = ((0, 110, 255), 0.3), ((255, 190, 0), 0.12)
"""Colour of tiles, and opacity of one that is all tissue: the tissue must stay visible below."""


def read_thumbnail(slide: Slide, overview: Overview, threads: int) -> Overview:
    """Return a picture whose longer side is at most ``LONGER_SIDE_PX``, and at least half of it if the slide allows."""
    longer = max(overview.pixels.shape[:2])
    if longer < LONGER_SIDE_PX / 2 and overview.mpp > slide.mpp:
        overview = read_overview(slide, overview.mpp * longer / LONGER_SIDE_PX, threads)
        longer = max(overview.pixels.shape[:2])
    factor = max(1.0, longer / LONGER_SIDE_PX)
    height, width = (max(1, round(side / factor)) for side in overview.pixels.shape[:2])
    return replace(
        overview,
        pixels=cv2.resize(overview.pixels, (width, height), interpolation=cv2.INTER_AREA).astype(np.uint8),
        downsample=overview.downsample * factor,
        mpp=overview.mpp * factor,
        unreadable=np.zeros((height, width), np.bool_),
    )


def draw_overlay(
    thumbnail: Overview,
    tissue: TissueMask,
    l0_x: NDArray[np.int64],
    l0_y: NDArray[np.int64],
    fractions: NDArray[np.float32],
    l0_size: tuple[int, int],
    caption: str,
) -> bytes:
    """Return a PNG of the slide with its tissue and tiles."""
    picture, downsample = thumbnail.pixels.copy(), thumbnail.downsample
    height, width = picture.shape[:2]
    edges = l0_x, l0_y, l0_x + l0_size[0], l0_y + l0_size[1]
    left, top, right, bottom = (
        np.rint((edge - start) / downsample).astype(int)
        for edge, start in zip(edges, 2 * (thumbnail.l0_x, thumbnail.l0_y), strict=True)
    )
    colour, opacity = ON_DARK if is_fluorescence(picture) else ON_GLASS
    mixing = np.zeros((height, width), np.float32)
    for x0, y0, x1, y1, strength in zip(left, top, right, bottom, opacity * fractions, strict=True):
        area = mixing[y0:y1, x0:x1]
        np.maximum(area, strength, out=area)  # where tiles overlap the strongest counts
    mixed = picture + mixing[..., None] * (np.array(colour, np.float32) - picture)
    picture[...] = np.rint(mixed, out=mixed)
    outline = cv2.resize(tissue.mask.view(np.uint8), (width, height), interpolation=cv2.INTER_NEAREST)
    contours, _ = cv2.findContours(outline, cv2.RETR_CCOMP, cv2.CHAIN_APPROX_SIMPLE)
    line = max(1, round(max(width, height) / 800))
    cv2.drawContours(picture, contours, -1, TISSUE_RGB, line, cv2.LINE_AA)
    if len(left) and (right - left).min() >= 6:  # smaller ones would be all outline
        for x0, y0, x1, y1 in zip(left.tolist(), top.tolist(), right.tolist(), bottom.tolist(), strict=True):
            cv2.rectangle(picture, (x0, y0), (x1 - 1, y1 - 1), colour, line)
    framed = np.concatenate([picture, caption_strip(width, caption, thumbnail.mpp)])
    done, png = cv2.imencode(".png", cv2.cvtColor(framed, cv2.COLOR_RGB2BGR))
    assert done
    return png.tobytes()


def caption_strip(width: int, text: str, mpp: float) -> Pixels:
    """A white strip of ``width`` px with a scale bar and, as far as there is room, the text."""
    strip = np.full((CAPTION_PX, width, 3), 255, np.uint8)
    bar_um = 10 ** math.floor(math.log10(max(width * mpp / 4, 1)))
    bar_um *= next(step for step in (5, 2, 1) if step * bar_um <= max(width * mpp / 4, 1) or step == 1)
    bar_px = max(1, min(width - 20, round(bar_um / mpp)))
    cv2.line(strip, (10, 28), (10 + bar_px, 28), INK_RGB, 3)
    label = f"{bar_um / 1000:g} mm" if bar_um >= 1000 else f"{bar_um:g} um"
    font, size = cv2.FONT_HERSHEY_SIMPLEX, 0.5
    cv2.putText(strip, label, (10, 20), font, size, INK_RGB, 1, cv2.LINE_AA)
    start = 30 + max(bar_px, cv2.getTextSize(label, font, size, 1)[0][0])
    room = width - start - 10
    needed = cv2.getTextSize(text, font, size, 1)[0][0]
    if needed > 0 and room > 0:
        fitted = min(size, size * room / needed)
        cv2.putText(strip, text, (start, 28), font, fitted, INK_RGB, 1, cv2.LINE_AA)
    return strip
