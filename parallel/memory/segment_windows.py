"""What every run of consecutive layers of a stage would cost as a segment: bytes held, bytes at work, seconds.

Takes the pieces of memory of a stage and places where segments may begin; gives matrices over all pairs of places, for
the search of ``recompute_search``. What later segments use is counted with the segment that makes it, so that bytes
held add up over segments; where a later segment keeps nothing of it after all, that is too much. No torch here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import LayerGraph
from parallel.memory.liveness import Piece
from parallel.memory.windows import Windows

Matrix = npt.NDArray[np.float64]
Rectangle = tuple[int, int, int, int, int]


class SegmentWindows:
    """Entry [i, j] is for the layers from ``places[i]`` to ``places[j]``, not included; those with i >= j mean nothing.

    Args:
        touched: pieces of memory that the stage's layers make, keep or use.
        places: increasing positions, both ends of the stage among them.
        forward_s: of each layer of the graph.

    Attributes:
        held_again: bytes held between the passes of the stage of a segment that is computed again: what it gives.
        held_kept: of one that is not: what it keeps, too.
        work: live at most while it is computed again and goes backward, besides what is held of segments before it.
        seconds: of its forward pass.
        inputs: bytes that enter the stage, which are held anyway.
    """

    def __init__(
        self, graph: LayerGraph, touched: Iterable[Piece], places: Sequence[int], forward_s: Sequence[float]
    ) -> None:
        self.places = tuple(places)
        self._at = np.asarray(places)
        start, stop = places[0], places[-1]
        again, kept, self.inputs = [], [], 0
        for piece in touched:
            if any(start <= use < stop and made < start for made, use in piece.used):
                self.inputs += piece.bytes
                continue
            saved = [place for place in piece.saved if start <= place < stop]
            inside = [place for place in (*piece.made, *saved) if start <= place < stop]
            if not inside:
                continue
            first = min(inside)
            last = max((use for _, use in piece.used if first < use < stop), default=first)
            again.append((start, first, first + 1, last, piece.bytes))
            if saved and min(saved) <= last:
                kept.append((start, first, first + 1, stop, piece.bytes))
            else:
                kept.append((start, first, first + 1, last, piece.bytes))
                kept += [(start, first, min(saved) + 1, stop, piece.bytes)] if saved else []
        windows = Windows(graph, forward_s, sorted({0, *places, len(graph.layers)})).among(places)
        self.held_again = self._summed(again)
        self.held_kept = self._summed(kept)
        self.work = windows.peak_bytes - windows.entered_bytes + self._summed(_passing(graph, start, stop))
        self.seconds = windows.seconds

    def _summed(self, rectangles: Iterable[Rectangle]) -> npt.NDArray[Any]:
        """Bytes in the windows that begin at positions ``first`` to ``last`` and end before ``from`` to ``to``, all
        included."""
        count = len(self.places)
        corners = np.zeros((count + 1, count + 1))
        cells = np.array([r for r in rectangles if r[0] <= r[1] and r[2] <= r[3]]).reshape(-1, 5)
        top, left = (np.searchsorted(self._at, cells[:, k]) for k in (0, 2))
        bottom, right = (np.searchsorted(self._at, cells[:, k], side="right") for k in (1, 3))
        for row, column, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
            np.add.at(corners, (row, column), sign * cells[:, 4])
        return np.asarray(corners.cumsum(axis=0).cumsum(axis=1)[:-1, :-1])


def _passing(graph: LayerGraph, start: int, stop: int) -> Iterable[Rectangle]:
    """Gradients that wait while a segment goes backward that neither made their value nor uses it."""
    uses: dict[str, list[int]] = {}
    for position in range(start, stop):
        for name in graph.layers[position].inputs:
            uses.setdefault(name, []).append(position)
    for name, by in uses.items():
        layer = graph.by_name[name]
        if layer.differentiable:
            for before, after in pairwise([graph.position[name], *by]):
                yield max(before + 1, start), after - 1, max(before + 2, start + 1), after, layer.output_bytes
