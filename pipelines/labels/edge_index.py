"""Which edges of a drawing a tile has to look at: of small polygons by where they lie, of others by their rows.

Takes the edges and boxes of all polygons, gives ``EdgeIndex``. A small polygon is all inside a tile, or nearly, or not
near it: it is found by its box, among the few of the cells that the tile meets. One that is larger than a cell is never
looked at whole: of it, a tile takes the edges in its rows.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

CELL_PX = 512.0
"""Side of a cell, and of the box of a small polygon at most."""


@dataclass(frozen=True, slots=True)
class EdgeIndex:
    """Edges by place.

    Attributes:
        edge_polygon: int32 (edges,), polygon of each edge.
        box: float64 (polygons, 4): left, top, right, bottom.
        first_edge: int64 (polygons + 1,): polygon i has edges first_edge[i]..first_edge[i + 1].
        bands: the edges of large polygons, by their numbers among all.
        origin: (x, y) of the corner of the cells.
        cells: (columns, rows) of them.
        cell: int64, sorted: row * columns + column of the cell with the top left corner of each small polygon.
        small: int64, numbers of the small polygons, in the order of ``cell``.
        small_box: float64 (4, small polygons), their boxes in that order.
    """

    edge_polygon: NDArray[np.int32]
    box: NDArray[np.float64]
    first_edge: NDArray[np.int64]
    bands: EdgeBands
    origin: tuple[float, float]
    cells: tuple[int, int]
    cell: NDArray[np.int64]
    small: NDArray[np.int64]
    small_box: NDArray[np.float64]

    @property
    def nbytes(self) -> int:
        return (
            self.bands.nbytes + self.edge_polygon.nbytes + self.cell.nbytes + self.small.nbytes + self.small_box.nbytes
        )

    @classmethod
    def of(
        cls,
        start_y: NDArray[np.float64],
        end_y: NDArray[np.float64],
        first_edge: NDArray[np.int64],
        box: NDArray[np.float64],
    ) -> Self:
        """Return the index of edges from ``start_y`` to ``end_y``, float64 (edges,) each; the rest as above."""
        counts = np.diff(first_edge)
        is_small = ((box[:, 2:] - box[:, :2]) <= CELL_PX).all(axis=1)
        large_edge = np.flatnonzero(np.repeat(~is_small, counts))
        bands = EdgeBands.of(start_y[large_edge], end_y[large_edge])
        small = np.flatnonzero(is_small)
        corners = box[small, :2]
        origin = corners.min(axis=0) if len(small) else np.zeros(2)
        column, row = ((corners - origin) / CELL_PX).astype(np.int64).T
        columns, rows = (int(axis.max(initial=0)) + 1 for axis in (column, row))
        cell = row * columns + column
        order = np.argsort(cell, kind="stable")
        return cls(
            np.repeat(np.arange(len(box), dtype=np.int32), counts),
            box,
            first_edge,
            dataclasses.replace(bands, edge=large_edge[bands.edge]),
            (float(origin[0]), float(origin[1])),
            (columns, rows),
            cell[order],
            small[order],
            np.ascontiguousarray(box[small[order]].T),
        )

    def within(self, left: float, top: float, right: float, bottom: float) -> NDArray[np.int64]:
        """Return the edges, each once, of all polygons whose box meets these; of large ones those between the rows."""
        small = self._small(left, top, right, bottom)
        edges = ranges(self.first_edge[small], self.first_edge[small + 1] - self.first_edge[small])
        if not len(self.bands.edge):
            return edges
        large = self.bands.within(top, bottom)
        polygon = self.edge_polygon[large]
        beside = (self.box[polygon, 0] <= right) & (self.box[polygon, 2] >= left)
        return np.concatenate([edges, large[beside]])

    def _small(self, left: float, top: float, right: float, bottom: float) -> NDArray[np.int64]:
        columns, rows = self.cells
        # A box begins in a cell of the tile's or in the one before it. Only numbers that fit are made whole.
        (first_column, last_column), (first_row, last_row) = (
            (int(max(-1.0, min(low / CELL_PX - 1, count))), int(max(-1.0, min(high / CELL_PX, count - 1))))
            for low, high, count in (
                (left - self.origin[0], right - self.origin[0], float(columns)),
                (top - self.origin[1], bottom - self.origin[1], float(rows)),
            )
        )
        row = np.arange(max(0, first_row), last_row + 1) * columns
        first = np.searchsorted(self.cell, row + max(0, first_column))
        near = ranges(first, np.searchsorted(self.cell, row + last_column, "right") - first)
        box = self.small_box[:, near]
        meets = (box[0] <= right) & (box[2] >= left) & (box[1] <= bottom) & (box[3] >= top)
        polygons: NDArray[np.int64] = self.small[near[meets]]
        return polygons


def ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """first[0], first[0] + 1, ... (count[0] of them), first[1], ...: one array."""
    ends = np.cumsum(count)
    every: NDArray[np.int64] = np.arange(int(ends[-1]) if len(ends) else 0, dtype=np.int64)
    every += np.repeat(first - (ends - count), count)
    return every


MOST_BANDS = 4096

EDGES_PER_BAND = 64
"""Fewer are not worth a band."""

COPIES = 4
"""Of an edge at most, on average: long edges touch many bands, and bands grow until they do not."""


@dataclass(frozen=True, slots=True)
class EdgeBands:
    """Bands of equal height from ``top`` downwards.

    Attributes:
        top, height: of the first band, level-0 px.
        first: int64 (bands + 1,): band b has edge[first[b]..first[b + 1]].
        edge: int64 (entries,), indices of edges.
        is_first: bool (entries,), whether the band is the first of that edge.
    """

    top: float
    height: float
    first: NDArray[np.int64]
    edge: NDArray[np.int64]
    is_first: NDArray[np.bool_]

    @property
    def nbytes(self) -> int:
        return self.first.nbytes + self.edge.nbytes + self.is_first.nbytes

    @classmethod
    def of(cls, start_y: NDArray[np.float64], end_y: NDArray[np.float64]) -> Self:
        """Return the bands of edges from ``start_y`` to ``end_y``, float64 (edges,) each."""
        edges = len(start_y)
        if edges == 0:
            return cls(0.0, 1.0, np.zeros(2, np.int64), np.zeros(0, np.int64), np.zeros(0, bool))
        low, high = np.minimum(start_y, end_y), np.maximum(start_y, end_y)
        top, extent = float(low.min()), float(high.max() - low.min())
        bands = min(MOST_BANDS, max(1, edges // EDGES_PER_BAND)) if extent > 0 else 1
        while True:
            height = extent / bands if extent > 0 else 1.0
            # one formula for edges and for questions: rounding then never loses an edge
            first_band, last_band = (np.minimum(((y - top) / height).astype(np.int64), bands - 1) for y in (low, high))
            copies = last_band - first_band + 1
            if bands == 1 or copies.sum() <= COPIES * edges:
                break
            bands = max(1, bands // 2)
        ends = np.cumsum(copies)
        nth = np.arange(int(ends[-1])) - np.repeat(ends - copies, copies)  # band of its edge
        band = nth + np.repeat(first_band, copies)
        order = np.argsort(band, kind="stable")
        first = np.searchsorted(band[order], np.arange(bands + 1))
        return cls(top, height, first, np.repeat(np.arange(edges), copies)[order], (nth == 0)[order])

    def within(self, top: float, bottom: float) -> NDArray[np.int64]:
        """Return the edges, each once, that may have a point between the rows ``top`` and ``bottom``."""
        bands = len(self.first) - 1
        if bottom < self.top or top > self.top + self.height * (bands + 1):
            return self.edge[:0]
        a, b = (int(np.clip((y - self.top) / self.height, 0, bands - 1)) for y in (top, bottom))
        later = slice(self.first[a + 1], self.first[b + 1])
        return np.concatenate([self.edge[self.first[a] : self.first[a + 1]], self.edge[later][self.is_first[later]]])
