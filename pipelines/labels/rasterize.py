"""Drawn areas turned into class ids, pixel by pixel: a pixel has the class of its centre.

Takes a ``Drawing`` and the ``PixelGrid`` of a tile, writes uint8 (h, w). Scan-line filling (Foley et al., Computer
Graphics, section 3.6) over all polygons of the tile at once: where each row of pixel centres crosses the edges is
computed in numpy, and only the spans between crossings are visited. The left border belongs to a polygon, the right
one does not, so neighbours with a common edge leave no gap and no overlap.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.labels.drawing import Drawing
from pipelines.slides.geometry import Region, plan_read
from pipelines.slides.slide import Slide

NARROW_PX = 100
"""Below this many pixels per span, as in a tile full of nuclei, writing pixel by pixel beats a slice per span."""

CROSSINGS = 1 << 26
"""Of edges and rows of one tile at most: no drawing of tissue has a hundredth of it."""

SPANS_AT_ONCE = 1 << 16


@dataclass(frozen=True, slots=True)
class PixelGrid:
    """Where the pixels that ``slide.read(region)`` gives lie on level 0.

    Attributes:
        l0_x, l0_y: top left corner of the first pixel. Not the region's own origin where the level's px are coarser.
        l0_step_x, l0_step_y: from one pixel to the next.
        width, height: number of pixels.
    """

    l0_x: float
    l0_y: float
    l0_step_x: float
    l0_step_y: float
    width: int
    height: int

    @classmethod
    def of(cls, slide: Slide, region: Region) -> PixelGrid:
        """Raises ValueError where the slide has no level fine enough for ``region.mpp``."""
        plan = plan_read(slide.levels, region)
        downsample = slide.levels[plan.level].downsample
        return cls(
            plan.l_x * downsample,
            plan.l_y * downsample,
            plan.l_width / plan.out.width * downsample,
            plan.l_height / plan.out.height * downsample,
            plan.out.width,
            plan.out.height,
        )

    def centres_x(self) -> NDArray[np.float64]:
        """float64 (width,), level-0 px."""
        return self.l0_x + (np.arange(self.width, dtype=np.float64) + 0.5) * self.l0_step_x

    def centres_y(self) -> NDArray[np.float64]:
        """float64 (height,), level-0 px."""
        return self.l0_y + (np.arange(self.height, dtype=np.float64) + 0.5) * self.l0_step_y


def paint(
    drawing: Drawing, ids: NDArray[np.uint8], grid: PixelGrid, l0_shift: tuple[int, int], out: NDArray[np.uint8]
) -> None:
    """Paint the polygons that meet the grid into ``out``, later ones over earlier ones; other pixels stay.

    Args:
        drawing: polygons.
        ids: uint8 (len(drawing.classes),), what to write for each class.
        grid: pixels of ``out``.
        l0_shift: (x, y) to add to the drawing's coordinates: the corner of the slide's bounds.
        out: uint8 (grid.height, grid.width).

    Raises:
        ValueError: so many edges cross the tile that they would fill the memory.
    """
    height, width = out.shape
    # t_: tile px, measured from the centre of the first pixel, so that centres are whole numbers
    t_scale = np.array([grid.l0_step_x, grid.l0_step_y])
    l0_origin = np.array([grid.l0_x - l0_shift[0], grid.l0_y - l0_shift[1]])
    l0_end = l0_origin + np.array([width + 1, height + 1]) * t_scale
    edges = drawing.bands.within(float(l0_origin[1] - t_scale[1]), float(l0_end[1]))
    polygon = drawing.edge_polygon[edges].astype(np.int64)
    beside = (drawing.box[polygon, 0] <= l0_end[0]) & (drawing.box[polygon, 2] >= l0_origin[0] - t_scale[0])
    edges, polygon = edges[beside], polygon[beside]

    t_start_y = (drawing.start[edges, 1] - l0_origin[1]) / t_scale[1] - 0.5
    t_end_y = (drawing.end[edges, 1] - l0_origin[1]) / t_scale[1] - 0.5
    row = np.ceil(np.clip(np.minimum(t_start_y, t_end_y), 0, height)).astype(np.int64)
    rows = np.ceil(np.clip(np.maximum(t_start_y, t_end_y), 0, height)).astype(np.int64) - row
    if rows.sum() > CROSSINGS:
        raise ValueError(f"{rows.sum()} crossings of edges with the rows of one tile, above {CROSSINGS}")
    crossing = np.flatnonzero(rows)
    edges, row, rows = edges[crossing], row[crossing], rows[crossing]
    polygon = polygon[crossing]

    # Every edge is taken downwards: both neighbours of a common edge then compute the same crossings, bit for bit.
    upwards = (t_start_y > t_end_y)[crossing, None]
    t_top = (np.where(upwards, drawing.end[edges], drawing.start[edges]) - l0_origin) / t_scale - 0.5
    t_low = (np.where(upwards, drawing.start[edges], drawing.end[edges]) - l0_origin) / t_scale - 0.5
    slope = (t_low[:, 0] - t_top[:, 0]) / (t_low[:, 1] - t_top[:, 1])
    edge = np.repeat(np.arange(len(rows)), rows)
    t_row = _ranges(row, rows)
    t_x = t_top[edge, 0] + (t_row - t_top[edge, 1]) * slope[edge]
    column = np.ceil(np.clip(t_x, 0, width)).astype(np.int64)
    # Rings are closed, so each row of a polygon has an even number of crossings: sorted, they pair up into spans.
    order = np.sort((polygon[edge] * height + t_row) * (width + 1) + column).reshape(-1, 2)
    line, span = order[:, 0] // (width + 1), order % (width + 1)
    filled = span[:, 0] < span[:, 1]
    _fill(line[filled], span[filled], ids[drawing.polygon_class], out)


def _fill(line: NDArray[np.int64], span: NDArray[np.int64], ids: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Write spans in order; ``line`` is polygon x height + row. Equal spans on successive lines make one box."""
    if not len(line):
        return
    height = len(out)
    new = np.ones(len(line), bool)
    new[1:] = (np.diff(line) != 1) | (np.diff(span, axis=0) != 0).any(axis=1) | (line[1:] % height == 0)
    first = np.flatnonzero(new)
    polygon, row = np.divmod(line, height)
    if (span[:, 1] - span[:, 0]).sum() < NARROW_PX * len(first):
        for start in range(0, len(line), SPANS_AT_ONCE):  # numpy writes repeated indices in order: later ones stay
            chunk = slice(start, start + SPANS_AT_ONCE)
            widths = span[chunk, 1] - span[chunk, 0]
            out[np.repeat(row[chunk], widths), _ranges(span[chunk, 0], widths)] = np.repeat(ids[polygon[chunk]], widths)
    else:
        rows = np.diff(np.append(first, len(line)))
        boxes = np.column_stack([row[first], row[first] + rows, span[first], ids[polygon[first]]]).tolist()
        for top, bottom, left, right, value in boxes:
            out[top:bottom, left:right] = value


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0], first[0] + 1, ... (count[0] of them), first[1], ...: one array."""
    ends = np.cumsum(count)
    every: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    every += np.repeat(first - (ends - count), count)
    return every
