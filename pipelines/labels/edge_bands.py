"""Edges of polygons by the rows they cross, so that a tile looks only at those beside it.

Takes the y of both ends of every edge, gives ``EdgeBands``: which edges touch which horizontal band of the slide. A
drawing of a million edges costs a tile of 1 % of the slide's height about 1 % of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

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
