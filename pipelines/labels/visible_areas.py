"""Areas of a drawing that cannot be learned from: off the slide, or completely painted over by later areas.

Takes a ``Drawing``; gives the area of each polygon within a rectangle, and which polygons are covered by later polygons
of other classes. Both are computed from the coordinates; no pixel is painted.
"""

from __future__ import annotations

import numpy as np
import shapely
from numpy.typing import NDArray

from pipelines.labels.drawing import Drawing, valid_area

MOST_PAIRS = 1 << 22
"""Of a polygon and a box around its first corner: beyond, cover is not computed. Drawings of tissue have fewer."""

POLYGONS_AT_ONCE = 256


def areas_within(drawing: Drawing, left: float, top: float, right: float, bottom: float) -> NDArray[np.float64]:
    """Return the area of each polygon, holes left out, within a rectangle in the drawing's coordinates."""
    (x0, y0), (x1, y1) = drawing.start.T, drawing.end.T
    # By Green's theorem: the integral of x over dy along the ring, with x and y kept within the rectangle.
    with np.errstate(divide="ignore", invalid="ignore"):
        from_t, to_t = ((np.clip(y, top, bottom) - y0) / (y1 - y0) for y in (y0, y1))
        ax, bx = x0 + from_t * (x1 - x0), x0 + to_t * (x1 - x0)
        dx = bx - ax
        steep = np.abs(dx) < 1e-3
        mean_x = np.where(
            steep, np.clip((ax + bx) / 2, left, right), (_below(bx, left, right) - _below(ax, left, right)) / dx
        )
    dy = np.clip(y1, top, bottom) - np.clip(y0, top, bottom)
    part = np.where(dy == 0, 0.0, (mean_x - left) * dy)
    if not len(part):
        return np.zeros(0)
    rings = np.abs(np.add.reduceat(part, drawing.ring_start[:-1]))
    outer = np.searchsorted(drawing.ring_start, drawing.first_edge[:-1])
    total = np.add.reduceat(rings, outer)
    areas: NDArray[np.float64] = np.maximum(2 * rings[outer] - total, 0.0)  # outer ring less its holes
    return areas


def _below(x: NDArray[np.float64], left: float, right: float) -> NDArray[np.float64]:
    """Integral, from ``left`` to ``x``, of x kept within ``left`` and ``right``."""
    within = np.clip(x, left, right)
    integral: NDArray[np.float64] = (
        (within**2 - left**2) / 2 + left * np.minimum(x - left, 0) + right * np.maximum(x - right, 0)
    )
    return integral


def painted_over(drawing: Drawing, group: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Return which polygons are completely covered by later polygons of other groups.

    Args:
        group: int32 (polygons,): what each polygon is painted as.
    """
    count = len(group)
    hidden = np.zeros(count, bool)
    if count < 2 or (group == group[0]).all():
        return hidden
    boxes = np.asarray(shapely.box(*drawing.box.T))
    corner = np.asarray(shapely.points(drawing.start[drawing.first_edge[:-1]]))
    corners = shapely.STRtree(corner)
    pairs: list[NDArray[np.int64]] = []
    found = 0
    for first in range(0, count, POLYGONS_AT_ONCE):
        later, earlier = corners.query(boxes[first : first + POLYGONS_AT_ONCE])
        found += len(later)
        if found > MOST_PAIRS + count:
            return hidden
        later = later + first
        kept = (earlier < later) & (group[earlier] != group[later])
        pairs.append(np.column_stack([earlier[kept], later[kept]]))
    earlier, later = np.concatenate(pairs).T
    polygons = np.full(count, None, object)
    _fill(polygons, drawing, later)
    shapely.prepare(polygons[np.unique(later)])
    within = shapely.intersects(polygons[later], corner[earlier])
    earlier, later = earlier[within], later[within]
    if not len(earlier):
        return hidden
    _fill(polygons, drawing, earlier)
    hidden[earlier[shapely.covers(polygons[later], polygons[earlier])]] = True
    tree = shapely.STRtree(boxes)
    for number in np.unique(earlier[~hidden[earlier]]).tolist():  # perhaps covered by several together
        near = tree.query(boxes[number])
        near = near[(near > number) & (group[near] != group[number])]
        _fill(polygons, drawing, near)
        rest = shapely.difference(polygons[number], shapely.union_all(polygons[near]))
        hidden[number] = rest.area == 0 < polygons[number].area
    return hidden


def _fill(polygons: NDArray[np.object_], drawing: Drawing, numbers: NDArray[np.int64]) -> None:
    """Make those of ``polygons`` that are asked for and None; one that crosses itself too often is empty: it covers
    nothing, and nothing covers it."""
    for number in np.unique(numbers).tolist():
        if polygons[number] is None:
            outer, *holes = drawing.rings(number)
            try:
                polygons[number] = valid_area(shapely.Polygon(outer, holes))
            except ValueError:
                polygons[number] = shapely.Polygon()
