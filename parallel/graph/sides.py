"""From the graphs of a model at some tile sides to that at any side between them, without running it again.

Takes ``LayerGraph``s of one model by the side of the tiles they were traced with; gives that of another side. Bytes and
flops of layers that look at neighbourhoods are polynomials of the side, of degree two at most: three sides say which,
and all others that are known have to agree. Where one does not (padding to a multiple, attention), nothing is said. No
torch here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import LayerGraph

KNOWN = 5
"""Sides at least: three for the polynomials, two that agree."""

Numbers = npt.NDArray[np.object_]
"""Integers without a limit, as products of flops and sides are."""


class GraphsBySide:
    """Graphs of one model, which differ in the side of the tiles alone."""

    def __init__(self) -> None:
        self._graphs: dict[int, LayerGraph] = {}
        self._numbers: dict[int, Numbers] = {}
        self._agree = False
        self._between: dict[int, LayerGraph] = {}

    @property
    def count(self) -> int:
        """Sides that were run."""
        return len(self._graphs)

    def add(self, side: int, graph: LayerGraph) -> None:
        """Take the graph of one more side, which was run."""
        self._graphs[side] = graph
        self._between.clear()
        self._numbers[side] = np.array(list(_numbers(graph.layers)), dtype=object)
        forms = (_filled(each.layers, repeat(0)) for each in self._graphs.values())
        form = next(forms)
        self._agree = len(self._graphs) >= KNOWN and all(other == form for other in forms)
        self._agree = self._agree and all(np.array_equal(self._at(s), n) for s, n in self._numbers.items())

    def at(self, side: int) -> LayerGraph | None:
        """Return the graph of tiles of ``side``; None where the known ones do not tell."""
        if not self._agree or not min(self._graphs) < side < max(self._graphs):
            return self._graphs.get(side)
        if side not in self._between:
            graph = next(iter(self._graphs.values()))
            layers = _filled(graph.layers, iter(self._at(side).tolist()))
            self._between[side] = dataclasses.replace(graph, layers=layers)
        return self._between[side]

    def _at(self, side: int) -> Numbers:
        """Interpolate by Lagrange's formula from three sides; rounded down where it gives no integers."""
        sides = sorted(self._numbers)
        a, b, c = sides[0], sides[len(sides) // 2], sides[-1]
        parts = (
            ((side - b) * (side - c) * (c - b), a),
            ((side - a) * (side - c) * (a - c), b),
            ((side - a) * (side - b) * (b - a), c),
        )
        total: Numbers = sum(factor * self._numbers[known] for factor, known in parts) // ((b - a) * (c - a) * (c - b))
        return total


def _numbers(value: Any) -> Iterator[int]:
    """Yield all integers in dataclasses and tuples, in order."""
    if type(value) is int:
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from _numbers(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from _numbers(getattr(value, field.name))


def _filled(value: Any, numbers: Iterator[int]) -> Any:
    """Return ``value`` with other integers, in the order of ``_numbers``."""
    if type(value) is int:
        return next(numbers)
    if isinstance(value, tuple):
        return tuple(_filled(each, numbers) for each in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value)(*(_filled(getattr(value, field.name), numbers) for field in dataclasses.fields(value)))
    return value
