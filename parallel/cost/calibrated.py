"""Times of layers from a calibration: for tiles of any size, at no cost, on the device that was calibrated.

Products (convolutions, linear layers) take what their arithmetic and their bytes take at the device's best, times a
polynomial of their shape (``Polynomial``); everything else takes what the bytes it moves take, by the curve measured
for its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from parallel.cost.roofline import (
    FREE,
    Product,
    accumulated_bytes,
    backward_bytes,
    forward_bytes,
    kind_of,
    largest_flops,
)
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import Convolution, LayerGraph, Op

PASSES = ("forward", "input", "weight")
"""Of a product: forward, backward for what goes in, backward for the parameters. A matrix product without parameters
has two of the second kind, which cost about the same."""

LANES = 16
"""Channels that programs work on together; other numbers leave part of them idle."""

USUAL, ADDITION = "relu", "add"
"""Operations whose curves stand in for what was not calibrated, and for the sums of gradients."""

Floats = npt.NDArray[np.float64]

PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)
FOLDS, ENOUGH = 5, 15
DEGREES = (1, 2)


@dataclass(frozen=True, slots=True)
class OpWork:
    """One product; ``features`` of its shape are logarithms to base 2."""

    kind: str
    flops: float
    bytes: float
    features: tuple[float, ...]


def work_of(op: Op) -> OpWork | None:
    """Return the work of an operation; None where arithmetic does not bound it."""
    moved, shape = op.read_bytes + op.written_bytes, op.convolution
    if shape is not None:
        return OpWork(kind_of(shape), op.flops, moved, _convolution_features(shape, op.flops))
    if op.flops:
        return OpWork("matmul", op.flops, moved, _product_features(op.flops, moved, op.written_bytes / 4))
    return None


def work_of_shape(shape: Convolution | Product) -> OpWork:
    """Return the work of an operation that the calibration ran, as ``work_of`` does for one of a graph, in float32."""
    if isinstance(shape, Product):
        flops = 2.0 * shape.rows * shape.inner * shape.columns
        moved = 4 * (shape.rows * shape.inner + shape.inner * shape.columns + shape.rows * shape.columns)
        return OpWork("matmul", flops, moved, _product_features(flops, moved, shape.rows * shape.columns))
    weights = shape.channels_in * shape.channels_out // shape.groups * math.prod(shape.kernel)
    px_in, px_out = math.prod(shape.size_in), math.prod(shape.size_out)
    flops = 2.0 * shape.batch * weights * (px_in if shape.transposed else px_out)
    numbers = shape.batch * (shape.channels_in * px_in + shape.channels_out * px_out) + weights
    return OpWork(kind_of(shape), flops, 4 * numbers, _convolution_features(shape, flops))


def _product_features(flops: float, moved: float, written: float) -> tuple[float, ...]:
    """Arithmetic of a byte, which tells few rows from many, numbers that come out, and length of the sums."""
    return math.log2(flops / moved), math.log2(max(written, 1.0)), math.log2(max(flops / 2 / max(written, 1.0), 1.0))


def _convolution_features(shape: Convolution, flops: float) -> tuple[float, ...]:
    """Channels of a group, groups, kernel, stride, dilation, output px, tiles, idle lanes.

    Of a convolution beyond those that are timed, the px are those of one just as large as the largest timed: what it
    attains is bounded, and kernel and channels stay as they are.
    """
    px = shape.batch * math.prod(shape.size_out)
    return (
        math.log2(shape.channels_in // shape.groups),
        math.log2(shape.channels_out // shape.groups),
        math.log2(shape.groups),
        math.log2(math.prod(shape.kernel)),
        math.log2(math.prod(shape.stride)),
        math.log2(math.prod(shape.dilation)),
        math.log2(px * min(1.0, largest_flops(kind_of(shape)) / flops)),
        math.log2(shape.batch),
        _idle(shape.channels_in),
        _idle(shape.channels_out),
    )


def _idle(channels: int) -> float:
    return math.log2(math.ceil(channels / LANES) * LANES / channels)


@dataclass(frozen=True)
class Polynomial:
    """log(ratio) = intercept + coefficients . monomials of the features, each scaled to [-1, 1] and bounded there:
    beyond the shapes that were fitted, time goes in proportion to the work. Found by ``fit``."""

    low: tuple[float, ...]
    high: tuple[float, ...]
    powers: tuple[tuple[int, ...], ...]
    coefficients: tuple[float, ...]
    intercept: float

    def __call__(self, features: Sequence[Sequence[float]]) -> Floats:
        """The ratio, for each row."""
        scaled = _unit(np.asarray(features, float), np.asarray(self.low), np.asarray(self.high))
        powers = np.asarray(self.powers, int).reshape(-1, scaled.shape[1])
        monomials = np.prod(scaled[:, None, :] ** powers[None], axis=2)
        ratios: Floats = np.exp(self.intercept + monomials @ np.asarray(self.coefficients, float))
        return ratios

    @staticmethod
    def from_dict(data: dict[str, Any]) -> Polynomial:
        """Return the polynomial from what ``asdict`` gives, through JSON or not."""
        numbers = {name: tuple(data[name]) for name in ("low", "high", "coefficients")}
        return Polynomial(**numbers, powers=tuple(map(tuple, data["powers"])), intercept=data["intercept"])


@dataclass(frozen=True)
class PassModel:
    """Seconds of one pass of one kind of product: (flops x flop_s + bytes x byte_s) x ratio of its shape."""

    flop_s: float
    byte_s: float
    ratio: Polynomial

    def seconds(self, works: Sequence[OpWork]) -> list[float]:
        """Return the seconds of each piece of work."""
        best = np.array([work.flops * self.flop_s + work.bytes * self.byte_s for work in works])
        seconds: list[float] = (best * self.ratio([work.features for work in works])).tolist()
        return seconds


@dataclass(frozen=True)
class Curve:
    """Seconds by bytes moved, both ascending; between them a power law, beyond the last in proportion."""

    bytes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __call__(self, moved: float) -> float:
        """Return the seconds to move ``moved`` bytes; 0 for none."""
        if moved <= 0:
            return 0.0
        if moved >= self.bytes[-1]:
            return self.seconds[-1] * moved / self.bytes[-1]
        return math.exp(float(np.interp(math.log(moved), np.log(self.bytes), np.log(self.seconds))))


@dataclass(frozen=True)
class CostModel:
    """Model of what layers cost, found by a calibration.

    Attributes:
        key: what it holds for: device, versions, threads, ...; for people, and to tell calibrations apart.
        products: kind -> pass -> model.
        forward: name of an operation -> curve over the bytes that its forward pass moves; ``backward`` likewise.
        expected_error: relative, median over shapes left out of fitting.
        others: share of the cores' time that other programs took while it was timed.
    """

    key: Mapping[str, Any]
    products: Mapping[str, Mapping[str, PassModel]]
    forward: Mapping[str, Curve]
    backward: Mapping[str, Curve]
    expected_error: float
    seconds_taken: float
    others: float = 0.0

    def estimate(self, graph: LayerGraph) -> Costs:
        """Return the seconds of every layer of ``graph``, for the shape and type it was traced with."""
        positions = [(at, op) for at, layer in enumerate(graph.layers) for op in layer.ops]
        forward, backward, halves = ([0.0] * len(graph.layers) for _ in range(3))
        for at, op in positions:
            if op.name in FREE or work_of(op) is not None:
                continue
            forward[at] += _curve_of(op, self.forward)(forward_bytes(op))
            if op.differentiable:
                back = _curve_of(op, self.backward)(backward_bytes(op))
                backward[at] += back
                halves[at] += back
        for at, op, passes in self._products(positions):
            forward[at] += passes["forward"]
            if op.differentiable:
                halves[at] += passes["input"] * op.passes_on
                backward[at] += passes["input"] * op.passes_on + passes["weight"]
        for at, moved in enumerate(accumulated_bytes(graph)):
            extra = self.forward[ADDITION](moved)
            backward[at] += extra
            halves[at] += extra
        layers = tuple(LayerCost(*seconds) for seconds in zip(forward, backward, halves, strict=True))
        source = f"calibrated on {self.key.get('device', 'this machine')} in {self.seconds_taken:.0f} s"
        return Costs(layers, source, self.expected_error)

    def _products(self, positions: Sequence[tuple[int, Op]]) -> list[tuple[int, Op, dict[str, float]]]:
        """(position, operation, pass -> seconds) of all products, each kind evaluated in one call."""
        by_kind: dict[str, list[tuple[int, Op, OpWork]]] = {}
        for at, op in positions:
            if (work := work_of(op)) is not None:
                by_kind.setdefault(work.kind, []).append((at, op, work))
        timed = []
        for kind, entries in by_kind.items():
            works = [work for _, _, work in entries]
            seconds = {name: self.products[kind][name].seconds(works) for name in PASSES}
            for row, (at, op, _) in enumerate(entries):
                timed.append((at, op, {name: seconds[name][row] for name in PASSES}))
        return timed

    def to_json(self) -> str:
        """Return text that ``from_json`` takes."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CostModel:
        """Return the model from the text of ``to_json``."""
        data = json.loads(text)
        for side in ("forward", "backward"):
            data[side] = {name: _curve(curve) for name, curve in data[side].items()}
        for passes in data["products"].values():
            for name, model in passes.items():
                passes[name] = PassModel(model["flop_s"], model["byte_s"], Polynomial.from_dict(model["ratio"]))
        return CostModel(**data)


def _curve_of(op: Op, curves: Mapping[str, Curve]) -> Curve:
    return curves.get(op.name) or curves.get(op.name.rstrip("_")) or curves[USUAL]


def _curve(data: Mapping[str, Any]) -> Curve:
    return Curve(tuple(data["bytes"]), tuple(data["seconds"]))


def fit(features: Sequence[Sequence[float]], ratios: Sequence[float]) -> tuple[Polynomial, list[float]]:
    """Return a polynomial, and the relative errors of its like on rows that were left out of fitting.

    By ridge regression, with the degree and the strength of the penalty found by cross-validation (Pedregosa et al.,
    Scikit-learn, JMLR 2011), which needs scikit-learn.

    Args:
        features: rows; fewer than ``ENOUGH`` give a constant, the median.
        ratios: measured over best possible seconds, positive.
    """
    from sklearn.model_selection import KFold, cross_val_predict

    x, y = np.asarray(features, float), np.log(np.asarray(ratios, float))
    low, high = x.min(0), x.max(0)
    if len(y) < ENOUGH:
        middle = float(np.median(y))
        constant = Polynomial(tuple(low.tolist()), tuple(high.tolist()), (), (), middle)
        return constant, np.abs(np.exp(middle - y) - 1).tolist()
    varied = np.flatnonzero(high > low)
    x = _unit(x, low, high)[:, varied]
    folds = KFold(FOLDS, shuffle=True, random_state=0)
    left_out = {
        degree: np.abs(np.exp(cross_val_predict(_pipeline(degree), x, y, cv=folds) - y) - 1)
        for degree in DEGREES
        if degree == 1 or math.comb(len(varied) + degree, degree) <= len(y)
    }
    # The mean of errors capped at 1: what is usual counts, and no single shape decides.
    degree = min(left_out, key=lambda degree: float(np.minimum(left_out[degree], 1.0).mean()))
    expand, ridge = _pipeline(degree).fit(x, y)
    powers = np.zeros((len(expand.powers_), len(low)), int)
    powers[:, varied] = expand.powers_
    polynomial = Polynomial(
        tuple(low.tolist()),
        tuple(high.tolist()),
        tuple(map(tuple, powers.tolist())),
        tuple(ridge.coef_.tolist()),
        float(ridge.intercept_),
    )
    return polynomial, left_out[degree].tolist()


def _pipeline(degree: int) -> Any:
    from sklearn.linear_model import RidgeCV
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import PolynomialFeatures

    return make_pipeline(PolynomialFeatures(degree, include_bias=False), RidgeCV(PENALTIES))


def _unit(x: Floats, low: Floats, high: Floats) -> Floats:
    bounded: Floats = 2 * (np.clip(x, low, high) - low) / np.maximum(high - low, 1e-9) - 1
    return bounded
