"""Areas of rings that cross themselves, by the two rules that there are, as areas whose rings do not.

Takes rings, gives polygons. By the rule of ASAP's masks, non-zero winding, a ring holds all that it goes around however
often; by that of a drawing, even-odd, what it goes around twice is a hole. Of rings that are simple both say the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import shapely

from pipelines.labels.drawing import FARTHEST_PX

Point = tuple[float, float]

MOST_CROSSINGS, NEAR_EDGES = 1 << 20, 16
"""A polygon may have so many pairs of edges whose boxes meet, and as many more for each of its edges. Outlines drawn by
hand have a few for each edge; area and time grow with the crossings, which may be the square of the edges."""


def wound_areas(rings: Sequence[Sequence[Point]]) -> list[list[Any]]:
    """Return the polygons of each ring, as lists of rings, the outer one first: itself where it is simple, no polygon
    where it encloses nothing. Coordinates that no slide has stay as they are.

    Args:
        rings: of three points at least.
    """
    if not rings:
        return []
    lengths = np.array([len(ring) + 1 for ring in rings])
    closed = np.array([point for ring in rings for point in (*ring, ring[0])], np.float64)
    if not (np.abs(closed) <= FARTHEST_PX).all():
        return [[[ring]] for ring in rings]
    lines = shapely.linearrings(closed, indices=np.repeat(np.arange(len(rings)), lengths))
    ends = np.cumsum(lengths)
    areas: list[list[Any]] = [[[ring]] for ring in rings]
    for k in np.flatnonzero(~shapely.is_simple(lines)).tolist():
        ring = shapely.Polygon(closed[ends[k] - lengths[k] : ends[k]])
        areas[k] = _polygons(valid_area(ring, method="structure", keep_collapsed=False))  # keeps all lobes
    return areas


def valid_area(polygon: shapely.Polygon, **how: Any) -> shapely.Geometry:
    """Return the area of a polygon that may cross itself, by the even-odd rule unless ``how``, the arguments of
    ``shapely.make_valid``, says otherwise.

    Raises:
        ValueError: it crosses itself so often that the area would take gigabytes.
    """
    if polygon.is_valid:
        return polygon
    lines = shapely.get_coordinates(polygon)
    corners = np.minimum(lines[:-1], lines[1:]), np.maximum(lines[:-1], lines[1:])
    boxes = np.asarray(shapely.box(*corners[0].T, *corners[1].T))
    tree, most = shapely.STRtree(boxes), MOST_CROSSINGS + NEAR_EDGES * len(boxes)
    found = first = 0
    while first < len(boxes):
        some = max(1, most // len(boxes) // 8)  # as many as a few of them may cross at most
        found += len(tree.query(boxes[first : first + some])[0])
        first += some
        if found > most:
            raise ValueError(
                f"a polygon of {len(lines)} points crosses itself more than {most} times; draw it again, or simplify it"
            )
    area: shapely.Geometry = shapely.make_valid(polygon, **how)
    return area


def even_odd_areas(rings: Sequence[Any]) -> list[list[Any]]:
    """Return the polygons of the rings of one polygon of a drawing; itself where no ring crosses itself or another."""
    polygon = shapely.Polygon(rings[0], rings[1:])
    return [list(rings)] if polygon.is_valid else _polygons(valid_area(polygon))


def _polygons(area: shapely.Geometry) -> list[list[Any]]:
    parts = [part for part in shapely.get_parts(area) if isinstance(part, shapely.Polygon) and not part.is_empty]
    return [[np.asarray(edge.coords)[:-1] for edge in (part.exterior, *part.interiors)] for part in parts]
