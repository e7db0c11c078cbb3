"""Drawn areas turned into class ids, pixel by pixel: a pixel has the class of its centre.

Takes a ``Drawing`` and the ``PixelGrid`` of a tile, writes uint8 (h, w). Scan-line filling (Foley et al., Computer
Graphics, section 3.6) over all polygons of the tile at once: where each row of pixel centres crosses the edges is
computed in numpy, and only the spans between crossings are visited. The left border belongs to a polygon, the right
one does not, so neighbours with a common edge leave no gap and no overlap.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipelines.labels.drawing import Drawing
from pipelines.labels.edge_index import ranges
from pipelines.slides.geometry import Region, plan_read
from pipelines.slides.slide import Slide
from pipelines.slides.tile_box import TileBox

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
    """Where the pixels that ``slide.read(region)`` gives lie on level 0.

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
        box = box or TileBox.whole(plan.out.height, plan.out.width)
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
    top, left = grid.first_y, grid.first_x
    # t_: tile px, measured from the centre of its first pixel, so that centres are whole numbers
    t_scale = np.array([grid.l0_step_x, grid.l0_step_y])
    l0_origin = np.array([grid.l0_x - l0_shift[0], grid.l0_y - l0_shift[1]])
    l0_start = l0_origin + np.array([left - 1, top - 1]) * t_scale
    l0_end = l0_origin + np.array([left + width + 1, top + height + 1]) * t_scale
    edges = drawing.index.within(*l0_start.tolist(), *l0_end.tolist())
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
    edges, row, rows = edges[crossing], row[crossing], rows[crossing]
    t_start_y, t_end_y = t_start_y[crossing], t_end_y[crossing]
    t_start_x = (drawing.start[edges, 0] - l0_origin[0]) / t_scale[0] - 0.5
    t_end_x = (drawing.end[edges, 0] - l0_origin[0]) / t_scale[0] - 0.5
    polygon = drawing.index.edge_polygon[edges].astype(np.int64)

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
