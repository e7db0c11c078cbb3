"""Areas drawn on a slide, whatever the file format; areas of rings that cross themselves, or that are painted over.

A ``PolygonSet`` has the edges of all polygons in flat arrays, in painting order, and a tree that finds those near a
tile. By non-zero winding, the rule of ASAP's masks, a ring holds all that it goes around; by even-odd, the rule of a
``PolygonSet``, what it goes around twice is a hole. Of simple rings both say the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import Any

import numpy as np
import shapely
from numpy.typing import NDArray

from pipelines.slides.slide import printable

Point = tuple[float, float]

UNNAMED_CLASS = "foreground"
"""Class of an area that has neither a classification nor a name."""

BACKGROUND = "background"

FARTHEST_PX = 1e9
"""A coordinate beyond is no pixel of any slide."""

RUN_EDGES = 64
"""Consecutive edges of a polygon that are found together."""

RUN_BYTES = 256
"""Estimated memory of a run in the tree."""

MOST_CROSSINGS, NEAR_EDGES = 1 << 20, 16
"""A polygon may have so many pairs of edges whose boxes meet, and as many more for each of its edges. Outlines drawn by
hand have a few for each edge; area and time grow with the crossings, which may be the square of the edges."""


class Origin(Enum):
    """Corner of level 0 that a file's coordinates count from."""

    BOUNDS = "bounds"
    """Corner of what was scanned (OpenSlide's ``openslide.bounds-*``), as in QuPath."""
    LEVEL0 = "level 0"
    """Corner of level 0, as in ASAP and ImageScope."""


@dataclass(frozen=True)
class PolygonSet:
    """Polygons in the order they are painted.

    A polygon's edges are those of its outer ring and of its holes; a point is inside where a ray from it crosses an odd
    number of them. The parts of a multipolygon are polygons of their own, so that parts that overlap do not cancel out.

    Attributes:
        start, end: float64 (edges, 2), (x, y) of each edge in level-0 px from ``origin``.
        first_edge: int64 (polygons + 1,): polygon i has edges first_edge[i]..first_edge[i + 1].
        ring_start: int64 (rings + 1,): ring r has edges ring_start[r]..ring_start[r + 1].
        box: float64 (polygons, 4): left, top, right, bottom.
        polygon_class: int32 (polygons,) index into ``classes``.
        classes: names in the order of their first polygon.
        left_out: number of drawn objects that are not used, by kind: points, lines.
        origin: what the coordinates count from.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    first_edge: NDArray[np.int64]
    ring_start: NDArray[np.int64]
    box: NDArray[np.float64]
    polygon_class: NDArray[np.int32]
    classes: tuple[str, ...]
    left_out: Mapping[str, int]
    origin: Origin

    @property
    def nbytes(self) -> int:
        arrays = (self.start, self.end, self.box, self.ring_start)
        return sum(array.nbytes for array in arrays) + RUN_BYTES * len(self._runs[2])

    @cached_property
    def _runs(self) -> tuple[NDArray[np.int64], NDArray[np.int64], shapely.STRtree]:
        """Runs of up to ``RUN_EDGES`` edges of a polygon: first edge of each and the end, polygon, and a tree of boxes.
        A box has the rows of its run and the columns of the whole polygon: a scan line needs all edges in its row."""
        counts = -(-np.diff(self.first_edge) // RUN_EDGES)
        polygon = np.repeat(np.arange(len(counts)), counts)
        first = self.first_edge[polygon] + RUN_EDGES * ranges(np.zeros_like(counts), counts)
        corners = np.empty((len(first), 2, 2))
        corners[:, :, 0] = self.box[polygon][:, ::2]
        if len(first):
            corners[:, 0, 1] = np.minimum.reduceat(np.minimum(self.start[:, 1], self.end[:, 1]), first)
            corners[:, 1, 1] = np.maximum.reduceat(np.maximum(self.start[:, 1], self.end[:, 1]), first)
        # the diagonal of a box has its envelope, and takes less memory
        tree = shapely.STRtree(np.asarray(shapely.linestrings(corners)))
        return np.append(first, len(self.start)), polygon, tree

    def edges_near(
        self, left: float, top: float, right: float, bottom: float
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return edges, each once, and their polygons: all between these rows of polygons between these columns."""
        start, polygon, tree = self._runs
        runs = tree.query(shapely.box(left, top, right, bottom))
        first = start[runs]
        count = start[runs + 1] - first
        return ranges(first, count), np.repeat(polygon[runs], count)

    def rings(self, polygon: int) -> list[NDArray[np.float64]]:
        """Return the rings of a polygon, float64 (n, 2), the outer one first; the first point is not repeated."""
        first, last = np.searchsorted(self.ring_start, self.first_edge[polygon : polygon + 2])
        rings = [self.start[self.ring_start[r] : self.ring_start[r + 1]] for r in range(first, last)]
        return [ring[:-1] if len(ring) > 3 and (ring[0] == ring[-1]).all() else ring for ring in rings]

    def moved(self, l0_x: float, l0_y: float, origin: Origin) -> PolygonSet:
        """Return the same areas with (l0_x, l0_y) added to every coordinate, counted from ``origin``."""
        shift = np.array([l0_x, l0_y])
        start, end, box = self.start + shift, self.end + shift, self.box + np.tile(shift, 2)
        return dataclasses.replace(self, start=start, end=end, box=box, origin=origin)


def ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return first[0], first[0] + 1, ... (count[0] of them), first[1], ... as one array."""
    ends = np.cumsum(count)
    every: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    every += np.repeat(first - (ends - count), count)
    return every


def make_polygon_set(
    polygons: Sequence[Sequence[Sequence[Any]]], names: Sequence[str], left_out: Mapping[str, int], origin: Origin
) -> PolygonSet:
    """Return the drawing of ``polygons``, painted in this order.

    Args:
        polygons: rings of each, the outer one first; a ring is at least three positions, closed or not, of which the
            first two numbers are x and y in level-0 px.
        names: class of each polygon.

    Raises:
        ValueError, TypeError, IndexError: a position is no pair of finite numbers within ``FARTHEST_PX``.
    """
    rings = [ring for polygon in polygons for ring in polygon]
    lengths = np.fromiter(map(len, rings), np.int64, len(rings))
    # a position may have a third value, a height: not used
    numbers = np.fromiter((n for ring in rings for p in ring for n in (p[0], p[1])), np.float64, 2 * int(lengths.sum()))
    if not (np.abs(numbers) <= FARTHEST_PX).all():
        raise ValueError(f"a coordinate is not a finite number of px within {FARTHEST_PX:g}")
    start = numbers.reshape(-1, 2)
    ring_start = np.concatenate([[0], np.cumsum(lengths)])
    following = np.arange(1, len(start) + 1)
    following[ring_start[1:] - 1] = ring_start[:-1]  # closes open rings; an edge of no length otherwise
    first_edge = ring_start[np.concatenate([[0], np.cumsum([len(polygon) for polygon in polygons], dtype=np.int64)])]
    corners = [np.minimum.reduceat(start, first_edge[:-1]), np.maximum.reduceat(start, first_edge[:-1])]
    classes = {name: index for index, name in enumerate(dict.fromkeys(names))}
    end, box = start[following], np.concatenate(corners, axis=1)
    polygon_class = np.array([classes[name] for name in names], np.int32)
    edges = start, end, first_edge, ring_start, box
    return PolygonSet(*edges, polygon_class, tuple(classes), dict(left_out), origin)


def printable_name(text: str) -> str:
    """Return a class name fit to be printed and written into files: on one line, without terminal sequences;
    ``UNNAMED_CLASS`` where nothing is left."""
    return printable(" ".join(text.split())) or UNNAMED_CLASS


def split_self_intersections(rings: Sequence[Sequence[Point]]) -> list[list[Any]]:
    """Return the polygons of each ring by non-zero winding, as lists of rings, the outer one first.

    A simple ring stays as it is, and so do coordinates that no slide has; a ring that encloses nothing has no polygon.
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
        areas[k] = polygons_of(valid_area(ring, method="structure", keep_collapsed=False))  # keeps all lobes
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


def polygons_of(area: shapely.Geometry) -> list[list[Any]]:
    """Return the rings, float64 (n, 2), not closed, of every polygon of an area."""
    parts = [part for part in shapely.get_parts(area) if isinstance(part, shapely.Polygon) and not part.is_empty]
    return [[np.asarray(edge.coords)[:-1] for edge in (part.exterior, *part.interiors)] for part in parts]


MOST_PAIRS = 1 << 22
"""Of a polygon and a box around its first corner: beyond, cover is not computed. Drawings of tissue have fewer."""

POLYGONS_AT_ONCE = 256


def areas_within(drawing: PolygonSet, left: float, top: float, right: float, bottom: float) -> NDArray[np.float64]:
    """Return the area of each polygon, holes left out, within a rectangle in the drawing's coordinates."""
    (x0, y0), (x1, y1) = drawing.start.T, drawing.end.T
    # By Green's theorem: the integral of x over dy along the ring, with x and y kept within the rectangle.
    with np.errstate(divide="ignore", invalid="ignore"):
        from_t, to_t = ((np.clip(y, top, bottom) - y0) / (y1 - y0) for y in (y0, y1))
        ax, bx = x0 + from_t * (x1 - x0), x0 + to_t * (x1 - x0)
        dx = bx - ax
        # An edge with both ends on one side of the rectangle: the quotient of large numbers is not exactly that side.
        steep = (np.abs(dx) < 1e-3) | (np.clip(ax, left, right) == np.clip(bx, left, right))
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


def painted_over(drawing: PolygonSet, group: NDArray[np.int32]) -> NDArray[np.bool_]:
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


def _fill(polygons: NDArray[np.object_], drawing: PolygonSet, numbers: NDArray[np.int64]) -> None:
    """Make those of ``polygons`` that are asked for and None; one that crosses itself too often becomes empty."""
    for number in np.unique(numbers).tolist():
        if polygons[number] is None:
            outer, *holes = drawing.rings(number)
            try:
                polygons[number] = valid_area(shapely.Polygon(outer, holes))
            except ValueError:
                polygons[number] = shapely.Polygon()
