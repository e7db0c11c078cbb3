"""Storages that are live while consecutive layers run forward and backward.

Takes a ``LayerGraph``; gives spans of positions over which storages are live. A value is freed after its last
use, a saved tensor after the backward pass of the layer that saved it. A gradient is freed once the layer that made the
value has used it. Gradients that are handed on unchanged, as by an addition, take no memory, and a second one is added
in place where torch's autograd does so. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from parallel import remembered
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph

Ints = npt.NDArray[np.int64]
NEVER = 1 << 40
"""Behind every position."""


class LiveRange(NamedTuple):
    """A storage that is live while the layers at positions ``first`` to ``last``, both included, run."""

    first: int
    last: int
    bytes: int


@dataclass
class Storage:
    """Memory of one tensor, or of several that share it.

    Attributes:
        made: positions at which values that lie in it are made.
        used: (where the value was made, where it is used), of the values that lie in it.
        saved: positions of the layers that keep it for backward.
    """

    bytes: int
    saved: list[int] = field(default_factory=list)
    used: list[tuple[int, int]] = field(default_factory=list)
    made: list[int] = field(default_factory=list)


def storages(graph: LayerGraph) -> list[Storage]:
    """Return all memory that layers make or keep, parameters and buffers left out."""
    by_key: dict[int | str, Storage] = {}
    held = [_value(layer) for layer in graph.layers]
    for position, layer in enumerate(graph.layers):
        for number, size in layer.saved:
            storage = by_key.setdefault(number, Storage(size))
            storage.bytes = max(storage.bytes, size)
            storage.saved.append(position)
        for key, size in held[position]:
            by_key.setdefault(key, Storage(size)).made.append(maker(graph, position))
        for name in layer.inputs:
            source = graph.position[name]
            for key, _ in held[source]:
                by_key[key].used.append((maker(graph, source), position))
    at_work = ((layer.forward_work, position) for position, layer in enumerate(graph.layers))
    return [*by_key.values(), *(Storage(size, made=[position]) for size, position in at_work if size)]


class StorageTable:
    """Storages as arrays.

    Attributes:
        entries: (6, n), a column for each storage and each position at which it is made, kept or used, in this order.
            Its rows: number of the storage; position; made or kept there; kept there; where what is used there was made
            first; where what is made there is used last.
        bytes: of each storage. ``made``, ``used``: where it is made first, and used last. ``first``, ``last``:
            positions of its entries.
    """

    def __init__(self, storages: Sequence[Storage]) -> None:
        entries: list[tuple[int, int, bool, bool, int, int]] = []
        ends: list[tuple[int, int]] = []
        for number, storage in enumerate(storages):
            makers: dict[int, int] = {}
            users: dict[int, int] = {}
            for made, use in storage.used:
                makers[use] = min(made, makers.get(use, NEVER))
                users[made] = max(use, users.get(made, -1))
            made_at, saved_at = set(storage.made), set(storage.saved)
            places = sorted(made_at | saved_at | makers.keys())
            ends.append((places[0], places[-1]))
            entries += [
                (number, at, at in made_at or at in saved_at, at in saved_at, makers.get(at, NEVER), users.get(at, -1))
                for at in places
            ]
        self.first, self.last = np.array(ends, dtype=np.int64).reshape(-1, 2).T
        self.entries: Ints = np.array(entries, dtype=np.int64).reshape(-1, 6).T
        self.bytes: Ints = np.array([storage.bytes for storage in storages], dtype=np.int64)
        self.made: Ints = np.array([min(storage.made, default=NEVER) for storage in storages], dtype=np.int64)
        self.used: Ints = np.array(
            [max((use for _, use in storage.used), default=-1) for storage in storages], dtype=np.int64
        )

    def within(self, start: int, stop: int) -> Ints:
        """Return the entries of positions from ``start`` to ``stop``, not included."""
        at = self.entries[1]
        found: Ints = self.entries[:, (at >= start) & (at < stop)]
        return found

    def kept_alone(self, start: int, stop: int) -> int:
        """Return bytes that are held more, at least, where layers are kept and not recomputed: storages that no others
        make, keep or use, without those that are held for their recomputation alone."""
        number, _, _, saved, maker, _ = self.within(start, stop)
        heads = np.flatnonzero(np.diff(number, prepend=-1))
        if not len(heads):
            return 0
        keeps, enters = (np.logical_or.reduceat(found, heads) for found in (saved > 0, maker < start))
        storages = number[heads]
        alone = keeps & (self.first[storages] >= start) & (self.last[storages] < stop)
        return int(self.bytes[storages] @ (alone.astype(np.int64) - (enters & ~keeps)))


def maker(graph: LayerGraph, position: int) -> int:
    """Return the position at which the value of a layer is made: -1 for the model's input, which is there before."""
    return -1 if graph.layers[position].kind == INPUT else position


def _value(layer: Layer) -> tuple[tuple[int | str, int], ...]:
    if layer.output_storages or not layer.output_bytes:
        return layer.output_storages
    return ((layer.name, layer.output_bytes),)


def gradient_spans(graph: LayerGraph, start: int = 0, stop: int | None = None) -> tuple[LiveRange, ...]:
    """Memory of gradients of values in the backward pass of the layers from ``start`` to ``stop``, not included.

    Gradients of what later layers use are there from the beginning to the end, those of what earlier layers made stay
    until the end: both are messages. Work space of a layer is counted with its gradients.
    """
    return _gradient_spans(graph, start, len(graph.layers) if stop is None else stop)


@remembered
def _gradient_spans(graph: LayerGraph, start: int, stop: int) -> tuple[LiveRange, ...]:
    return tuple(_Gradients(graph, start, stop).spans())


@dataclass
class _Root:
    """Memory of gradients: the layer whose backward pass takes it, and how many gradients in it are waited for."""

    born: int
    bytes: int
    whole: bool = True
    held: int = 0
    pinned: bool = False


class _Gradients:
    """One simulated backward pass. ``roots``: name of a value -> where its gradient lies, while it is waited for;
    ``found``: spans so far."""

    def __init__(self, graph: LayerGraph, start: int, stop: int) -> None:
        self._graph, self._start, self._end = graph, start, stop - 1
        self._roots: dict[str, _Root] = {}
        self.found: list[LiveRange] = []
        users = ((name, k) for k in range(start, stop) for name in graph.layers[k].inputs)
        self._first_use = dict(reversed([(name, k) for name, k in users if graph.position[name] < start]))

    def spans(self) -> list[LiveRange]:
        last = self._graph.last_uses
        for position in range(self._start, self._end + 1):
            layer = self._graph.layers[position]
            if not layer.differentiable:
                continue
            if last[position] > self._end:  # a message
                self._roots[layer.name] = _Root(self._end, layer.output_bytes, held=1, pinned=True)
                self.found.append(LiveRange(self._start, self._end, layer.output_bytes))
            elif layer.kind == OUTPUT:
                self._roots[layer.name] = _Root(self._end, layer.output_bytes, held=1)
        for position in range(self._end, self._start - 1, -1):
            layer = self._graph.layers[position]
            if layer.name in self._roots:
                for name in layer.inputs:
                    if self._graph.by_name[name].differentiable:
                        self._contribute(position, layer, name)
                        self._complete(position, name)
                self._let_go(position, layer.name)
        for name in tuple(self._roots):
            self._let_go(self._start, name)
        for position in range(self._start, self._end + 1):
            if work := self._graph.layers[position].backward_work:
                self.found.append(LiveRange(position, position, work))
        return self.found

    def _contribute(self, position: int, layer: Layer, name: str) -> None:
        """The gradient that ``layer`` gives for its input ``name``."""
        size = self._graph.by_name[name].output_bytes
        shared = _hands_on(layer, size)
        own = self._roots.get(name)
        if own is None:
            root = self._roots[layer.name] if shared else _Root(position, size)
            root.whole = root.whole and size == root.bytes
            root.held += 1
            self._roots[name] = root
            return
        if own.held > 1 or own.pinned or not own.whole:
            # The sum is a third tensor; the layer's own gradient and what it kept are gone by then.
            if not shared:
                gone = layer.output_bytes + self._graph.freed_bytes[position]
                self.found.append(LiveRange(position, position, max(0, size - gone)))
            self._let_go(position, name)
            self._roots[name] = _Root(position, size, held=1)
        elif not shared:
            self.found.append(LiveRange(position, position, size))

    def _complete(self, position: int, name: str) -> None:
        """The gradient of a received value is a message: it gets memory of its own once it is whole."""
        root = self._roots[name]
        if self._first_use.get(name) == position and (root.held > 1 or root.pinned or not root.whole):
            self._let_go(position, name)
            self._roots[name] = _Root(position, self._graph.by_name[name].output_bytes, held=1)

    def _let_go(self, position: int, name: str) -> None:
        """The layer at ``position`` has used the gradient ``name`` up."""
        root = self._roots.pop(name)
        root.held -= 1
        if not root.held and not root.pinned:
            self.found.append(LiveRange(position, root.born, root.bytes))


def _hands_on(layer: Layer, size: int) -> bool:
    """The gradient of an input of ``size`` bytes lies in the memory of that of the output."""
    names = {op.name for op in layer.ops}
    return names == {"cat"} or (names <= {"add", "add_"} and layer.output_bytes == size)
