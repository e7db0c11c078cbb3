"""Graphs for any number and any size of tiles, without tracing again.

``with_tiles`` scales bytes, flops and operations. What belongs to parameters stays. Statistics that normalisation keeps
per channel are scaled too, as a graph does not tell them apart: 0.2 % of what ResNet-50 keeps at 224 px, less above.
``BySide`` interpolates between sides: bytes and flops of layers that look at neighbourhoods are polynomials of the
side, of degree two at most. Three sides say which, and all others that are known have to agree. Where one does not
(padding to a multiple, attention), nothing is said.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from itertools import repeat
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import Convolution, Layer, LayerGraph, Op

T = TypeVar("T")
CAST = "_to_copy"
"""The operation by which autocast copies a tensor into another type."""


def with_tiles(graph: LayerGraph, tiles: int) -> LayerGraph:
    """Return ``graph``, traced with one tile, for a microbatch of ``tiles`` tiles.

    Raises:
        ValueError: ``tiles`` is not positive.
    """
    if tiles < 1:
        raise ValueError(f"a microbatch has at least one tile; got {tiles}")
    if tiles == 1:
        return graph
    if ("tiles", tiles) not in graph.remembered:
        layers = tuple(_scaled(layer, tiles) for layer in graph.layers)
        graph.remembered["tiles", tiles] = dataclasses.replace(graph, layers=layers)
    scaled: LayerGraph = graph.remembered["tiles", tiles]
    return scaled


def _scaled(layer: Layer, tiles: int) -> Layer:
    casts = cast_parameters(layer)
    saved = []
    for number, size in layer.saved:
        if size in casts:
            casts.remove(size)
            saved.append((number, size))
        else:
            saved.append((number, size * tiles))
    return dataclasses.replace(
        layer,
        output_bytes=layer.output_bytes * tiles,
        flops=layer.flops * tiles,
        saved=tuple(saved),
        ops=tuple(_scaled_op(op, _parameter_bytes(op, layer), tiles) for op in layer.ops),
        output_storages=tuple((number, size * tiles) for number, size in layer.output_storages),
        forward_work=layer.forward_work * tiles,
        backward_work=layer.backward_work * tiles,
    )


@functools.lru_cache(maxsize=1024)  # the blocks of a model repeat their operations
def _scaled_op(op: Op, fixed: int, tiles: int) -> Op:
    shape = op.convolution
    return _resized(op, fixed, tiles, shape and dataclasses.replace(shape, batch=shape.batch * tiles))


def on_part(op: Op, layer: Layer, share: float, shape: Convolution | None) -> Op:
    """Return ``op`` of ``layer`` on a ``share`` of its maps, where a convolution has ``shape``."""
    return _resized(op, _parameter_bytes(op, layer), share, shape)


def _resized(op: Op, fixed: int, share: float, shape: Convolution | None) -> Op:
    """Return ``op`` with ``share`` of its work; ``fixed`` of the bytes it reads are of parameters."""
    if _casts_parameter(op):
        return op
    return dataclasses.replace(
        op,
        flops=round(op.flops * share),
        read_bytes=fixed + round((op.read_bytes - fixed) * share),
        written_bytes=round(op.written_bytes * share),
        convolution=shape,
    )


def cast_parameters(layer: Layer) -> list[int]:
    """Return the bytes of the copies of parameters in lower precision that ``layer`` makes."""
    return [op.written_bytes for op in layer.ops if _casts_parameter(op)]


def _casts_parameter(op: Op) -> bool:
    return op.name == CAST and op.differentiable and not op.passes_on


def _parameter_bytes(op: Op, layer: Layer) -> int:
    """Return the bytes that ``op`` reads of parameters: known of convolutions, and of layers of one operation."""
    if op.convolution is not None:
        shape = op.convolution
        size = op.written_bytes // (shape.batch * shape.channels_out * math.prod(shape.size_out))
        return max(0, op.read_bytes - shape.batch * shape.channels_in * math.prod(shape.size_in) * size)
    return min(layer.param_bytes, op.read_bytes) if len(layer.ops) == 1 else 0


KNOWN = 5
"""Sides at least: three for the polynomials, two that agree."""

Numbers = npt.NDArray[np.object_]
"""Integers without a limit, as products of flops and sides are."""


class BySide(Generic[T]):
    """Values of one model, as its graph, which differ in the size of the tiles alone."""

    def __init__(self) -> None:
        self._known: dict[int, T] = {}
        self._numbers: dict[int, Numbers] = {}
        self._agree = False
        self._between: dict[int, T] = {}

    @property
    def count(self) -> int:
        """Sides that were run."""
        return len(self._known)

    def add(self, side: int, value: T) -> None:
        """Take the value of one more side, which was run."""
        self._known[side] = value
        self._between.clear()
        self._numbers[side] = np.array(list(_numbers(value)), dtype=object)
        forms = (_filled(each, repeat(0)) for each in self._known.values())
        form = next(forms)
        self._agree = len(self._known) >= KNOWN and all(other == form for other in forms)
        self._agree = self._agree and all(np.array_equal(self._at(s), n) for s, n in self._numbers.items())

    def at(self, side: int) -> T | None:
        """Return the value for tiles of ``side``; None where the known ones do not tell."""
        if not self._agree or not min(self._known) < side < max(self._known):
            return self._known.get(side)
        if side not in self._between:
            self._between[side] = _filled(next(iter(self._known.values())), iter(self._at(side).tolist()))
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
    """Yield all whole numbers in dataclasses, tuples and mappings, in order."""
    if type(value) is int or (type(value) is float and value.is_integer()):
        yield int(value)
    elif isinstance(value, (tuple, Mapping)):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _numbers(each)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for name in _fields(type(value)):
            yield from _numbers(getattr(value, name))


def _filled(value: Any, numbers: Iterator[int]) -> Any:
    """Return ``value`` with other whole numbers, in the order of ``_numbers``; itself where they are the same."""
    if type(value) is int:
        return next(numbers)
    if type(value) is float:
        return float(next(numbers)) if value.is_integer() else value
    if isinstance(value, tuple):
        return tuple(_filled(each, numbers) for each in value)
    if isinstance(value, Mapping):
        return {key: _filled(each, numbers) for key, each in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = type(value)(*(_filled(getattr(value, name), numbers) for name in _fields(type(value))))
        return value if made == value else made
    return value


@functools.cache
def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
