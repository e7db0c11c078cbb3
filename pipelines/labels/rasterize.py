"""Class ids of pixels from drawn areas, and the place of a mask on its slide. A pixel has the class of its centre.

Scan-line filling (Foley et al., Computer Graphics, section 3.6) of all polygons of a tile: numpy finds where
rows of pixel centres cross the edges, and only the spans between crossings are written. The left border belongs to a
polygon, the right one does not: neighbours with a common edge leave no gap and no overlap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipelines.backends.dicom_elements import is_dicom
from pipelines.backends.dicom_head import Placement, placement_of
from pipelines.backends.mask import Mask
from pipelines.backends.mask_seg import SegMask
from pipelines.labels.drawing import PolygonSet, ranges
from pipelines.slides.geometry import NATIVE_TOLERANCE, Bounds, Region, TileBox, plan_read
from pipelines.slides.slide import Slide, SlideError

NARROW_PX = 100
"""Below this many pixels per span, as in a tile full of nuclei, writing pixel by pixel beats a slice per span."""

CROSSINGS, CROSSINGS_PER_PX = 1 << 20, 4
"""Crossings of edges with rows that one tile may have: so many, or so many for each of its pixels. Tiles full of nuclei
have one for five pixels."""

CROSSINGS_AT_ONCE = 1 << 22
"""A tile with more is painted in two halves, which bounds the memory: about 50 bytes for each crossing."""

SPANS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class PixelGrid:
    """Place on level 0 of the pixels of ``slide.read(region)``.

    Attributes:
        l0_x, l0_y: top left corner of the first pixel. Not the region's own origin where the level's px are coarser.
        l0_step_x, l0_step_y: from one pixel to the next.
        width, height: number of pixels.
        first_x, first_y: number of the first pixel, where l0_x and l0_y are the corner of a larger grid's: its own
            pixels have the same centres as in that, bit for bit.
    """

    l0_x: float
    l0_y: float
    l0_step_x: float
    l0_step_y: float
    width: int
    height: int
    first_x: int = 0
    first_y: int = 0

    @classmethod
    def of(cls, slide: Slide, region: Region, box: TileBox | None = None) -> PixelGrid:
        """Return the grid of ``region``, or of ``box`` of it.

        Raises:
            ValueError: the slide has no level fine enough for ``region.mpp``.
        """
        plan = plan_read(slide.levels, region)
        downsample = slide.levels[plan.level].downsample
        box = box or TileBox.full(plan.out.height, plan.out.width)
        return cls(
            plan.l_x * downsample,
            plan.l_y * downsample,
            plan.l_width / plan.out.width * downsample,
            plan.l_height / plan.out.height * downsample,
            box.width,
            box.height,
            box.column_start,
            box.row_start,
        )

    def centres_x(self) -> NDArray[np.float64]:
        """float64 (width,), level-0 px."""
        return self.l0_x + (np.arange(self.first_x, self.first_x + self.width, dtype=np.float64) + 0.5) * self.l0_step_x

    def centres_y(self) -> NDArray[np.float64]:
        """float64 (height,), level-0 px."""
        return (
            self.l0_y + (np.arange(self.first_y, self.first_y + self.height, dtype=np.float64) + 0.5) * self.l0_step_y
        )


def paint(
    drawing: PolygonSet, ids: NDArray[np.uint8], grid: PixelGrid, l0_shift: tuple[int, int], out: NDArray[np.uint8]
) -> None:
    """Paint the polygons that meet the grid into ``out``, later ones over earlier ones; other pixels stay.

    Args:
        ids: uint8 (len(drawing.classes),), what to write for each class.
        grid: pixels of ``out``.
        l0_shift: (x, y) to add to the drawing's coordinates: the corner of the slide's bounds.
        out: uint8 (grid.height, grid.width).

    Raises:
        ValueError: so many edges cross the tile that they would fill the memory.
    """
    height, width = out.shape
    top, left = grid.first_y, grid.first_x
    # t_: tile px, measured from the centre of its first pixel, so that centres are whole numbers
    t_scale = np.array([grid.l0_step_x, grid.l0_step_y])
    l0_origin = np.array([grid.l0_x - l0_shift[0], grid.l0_y - l0_shift[1]])
    l0_start = l0_origin + np.array([left - 1, top - 1]) * t_scale
    l0_end = l0_origin + np.array([left + width + 1, top + height + 1]) * t_scale
    edges, polygon = drawing.edges_near(*l0_start.tolist(), *l0_end.tolist())
    if not len(edges):
        return
    t_start_y = (drawing.start[edges, 1] - l0_origin[1]) / t_scale[1] - 0.5
    t_end_y = (drawing.end[edges, 1] - l0_origin[1]) / t_scale[1] - 0.5
    row = np.ceil(np.clip(np.minimum(t_start_y, t_end_y), top, top + height)).astype(np.int64)
    rows = np.ceil(np.clip(np.maximum(t_start_y, t_end_y), top, top + height)).astype(np.int64) - row
    most = max(CROSSINGS, CROSSINGS_PER_PX * out.size)
    if rows.sum() > most:
        raise ValueError(
            f"{rows.sum()} crossings of edges with the rows of one tile of {width} x {height} px, above {most}: a "
            "polygon crosses itself thousands of times"
        )
    if rows.sum() > CROSSINGS_AT_ONCE and height > 1:
        half = height // 2
        paint(drawing, ids, dataclasses.replace(grid, height=half), l0_shift, out[:half])
        lower = dataclasses.replace(grid, height=height - half, first_y=top + half)
        paint(drawing, ids, lower, l0_shift, out[half:])
        return
    crossing = np.flatnonzero(rows)
    edges, polygon, row, rows = edges[crossing], polygon[crossing], row[crossing], rows[crossing]
    t_start_y, t_end_y = t_start_y[crossing], t_end_y[crossing]
    t_start_x = (drawing.start[edges, 0] - l0_origin[0]) / t_scale[0] - 0.5
    t_end_x = (drawing.end[edges, 0] - l0_origin[0]) / t_scale[0] - 0.5

    # Every edge is taken downwards: both neighbours of a common edge then compute the same crossings, bit for bit.
    upwards = t_start_y > t_end_y
    t_top_x, t_top_y = np.where(upwards, t_end_x, t_start_x), np.minimum(t_start_y, t_end_y)
    slope = (t_end_x - t_start_x) / (t_end_y - t_start_y)  # the same either way: both signs change
    edge = np.repeat(np.arange(len(rows)), rows)
    t_row = ranges(row, rows)
    t_x = t_top_x[edge] + (t_row - t_top_y[edge]) * slope[edge]
    column = np.ceil(np.clip(t_x, left, left + width)).astype(np.int64) - left
    # Rings are closed, so each row of a polygon has an even number of crossings: sorted, they pair up into spans.
    order = np.sort((polygon[edge] * height + t_row - top) * (width + 1) + column).reshape(-1, 2)
    line, span = order[:, 0] // (width + 1), order % (width + 1)
    filled = span[:, 0] < span[:, 1]
    line = line[filled]
    _fill(line, span[filled], ids[drawing.polygon_class[line // height]], out)


def _fill(line: NDArray[np.int64], span: NDArray[np.int64], value: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write spans in order; ``line`` is polygon x height + row. Equal spans on successive lines make one box."""
    if not len(line):
        return
    height = len(out)
    row, widths = line % height, span[:, 1] - span[:, 0]
    new = np.ones(len(line), bool)
    new[1:] = (np.diff(line) != 1) | (np.diff(span, axis=0) != 0).any(axis=1) | (row[1:] == 0)
    first = np.flatnonzero(new)
    if widths.sum() < NARROW_PX * len(first):
        for start in range(0, len(line), SPANS_AT_ONCE):  # numpy writes repeated indices in order: later ones stay
            chunk = slice(start, start + SPANS_AT_ONCE)
            columns = ranges(span[chunk, 0], widths[chunk])
            out[np.repeat(row[chunk], widths[chunk]), columns] = np.repeat(value[chunk], widths[chunk])
    else:
        rows = np.diff(np.append(first, len(line)))
        boxes = np.column_stack([row[first], row[first] + rows, span[first], value[first]]).tolist()
        for top, bottom, left, right, class_id in boxes:
            out[top:bottom, left:right] = class_id


COSINE_TOLERANCE = 1e-3
"""Of directions on the glass: 0.06 degrees, 50 px at the end of 50,000."""


def mask_box(mask: Mask, slide: Slide) -> Bounds:
    """Return the part of level 0 that a mask covers: all of it, or the bounds where only these have its proportions.

    Raises:
        SlideError: neither has; or a DICOM Segmentation is of another size in um than these, or lies elsewhere.
    """
    level, bounds = slide.levels[0], slide.bounds
    boxes = [box for box in (Bounds(0, 0, level.width, level.height), bounds) if _proportioned(mask, box)]
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


def _proportioned(mask: Mask, box: Bounds) -> bool:
    # a reduced mask is rounded to whole pixels, up or down
    proportion = box.width / box.height
    return abs(proportion * mask.height - mask.width) <= 1 + proportion + 0.005 * mask.width


def _as_large(mask: Mask, mpp: tuple[float, float], box: Bounds, slide_mpp: float) -> bool:
    sides = ((mask.width, mpp[0], box.width), (mask.height, mpp[1], box.height))
    return all(
        abs(px * um - box_px * slide_mpp) <= NATIVE_TOLERANCE * box_px * slide_mpp + um for px, um, box_px in sides
    )


def _elsewhere(mask: SegMask, slide: Path) -> str:
    """Difference of the places on the glass; empty where they do not, or one of the files does not say."""
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
