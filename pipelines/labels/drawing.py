"""Areas drawn on a slide: the one model that every file format of annotations is read into.

Takes polygons as lists of rings, gives a ``Drawing``: the edges of all polygons in flat arrays, in the order in which
they are painted, with the class of each polygon, and beside it how many drawn objects of each kind have no area.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.labels.edge_index import EdgeIndex
from pipelines.slides.printable import printable

UNNAMED_CLASS = "foreground"
"""Class of an area that has neither a classification nor a name."""

BACKGROUND = "background"

FILE_BYTES = 2 << 30
"""Largest file that is read: parsed, it takes about ten times as much."""

FARTHEST_PX = 1e9
"""A coordinate beyond is no pixel of any slide."""


class Origin(Enum):
    """Where on level 0 a file's coordinates count from."""

    BOUNDS = "bounds"
    """Corner of what was scanned (OpenSlide's ``openslide.bounds-*``), as in QuPath."""
    LEVEL0 = "level 0"
    """Corner of level 0, as in ASAP and ImageScope."""


@dataclass(frozen=True, slots=True)
class Drawing:
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
        index: the edges by place.
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
    index: EdgeIndex

    @property
    def nbytes(self) -> int:
        arrays = (self.start, self.end, self.box, self.ring_start)
        return sum(array.nbytes for array in arrays) + self.index.nbytes

    @property
    def without_area(self) -> int:
        """Number of objects that are not used."""
        return sum(self.left_out.values())

    def rings(self, polygon: int) -> list[NDArray[np.float64]]:
        """Return the rings of a polygon, float64 (n, 2), the outer one first; the first point is not repeated."""
        first, last = np.searchsorted(self.ring_start, self.first_edge[polygon : polygon + 2])
        rings = [self.start[self.ring_start[r] : self.ring_start[r + 1]] for r in range(first, last)]
        return [ring[:-1] if len(ring) > 3 and (ring[0] == ring[-1]).all() else ring for ring in rings]

    def moved(self, l0_x: float, l0_y: float, origin: Origin) -> Drawing:
        """Return the same areas with (l0_x, l0_y) added to every coordinate, counted from ``origin``."""
        shift = np.array([l0_x, l0_y])
        start, end, box = self.start + shift, self.end + shift, self.box + np.tile(shift, 2)
        index = EdgeIndex.of(start[:, 1], end[:, 1], self.first_edge, box)
        return dataclasses.replace(self, start=start, end=end, box=box, index=index, origin=origin)


def make_drawing(
    polygons: Sequence[Sequence[Sequence[Any]]], names: Sequence[str], left_out: Mapping[str, int], origin: Origin
) -> Drawing:
    """Return the drawing of ``polygons``, painted in this order.

    Args:
        polygons: rings of each, the outer one first; a ring is at least three positions, closed or not, of which the
            first two numbers are x and y in level-0 px.
        names: class of each polygon.
        left_out: as in ``Drawing``.
        origin: what the coordinates count from.

    Raises:
        ValueError, TypeError, IndexError: a position is no pair of finite numbers within ``FARTHEST_PX``.
    """
    rings = [ring for polygon in polygons for ring in polygon]
    lengths = np.fromiter(map(len, rings), np.int64, len(rings))
    numbers = _numbers(rings, int(lengths.sum()))
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
    return Drawing(
        start,
        end,
        first_edge,
        ring_start,
        box,
        np.array([classes[name] for name in names], np.int32),
        tuple(classes),
        dict(left_out),
        origin,
        EdgeIndex.of(start[:, 1], end[:, 1], first_edge, box),
    )


def _numbers(rings: Sequence[Sequence[Any]], positions: int) -> NDArray[np.float64]:
    # a position may have a third value, a height: not used
    return np.fromiter((n for ring in rings for p in ring for n in (p[0], p[1])), np.float64, 2 * positions)


def printable_name(text: str) -> str:
    """Return a class name fit to be printed and written into files: on one line, without terminal sequences;
    ``UNNAMED_CLASS`` where nothing is left."""
    return printable(" ".join(text.split())) or UNNAMED_CLASS
