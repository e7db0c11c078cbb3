"""Where a mask lies on its slide: on the whole of level 0, or on its bounds.

Takes a mask and the slide, gives a box of level 0. Pictures have nothing but their proportions to tell it from; a DICOM
Segmentation says how large its pixels are, and where on the glass they lie, which must be where those of the slide do.
"""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.dicom_elements import is_dicom
from pipelines.backends.mask import Mask
from pipelines.backends.mask_seg import SegMask
from pipelines.backends.segmentation_head import Placement, placement_of
from pipelines.labels.rasterize import PixelGrid
from pipelines.slides.geometry import NATIVE_TOLERANCE, Bounds
from pipelines.slides.slide import Slide, SlideError

COSINE_TOLERANCE = 1e-3
"""Of directions on the glass: 0.06 degrees, 50 px at the end of 50,000."""


def mask_box(mask: Mask, slide: Slide) -> Bounds:
    """Return the part of level 0 that a mask covers: all of it, or the bounds where only these have its proportions.

    Raises:
        SlideError: neither has; or a DICOM Segmentation is of another size in um than these, or lies elsewhere.
    """
    level, bounds = slide.levels[0], slide.bounds
    boxes = [
        box for box in (Bounds(0, 0, level.width, level.height), bounds) if _proportioned(mask, box.width, box.height)
    ]
    if not boxes:
        raise SlideError(
            f"mask {mask.path} must have the proportions of its slide; it is {mask.width} x {mask.height} px, "
            f"{slide.path.name} is {level.width} x {level.height} px. Is it the mask of another slide, or of a part of "
            "it?"
        )
    if not isinstance(mask, SegMask):
        return boxes[0]
    mpp = mask.header.mpp
    if mpp is not None:
        large = [box for box in boxes if _as_large(mask, mpp, box, slide.mpp)]
        if not large:
            raise SlideError(
                f"mask {mask.path} must be as large as its slide; {mask.width} x {mask.height} px of {mpp[0]:.4g} x "
                f"{mpp[1]:.4g} um (PixelSpacing) are {mask.width * mpp[0]:.0f} x {mask.height * mpp[1]:.0f} um, "
                f"{slide.path.name} is {level.width * slide.mpp:.0f} x {level.height * slide.mpp:.0f} um. Is it of a "
                "part of the slide? If not, give the slide its um/px (--slide-mpp, or column mpp)"
            )
        boxes = large
    if fault := _elsewhere(mask, slide.path):
        raise SlideError(
            f"mask {mask.path} must lie on the glass where its slide does; {fault}. Write it anew on the whole matrix "
            f"of {slide.path.name}, or, if you know that the pixels fit, as a mask TIFF"
        )
    return boxes[0]


def mask_pixels(mask: Mask, slide: Slide, grid: PixelGrid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return column and row of the mask under each column and row of the grid; they may lie outside the mask."""
    box = mask_box(mask, slide)
    columns = np.floor((grid.centres_x() - box.l0_x) * (mask.width / box.width))
    rows = np.floor((grid.centres_y() - box.l0_y) * (mask.height / box.height))
    return columns.astype(np.int64), rows.astype(np.int64)


def _proportioned(mask: Mask, width: int, height: int) -> bool:
    # a reduced mask is rounded to whole pixels, up or down
    proportion = width / height
    return abs(proportion * mask.height - mask.width) <= 1 + proportion + 0.005 * mask.width


def _as_large(mask: Mask, mpp: tuple[float, float], box: Bounds, slide_mpp: float) -> bool:
    sides = ((mask.width, mpp[0], box.width), (mask.height, mpp[1], box.height))
    return all(
        abs(px * um - box_px * slide_mpp) <= NATIVE_TOLERANCE * box_px * slide_mpp + um for px, um, box_px in sides
    )


def _elsewhere(mask: SegMask, slide: Path) -> str:
    """In what the places on the glass differ; empty where they do not, or one of the files does not say."""
    if not slide.is_file():
        return ""
    theirs, ours = _of_slide(slide, slide.stat().st_mtime_ns), mask.header.placement
    if theirs is None:
        return ""
    if ours.frame_of_reference != theirs.frame_of_reference and ours.frame_of_reference and theirs.frame_of_reference:
        return f"FrameOfReferenceUID is {ours.frame_of_reference}, the slide's {theirs.frame_of_reference}"
    if ours.orientation and theirs.orientation and not _alike(ours.orientation, theirs.orientation, COSINE_TOLERANCE):
        return f"ImageOrientationSlide is {ours.orientation}, the slide's {theirs.orientation}"
    mm = max(mask.header.mpp or (0.0,)) / 1000
    if ours.origin_mm and theirs.origin_mm and mm and not _alike(ours.origin_mm, theirs.origin_mm, mm):
        return f"TotalPixelMatrixOrigin is {ours.origin_mm} mm, the slide's {theirs.origin_mm} mm, beyond one px"
    return ""


@lru_cache(maxsize=256)
def _of_slide(path: Path, changed_ns: int) -> Placement | None:
    """Place of a DICOM slide, None of any other; read once, as this is asked for every tile."""
    return placement_of(path) if is_dicom(path) else None


def _alike(ours: tuple[float, ...], theirs: tuple[float, ...], tolerance: float) -> bool:
    return len(ours) == len(theirs) and all(abs(a - b) <= tolerance for a, b in zip(ours, theirs, strict=True))
