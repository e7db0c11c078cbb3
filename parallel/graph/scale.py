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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
        self._apart: dict[int, tuple[list[int], list[Any]]] = {}
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
        for known in self._known.keys() - self._apart.keys():
            _take_apart(self._known[known], *self._apart.setdefault(known, ([], [])))
        numbers, forms = zip(*self._apart.values(), strict=True)
        if any(form != forms[0] for form in forms):
            return
        table = np.array(numbers, dtype=object)
        varies = (table != table[0]).any(axis=0)
        self._varying = dict(zip(self._apart, table[:, varies], strict=True))
        if all(np.array_equal(self._at(known), given) for known, given in self._varying.items()):
            places = iter(np.where(varies, varies.cumsum() - 1, -1).tolist())
            self._build = _build(value, places) or (lambda _: value)

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


def _whole(value: Any) -> bool:
    return type(value) is int or (type(value) is float and value.is_integer())


def _parts(value: Any) -> Sequence[Any] | None:
    """Return what a tuple, a mapping or a dataclass is made of, in order; None of other values."""
    if isinstance(value, tuple):
        return value
    if isinstance(value, Mapping):
        return list(value.values())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [getattr(value, name) for name in _fields(type(value))]
    return None


def _take_apart(value: Any, numbers: list[int], form: list[Any]) -> None:
    """Add all whole numbers in ``value`` to ``numbers``, and what else it is made of to ``form``, in order."""
    if _whole(value):
        numbers.append(int(value))
        form.append(type(value))
    elif (parts := _parts(value)) is None:
        form.append(value)
    else:
        form += (type(value), tuple(value) if isinstance(value, Mapping) else len(parts))
        for part in parts:
            _take_apart(part, numbers, form)


def _build(value: Any, places: Iterator[int]) -> _Build | None:
    """Return what makes ``value`` with other numbers; None where none of its own varies.

    Args:
        places: of each whole number, in the order of ``_take_apart``, among those that vary; -1 of others.
    """
    if _whole(value):
        place, is_float = next(places), type(value) is float
        if place < 0:
            return None
        return (lambda numbers: float(numbers[place])) if is_float else operator.itemgetter(place)
    if (parts := _parts(value)) is None:
        return None
    changing = [(k, build) for k, part in enumerate(parts) if (build := _build(part, places)) is not None]
    if not changing:
        return None

    def joined(numbers: Sequence[int]) -> Any:
        made = list(parts)
        for k, build in changing:
            made[k] = build(numbers)
        if isinstance(value, tuple):
            return tuple(made)
        return dict(zip(value, made, strict=True)) if isinstance(value, Mapping) else type(value)(*made)

    return joined


@functools.cache
def _fields(kind: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(kind) if field.init)
