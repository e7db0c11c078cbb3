"""Times of layers from a calibration: for tiles of any size, at no cost, on the device that was calibrated.

Takes a ``LayerGraph``; gives ``Costs``. Products (convolutions, linear layers) take what their arithmetic and their
bytes take at the device's best, times a polynomial of their shape (``regression``); everything else takes what the
bytes it moves take, by the curve measured for its name. Memory that the kernel hands out anew costs besides. Kept as
JSON; made by ``profile.calibrate``. No torch here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from parallel.cost.layer_cost import Costs, LayerCost
from parallel.cost.product import PASSES, OpWork, work_of
from parallel.cost.regression import Polynomial
from parallel.cost.traffic import FREE, accumulated_bytes, backward_bytes, forward_bytes
from parallel.graph.layers import LayerGraph, Op

USUAL, ADDITION = "relu", "add"
"""Operations whose curves stand in for what was not calibrated, and for the sums of gradients."""


@dataclass(frozen=True)
class PassModel:
    """Seconds of one pass of one kind of product: (flops / rate + bytes / bandwidth) x polynomial.

    Attributes:
        flop_s: seconds per flop at best; ``byte_s`` likewise per byte.
    """

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
        """Seconds to move ``moved`` bytes; 0 for none."""
        if moved <= 0:
            return 0.0
        if moved >= self.bytes[-1]:
            return self.seconds[-1] * moved / self.bytes[-1]
        return math.exp(float(np.interp(math.log(moved), np.log(self.bytes), np.log(self.seconds))))


@dataclass(frozen=True)
class CostModel:
    """What a calibration found.

    Attributes:
        key: what it holds for: device, versions, threads, ...; for people, and to tell calibrations apart.
        products: kind -> pass -> model.
        forward: name of an operation -> curve over the bytes that its forward pass moves; ``backward`` likewise.
        fresh: seconds by bytes of one piece of memory that has to come from the kernel.
        expected_error: relative, median over shapes left out of fitting.
        others: share of the cores' time that other programs took while it was timed.
    """

    key: Mapping[str, Any]
    products: Mapping[str, Mapping[str, PassModel]]
    forward: Mapping[str, Curve]
    backward: Mapping[str, Curve]
    fresh: Curve
    expected_error: float
    seconds_taken: float
    others: float = 0.0

    def estimate(self, graph: LayerGraph) -> Costs:
        """Seconds of every layer of ``graph``, for the shape and type it was traced with."""
        positions = [(at, op) for at, layer in enumerate(graph.layers) for op in layer.ops]
        forward, backward, halves = ([0.0] * len(graph.layers) for _ in range(3))
        for at, op in positions:
            if op.name in FREE or work_of(op) is not None:
                continue
            forward[at] += self._moved(op, self.forward, forward_bytes(op))
            if op.differentiable:
                back = self._moved(op, self.backward, backward_bytes(op))
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
        """(position, operation, pass -> seconds) of all products, each kind evaluated at once."""
        by_kind: dict[str, list[tuple[int, Op, OpWork]]] = {}
        for at, op in positions:
            if (work := work_of(op)) is not None:
                by_kind.setdefault(self._known(work.kind), []).append((at, op, work))
        timed = []
        for kind, entries in by_kind.items():
            works = [work for _, _, work in entries]
            seconds = {name: self.products[kind][name].seconds(works) for name in PASSES}
            for row, (at, op, _) in enumerate(entries):
                passes = {name: seconds[name][row] for name in PASSES}
                passes["forward"] += self.fresh(op.written_bytes)
                passes["input"] += self.fresh(op.read_bytes)
                timed.append((at, op, passes))
        return timed

    def _known(self, kind: str) -> str:
        """``kind``, or the nearest that was calibrated."""
        return kind if kind in self.products else "dense"

    def _moved(self, op: Op, curves: Mapping[str, Curve], moved: float) -> float:
        if not moved:
            return 0.0
        curve = curves.get(op.name) or curves.get(op.name.rstrip("_")) or curves[USUAL]
        taken = 0 if op.name.endswith("_") and curves is self.forward else op.written_bytes
        return curve(moved) + self.fresh(op.read_bytes if curves is self.backward else taken)

    def to_json(self) -> str:
        """Text that ``from_json`` takes."""
        data = {
            "key": dict(self.key),
            "products": {kind: {n: asdict(m) for n, m in passes.items()} for kind, passes in self.products.items()},
            "forward": {name: asdict(curve) for name, curve in self.forward.items()},
            "backward": {name: asdict(curve) for name, curve in self.backward.items()},
            "fresh": asdict(self.fresh),
            "expected_error": self.expected_error,
            "seconds_taken": self.seconds_taken,
            "others": self.others,
        }
        return json.dumps(data)

    @staticmethod
    def from_json(text: str) -> CostModel:
        """What ``to_json`` gave."""
        data = json.loads(text)
        curves = {side: {name: _curve(curve) for name, curve in data[side].items()} for side in ("forward", "backward")}
        products = {
            kind: {
                name: PassModel(model["flop_s"], model["byte_s"], Polynomial.from_dict(model["ratio"]))
                for name, model in passes.items()
            }
            for kind, passes in data["products"].items()
        }
        return CostModel(
            data["key"],
            products,
            curves["forward"],
            curves["backward"],
            _curve(data["fresh"]),
            data["expected_error"],
            data["seconds_taken"],
            data["others"],
        )


def _curve(data: Mapping[str, Any]) -> Curve:
    return Curve(tuple(data["bytes"]), tuple(data["seconds"]))
