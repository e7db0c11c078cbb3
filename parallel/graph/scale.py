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
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from parallel import remembered
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
    return graph if tiles == 1 else _with_tiles(graph, tiles)


@remembered
def _with_tiles(graph: LayerGraph, tiles: int) -> LayerGraph:
    return dataclasses.replace(graph, layers=tuple(_scaled(layer, tiles) for layer in graph.layers))


def _scaled(layer: Layer, tiles: int) -> Layer:
    casts = cast_parameters(layer)
    saved = []
    for number, size in layer.saved:
        is_cast = size in casts
        if is_cast:
            casts.remove(size)
        saved.append((number, size if is_cast else size * tiles))
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
        self._build: _Build | None = None
        self._varying: dict[int, Numbers] = {}
        self._between: dict[int, T] = {}

    @property
    def count(self) -> int:
        """Sides that were run."""
        return len(self._known)

    def add(self, side: int, value: T) -> None:
        """Take the value of one more side, which was run."""
        self._known[side], self._build = value, None
        self._between.clear()
        if len(self._known) < KNOWN:
            return
        rows: list[list[int]] = []
        try:
            build = _build(tuple(self._known.values()), rows) or (lambda _: value)
        except ValueError:
            return
        table = np.array(rows, dtype=object).reshape(-1, len(self._known))
        self._varying = dict(zip(self._known, table.T, strict=True))
        if all(np.array_equal(self._at(known), given) for known, given in self._varying.items()):
            self._build = build

    def at(self, side: int) -> T | None:
        """Return the value for tiles of ``side``; None where the known ones do not tell."""
        if self._build is None or not min(self._known) < side < max(self._known):
            return self._known.get(side)
        if side not in self._between:
            self._between[side] = self._build(self._at(side).tolist())
        return self._between[side]

    def _at(self, side: int) -> Numbers:
        """Interpolate what varies by Lagrange's formula from three sides; rounded down where it gives no integers."""
        sides = sorted(self._varying)
        a, b, c = sides[0], sides[len(sides) // 2], sides[-1]
        parts = (
            ((side - b) * (side - c) * (c - b), a),
            ((side - a) * (side - c) * (a - c), b),
            ((side - a) * (side - b) * (b - a), c),
        )
        total: Numbers = sum(factor * self._varying[known] for factor, known in parts) // ((b - a) * (c - a) * (c - b))
        return total


_Build = Callable[[Sequence[int]], Any]
"""(numbers that vary) -> the value that has them."""


def _build(values: Sequence[Any], rows: list[list[int]]) -> _Build | None:
    """Return a function that builds a value like ``values`` with other numbers; None where they are equal.

    Args:
        rows: gets a row for each whole number that varies: the number in each of ``values``.

    Raises:
        ValueError: ``values`` differ in more than whole numbers.
    """
    if values.count(values[0]) == len(values):
        return None
    kind, *others = set(map(type, values))
    if others:
        raise ValueError(f"values of several types: {kind.__name__} and others")
    if kind is int or (kind is float and all(map(float.is_integer, values))):
        number = operator.itemgetter(len(rows))
        rows.append(list(map(int, values)))
        return number if kind is int else lambda numbers: float(number(numbers))
    parts = list(map(_parts, values))
    builds = [_build(own, rows) for own in zip(*parts, strict=True)]
    changing = [(k, build) for k, build in enumerate(builds) if build is not None]

    def joined(numbers: Sequence[int]) -> Any:
        made = list(parts[0])
        for k, build in changing:
            made[k] = build(numbers)
        if issubclass(kind, tuple):
            return tuple(made)
        return dict(made) if issubclass(kind, Mapping) else kind(*made)

    return joined


def _parts(value: Any) -> Sequence[Any]:
    """Return what a tuple, a mapping or a dataclass is made of, in order; a ValueError for other values."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Mapping):
        return list(value.items())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields(type(value))]
    raise ValueError(f"values of {type(value).__name__} differ")


@functools.cache
def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
