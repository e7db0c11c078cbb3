"""Costs of every run of consecutive layers, as a stage or as a segment that is recomputed: seconds and bytes.

Takes a ``LayerGraph``, seconds per layer and the positions where stages may begin; gives matrices over all pairs of
them, for the exact search of ``partition_optimal``. Each matrix is a sum of rectangles: a value counts in the windows
that begin behind its maker and end behind their first use of it. No torch here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import bytes_across
from parallel.memory.liveness import Storage, gradient_spans, storages

Matrix = npt.NDArray[np.int64]
Rectangle = tuple[int, int, int, int, int]
"""Bytes in the windows that begin at positions ``first`` to ``last`` and end behind positions ``from`` to ``to``, all
included: (first, last, from, to, bytes)."""


class Windows:
    """Window [i, j) holds the layers from ``positions[i]`` to ``positions[j]``, not included; entries with i >= j mean
    nothing.

    Args:
        graph: traced with a microbatch of the size in question.
        seconds: of each layer, forward and backward.
        positions: increasing, where stages may begin, with both ends: 0 and the number of layers, or those of a stage.
        held: storages of the graph's memory, or those that the layers of the windows asked for touch; all unless given.

    Attributes:
        seconds: (P, P), of the layers in the window.
        received_bytes: (P, P), of values made before the window and used in it, each once; the model's input is not
            received.
        returned_bytes: (P, P), of those whose gradients go back.
        kept_bytes: (P, P), of storages saved for backward, each once, with what was received and the model's input.
        entered_bytes: (P, P), of what recomputation keeps: values received, and the model's input.
        peak_bytes: (P, P), live at most while one microbatch goes through the window forward and backward: kept, on the
            way, gradients of values, and of a layer's parameters before they are added. An estimate where skips pass
            over the window or leave it, -10 % to +35 % in a U-Net, else within a few percent; ``stage_bytes`` is exact.
        param_bytes: (P, P), of parameters, those of a module once.
    """

    def __init__(
        self,
        graph: LayerGraph,
        seconds: Sequence[float],
        positions: Sequence[int],
        held: Iterable[Storage] | None = None,
    ) -> None:
        self.graph = graph
        self.positions = tuple(positions)
        self._begin = np.asarray(self.positions)
        self._end = self._begin - 1  # the last layer of a window that ends at a position; the first means nothing
        self._columns = np.arange(self.positions[0], self.positions[-1])
        self._seconds = np.asarray(seconds, dtype=np.float64)
        self._storages = storages(graph) if held is None else list(held)
        self._remembered: dict[object, npt.NDArray[np.float64]] = {}

    def remembered(self, key: object, make: Callable[[], npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
        """Return the matrix that ``make`` gave the first time for ``key``."""
        if key not in self._remembered:
            self._remembered[key] = make()
        return self._remembered[key]

    def __len__(self) -> int:
        return len(self.positions)

    def among(self, positions: Sequence[int]) -> Windows:
        """The windows that begin and end at some of the positions only, both ends among them."""
        return self if tuple(positions) == self.positions else _Some(self, positions)

    @functools.cached_property
    def seconds(self) -> npt.NDArray[np.float64]:
        return _differences(self._seconds, self._begin)

    @functools.cached_property
    def param_bytes(self) -> Matrix:
        return _differences(np.asarray(self.graph.owned_bytes), self._begin)

    @functools.cached_property
    def received_bytes(self) -> Matrix:
        return self._at_ends(_received(self.graph, differentiable_only=False))

    @functools.cached_property
    def returned_bytes(self) -> Matrix:
        return self._at_ends(_received(self.graph, differentiable_only=True))

    @functools.cached_property
    def entered_bytes(self) -> Matrix:
        return self._at_ends(r for each in self._storages for r in _kept(each, len(self.graph.layers), saved=False))

    @functools.cached_property
    def kept_bytes(self) -> Matrix:
        kept: Matrix = self._kept[:, self._end - self.positions[0]]
        return kept

    @functools.cached_property
    def peak_bytes(self) -> Matrix:
        forward = self._rows(r for storage in self._storages for r in _unsaved(storage))
        spans = gradient_spans(self.graph)
        backward = self._rows((0, first, first, last, size) for first, last, size in spans)
        backward += np.asarray(self.graph.owned_bytes)[self._columns]
        # Two bounds from above: gradients of received values until the end, or all that pass by.
        first = self._peak(np.maximum(forward, backward)) + self.returned_bytes
        backward += self._rows((first + 1, last, 0, last, size) for first, last, size in spans)
        peak: Matrix = np.minimum(first, self._peak(np.maximum(forward, backward)))
        # A backward pass begins with all that is kept, and the gradients of all that was sent.
        np.maximum(peak, self.kept_bytes + self._at_ends(_sent(self.graph)), out=peak)
        return peak

    @functools.cached_property
    def _kept(self) -> Matrix:
        """(P, columns), as of ``_rows``: bytes that each window keeps."""
        return self._rows(r for storage in self._storages for r in _kept(storage, len(self.graph.layers)))

    def _peak(self, more: Matrix) -> Matrix:
        """The most of what is kept and of ``more``, up to the end of each window."""
        more += self._kept
        more[self._columns[None, :] < self._begin[:, None]] = 0
        np.maximum.accumulate(more, axis=1, out=more)
        most: Matrix = more[:, self._end - self.positions[0]]
        return most

    def _at_ends(self, rectangles: Iterable[Rectangle]) -> Matrix:
        return _summed(self._begin, self._end, rectangles)

    def _rows(self, rectangles: Iterable[Rectangle]) -> Matrix:
        """(P, columns): entry [i, p] for the window that begins at ``positions[i]`` and ends with layer p of those
        between the first and the last position."""
        return _summed(self._begin, self._columns, rectangles)


def _summed(begins: npt.NDArray[np.int64], ends: npt.NDArray[np.int64], rectangles: Iterable[Rectangle]) -> Matrix:
    """(begins, ends): the bytes of each window, of all rectangles that it lies in."""
    cells = np.array([r for r in rectangles if r[0] <= r[1] and r[2] <= r[3]], dtype=np.int64).reshape(-1, 5)
    top, left = np.searchsorted(begins, cells[:, 0]), np.searchsorted(ends, cells[:, 2])
    bottom, right = (np.searchsorted(line, cells[:, k], side="right") for line, k in ((begins, 1), (ends, 3)))
    corners = np.zeros((len(begins) + 1, len(ends) + 1), dtype=np.int64)
    for row, column, sign in ((top, left, 1), (top, right, -1), (bottom, left, -1), (bottom, right, 1)):
        np.add.at(corners, (row, column), sign * cells[:, 4])
    np.cumsum(corners, axis=0, out=corners)
    np.cumsum(corners, axis=1, out=corners)
    inner: Matrix = corners[:-1, :-1]
    return inner


def _entries(name: str) -> functools.cached_property[Any]:
    return functools.cached_property(lambda some: getattr(some._windows, name)[some._chosen])


class _Some(Windows):
    """Entries of all windows: what a window costs does not depend on where others begin."""

    def __init__(self, windows: Windows, positions: Sequence[int]) -> None:
        self.graph, self.positions, self._remembered = windows.graph, tuple(positions), {}
        self._windows, chosen = windows, np.searchsorted(windows.positions, self.positions)
        assert tuple(windows._begin[chosen]) == self.positions, self.positions
        self._chosen = np.ix_(chosen, chosen)

    seconds = _entries("seconds")
    param_bytes = _entries("param_bytes")
    received_bytes = _entries("received_bytes")
    returned_bytes = _entries("returned_bytes")
    entered_bytes = _entries("entered_bytes")
    kept_bytes = _entries("kept_bytes")
    peak_bytes = _entries("peak_bytes")


def thinned(graph: LayerGraph, positions: Sequence[int], most: int) -> list[int]:
    """``positions``, or ``most`` of them: both ends, and of each run of neighbours the one with fewest bytes across."""
    if len(positions) <= most:
        return list(positions)
    across = bytes_across(graph)
    inner = positions[1:-1]
    bounds = np.linspace(0, len(inner), most - 1).round().astype(int)
    runs = (inner[first:last] for first, last in pairwise(bounds))
    return [positions[0], *(min(run, key=lambda p: (across[p], p)) for run in runs), positions[-1]]


def _differences(values: npt.NDArray[Any], begin: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Sums of ``values`` over all windows."""
    upto = np.concatenate([np.zeros(1, dtype=values.dtype), np.cumsum(values)])[begin]
    return np.asarray(upto[None, :] - upto[:, None])


def _uses(graph: LayerGraph, start: int, stop: int) -> dict[str, list[int]]:
    """Return the positions of the layers from ``start`` to ``stop``, not included, that take a value, by its name."""
    uses: dict[str, list[int]] = {}
    for position in range(start, stop):
        for name in graph.layers[position].inputs:
            uses.setdefault(name, []).append(position)
    return uses


def _received(graph: LayerGraph, *, differentiable_only: bool) -> Iterator[Rectangle]:
    for name, by in _uses(graph, 0, len(graph.layers)).items():
        layer = graph.by_name[name]
        if layer.differentiable or not differentiable_only:
            for before, use in pairwise([graph.position[name], *by]):
                yield before + 1, use, use, len(graph.layers) - 1, layer.output_bytes


def _sent(graph: LayerGraph) -> Iterator[Rectangle]:
    """Windows that make a value whose gradient comes back to them."""
    for position, last in enumerate(graph.last_uses):
        if graph.layers[position].differentiable:
            yield 0, position, position, last - 1, graph.layers[position].output_bytes


def _kept(storage: Storage, count: int, *, saved: bool = True) -> Iterator[Rectangle]:
    """Windows that receive ``storage``, or keep it for backward if ``saved`` asks for that, too."""
    makers = sorted({-1, *(made for made, _ in storage.used)})
    for made, until in pairwise([*makers, count]):
        # Of windows that begin behind ``made`` and not behind ``until``.
        at = {use for maker, use in storage.used if maker <= made}
        if saved:
            at |= set(storage.saved)
        before = made
        for use in sorted(each for each in at if each > made):
            yield before + 1, min(use, until), use, count - 1, storage.bytes
            before = use


def _unsaved(storage: Storage) -> Iterator[Rectangle]:
    """Values on their way from layer to layer that are not saved for backward, or not yet."""
    if storage.made and min(storage.made) >= 0:
        first = min(storage.made)
        last = max([*storage.made, *(use for _, use in storage.used)])
        yield 0, first, first, min([last, *(position - 1 for position in storage.saved)]), storage.bytes


class SegmentWindows:
    """Costs of every run of consecutive layers of a stage as a segment, for the search of ``recompute_search``.

    Entry [i, j] is for the layers from ``places[i]`` to ``places[j]``, not included; those with i >= j mean nothing.
    What later segments use is counted with the segment that makes it, so that bytes held add up over segments; where a
    later segment keeps nothing of it after all, that is too much.

    Args:
        touched: storages that the stage's layers make, keep or use.
        places: increasing positions, both ends of the stage among them.
        forward_s: of each layer of the graph.

    Attributes:
        held_again: bytes held between the passes of the stage of a segment that is recomputed: what it gives.
        held_kept: of one that is not: what it keeps, too.
        work: live at most while it is recomputed and goes backward, besides what is held of segments before it.
        seconds: of its forward pass.
        inputs: bytes that enter the stage, which are held anyway.
    """

    def __init__(
        self, graph: LayerGraph, touched: Sequence[Storage], places: Sequence[int], forward_s: Sequence[float]
    ) -> None:
        self.places = tuple(places)
        at = np.asarray(places)
        start, stop = places[0], places[-1]
        again, kept, self.inputs = [], [], 0
        for storage in touched:
            if any(start <= use < stop and made < start for made, use in storage.used):
                self.inputs += storage.bytes
                continue
            saved = [place for place in storage.saved if start <= place < stop]
            inside = [place for place in (*storage.made, *saved) if start <= place < stop]
            if not inside:
                continue
            first = min(inside)
            last = max((use for _, use in storage.used if first < use < stop), default=first)
            again.append((start, first, first + 1, last, storage.bytes))
            if saved and min(saved) <= last:
                kept.append((start, first, first + 1, stop, storage.bytes))
            else:
                kept.append((start, first, first + 1, last, storage.bytes))
                kept += [(start, first, min(saved) + 1, stop, storage.bytes)] if saved else []
        windows = Windows(graph, forward_s, places, touched)
        self.held_again = _summed(at, at, again)
        self.held_kept = _summed(at, at, kept)
        self.work = windows.peak_bytes - windows.entered_bytes + _summed(at, at, _passing(graph, start, stop))
        self.seconds = windows.seconds


def _passing(graph: LayerGraph, start: int, stop: int) -> Iterable[Rectangle]:
    """Gradients that wait while a segment goes backward that neither made their value nor uses it."""
    for name, by in _uses(graph, start, stop).items():
        layer = graph.by_name[name]
        if layer.differentiable:
            for before, after in pairwise([graph.position[name], *by]):
                yield max(before + 1, start), after - 1, max(before + 2, start + 1), after, layer.output_bytes
