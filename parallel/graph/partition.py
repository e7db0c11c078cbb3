"""Partitions of a model: which layers each stage has, and what passes between the stages.

A partition is a list of cuts through the graph's order, so that every value flows from earlier stages to later ones. A
value that several stages use is sent to each of them directly by the stage that made it. Cuts come from a list
(``partition_at``) or are placed so that the slowest stage is as fast as it can be (``partition_equal``).
"""

from __future__ import annotations

import bisect
import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt

from parallel.graph.layers import INPUT, OUTPUT, RANDOM_STATE, Layer, LayerGraph

Loads = npt.NDArray[np.float64]


def carries_data(layer: Layer) -> bool:
    """Return whether the layer's value is data on its way through the model: a tensor that is no parameter."""
    return layer.kind == INPUT or (layer.kind != "get_attr" and layer.output_bytes > 0)


def values_across(graph: LayerGraph, position: int) -> tuple[str, ...]:
    """Return names of the values made before ``position`` and used from it on, in the order they are made."""
    return tuple(graph.layers[k].name for k in range(position) if graph.last_uses[k] >= position)


def bytes_across(graph: LayerGraph) -> list[int]:
    """Return the bytes of the values across every position, one past the last included, for the traced shapes."""
    return _swept(graph, [layer.output_bytes for layer in graph.layers])


def single_value_cuts(graph: LayerGraph) -> list[int]:
    """Return the positions across which a single value carries all data; increasing.

    Such a value dominates all that follows and postdominates all before: between two of them lies a region with a
    single entry and exit (Johnson, Pearson and Pingali, The program structure tree, PLDI 1994). Layers stand in
    topological order and all lie on ways from input to output, so that one sweep finds what a dominator tree would.
    """
    across = _swept(graph, [int(carries_data(layer)) for layer in graph.layers])
    return [position for position in range(1, len(graph.layers)) if across[position] == 1]


def _swept(graph: LayerGraph, weights: list[int]) -> list[int]:
    """Return for every position the sum of ``weights`` of the values across it."""
    change = [0] * (len(graph.layers) + 1)
    for position, (last, weight) in enumerate(zip(graph.last_uses, weights, strict=True)):
        change[position + 1] += weight
        change[last + 1] -= weight
    return list(accumulate(change))


NOMINAL_FLOPS = 10e12
"""Per second."""
NOMINAL_BANDWIDTH = 500e9
"""Bytes per second between memory and arithmetic."""
NOMINAL_COPY_BANDWIDTH = 20e9
"""Bytes per second between the device and the host."""
PASSES = 3
"""Forward, and backward with its gradients of inputs and of parameters."""


def equal_cost(graph: LayerGraph) -> list[float]:
    """Return estimated seconds per layer, forward and backward, for the traced shapes.

    The device is a nominal one, so that every rank of every machine finds the same split; only ratios matter.
    """
    return [
        0.0
        if layer.kind in (INPUT, OUTPUT, "get_attr")
        else PASSES
        * (
            layer.flops / NOMINAL_FLOPS
            + (layer.output_bytes + layer.param_bytes + sum(graph.by_name[name].output_bytes for name in layer.inputs))
            / NOMINAL_BANDWIDTH
        )
        for layer in graph.layers
    ]


@dataclass(frozen=True, slots=True, order=True)
class Edge:
    """A ``value`` that stage ``source`` makes and sends to stage ``target``, which uses it."""

    source: int
    target: int
    value: str
    differentiable: bool


@dataclass(frozen=True)
class Partition:
    """Stages of a model.

    Attributes:
        starts: position in ``graph.layers`` of the first layer of each stage; the first is 0.
    """

    graph: LayerGraph
    starts: tuple[int, ...]

    @property
    def depth(self) -> int:
        """Return the number of stages, D."""
        return len(self.starts)

    @functools.cached_property
    def edges(self) -> tuple[Edge, ...]:
        """Return the edges between stages, by source, target and value."""
        edges = {
            Edge(source, target, value, self.graph.flows_back(value))
            for target in range(self.depth)
            for layer in self.layers_of(target)
            for value in layer.inputs
            if (source := self.stage_of(value)) < target
        }
        drawing = [stage for stage in range(self.depth) if any(layer.random for layer in self.layers_of(stage))]
        edges |= {Edge(source, target, RANDOM_STATE, False) for source, target in pairwise(drawing)}
        return tuple(sorted(edges))

    @functools.cached_property
    def links(self) -> Mapping[tuple[int, int], bool]:
        """Return (source, target) -> whether a gradient comes back, for all stages between which a value passes."""
        links: dict[tuple[int, int], bool] = {}
        for edge in self.edges:
            link = (edge.source, edge.target)
            links[link] = links.get(link, False) or edge.differentiable
        return links

    def stage_of(self, name: str) -> int:
        """Return the stage that makes the value ``name``."""
        return bisect.bisect_right(self.starts, self.graph.position[name]) - 1

    def layers_of(self, stage: int) -> tuple[Layer, ...]:
        """Return the layers of ``stage``, in the order they run."""
        end = self.starts[stage + 1] if stage + 1 < self.depth else len(self.graph.layers)
        return self.graph.layers[self.starts[stage] : end]

    def inputs_of(self, stage: int) -> tuple[str, ...]:
        """Return names of the values that ``stage`` is given, in the order of ``edges``, or the model's inputs."""
        if stage == 0:
            return tuple(layer.name for layer in self.graph.layers if layer.kind == INPUT)
        return tuple(edge.value for edge in self.edges if edge.target == stage and edge.value != RANDOM_STATE)

    def outputs_of(self, stage: int) -> tuple[str, ...]:
        """Return names of the values of ``stage`` that others use, as they are made, or of the model's output."""
        if stage == self.depth - 1:
            return (self.graph.layers[-1].name,)
        sent = {edge.value for edge in self.edges if edge.source == stage}
        return tuple(layer.name for layer in self.layers_of(stage) if layer.name in sent)

    def bytes_over(self, source: int, target: int) -> int:
        """Return the bytes that one microbatch sends from ``source`` to ``target``, for the traced shapes."""
        return sum(
            self.graph.by_name[edge.value].output_bytes
            for edge in self.edges
            if (edge.source, edge.target) == (source, target) and edge.value != RANDOM_STATE
        )


def cut_positions(graph: LayerGraph) -> list[int]:
    """Return positions at which a stage may begin: the model's input alone, or its output alone, is no stage."""
    return [position for position in range(2, len(graph.layers) - 1) if graph.can_cut(position)]


def partition_at(graph: LayerGraph, cuts: Sequence[str]) -> Partition:
    """Return the partition whose stages, after the first, begin at ``cuts``.

    Args:
        cuts: names of layers, or paths of modules ("layer3", "layer2.0.conv1"), in the order they run.

    Raises:
        ValueError: all that is wrong with the list: unknown names, cuts out of order, cuts where none may fall.
    """
    positions = _positions_by_name(graph)
    allowed = cut_positions(graph)
    faults, starts = [], [0]
    for cut in cuts:
        if cut not in positions:
            close = difflib.get_close_matches(cut, positions, n=3)
            faults.append(
                f"{cut!r} is no layer or module of the model" + (f"; close are {', '.join(close)}" if close else "")
            )
            continue
        start = positions[cut]
        if not graph.can_cut(start):
            first, last = next(r for r in graph.inseparable if r[0] < start <= r[1])
            faults.append(
                f"no cut may fall before {cut!r}: a value is changed in place, or parameters are shared, from "
                f"{graph.layers[first].name} to {graph.layers[last].name}{_nearest(graph, allowed, start)}"
            )
        elif start not in allowed:
            faults.append(f"a cut before {cut!r} leaves a stage without layers{_nearest(graph, allowed, start)}")
        if start <= starts[-1] > 0:
            faults.append(f"{cut!r} does not come after the cut before it, {graph.layers[starts[-1]].name!r}")
        starts.append(start)
    if faults:
        raise ValueError(f"the cuts {list(cuts)} do not split the model: {'; '.join(faults)}")
    return Partition(graph, tuple(starts))


def partition_equal(graph: LayerGraph, stages: int, costs: Sequence[float] | None = None) -> Partition:
    """Return the partition into ``stages`` whose slowest stage is fastest; of those, the one with fewest bytes over its
    cuts. Exact over all places where a cut may fall.

    Args:
        costs: seconds of each layer, not negative; ``equal_cost`` unless given.

    Raises:
        ValueError: the model cannot be cut into so many stages.
    """
    allowed = cut_positions(graph)
    if not 1 <= stages <= len(allowed) + 1:
        raise ValueError(too_many(graph, len(allowed) + 1, stages))
    costs = equal_cost(graph) if costs is None else costs
    ends = [0, *allowed, len(graph.layers)]
    upto = np.array(list(accumulate(costs, initial=0.0)))[ends]
    loads = np.where(np.tri(len(ends), dtype=bool), np.inf, upto - upto[:, None])
    crossing = np.broadcast_to(np.array(bytes_across(graph), float)[ends, None], loads.shape)
    _, starts = best_chain(lambda _, rows: loads[rows], stages, crossing)
    return Partition(graph, tuple(ends[start] for start in starts))


def best_chain(loads: Callable[[int, slice], Loads], stages: int, bytes_: Loads) -> tuple[float, list[int]]:
    """Return the cuts of places in line into ``stages`` windows [i, j): first the smallest possible largest load, then,
    among all cuts that reach it, the fewest bytes.

    Args:
        loads: takes a stage and places, gives those rows of its (P, P) matrix; infinite where i >= j, and
            for windows that may not be used.
        bytes_: (P, P); the sum over the stages breaks ties.

    Returns:
        The largest load, infinite where no cuts will do, and the place where each stage begins.
    """
    best = loads(0, slice(0, 1))[0]
    for stage in range(1, stages):
        reached = _reached(best)
        if reached.start == reached.stop:
            return np.inf, []
        best = np.maximum(best[reached, None], loads(stage, reached)).min(axis=0)
    limit = float(best[-1])
    if not np.isfinite(limit):
        return limit, []
    total, chosen = np.where(loads(0, slice(0, 1))[0] <= limit, bytes_[0], np.inf), []
    for stage in range(1, stages):
        reached = _reached(total)
        sums = np.where(loads(stage, reached) <= limit, total[reached, None] + bytes_[reached], np.inf)
        chosen.append(reached.start + sums.argmin(axis=0))
        total = sums.min(axis=0)
    starts, end = [], bytes_.shape[0] - 1
    for begin in reversed(chosen):
        end = int(begin[end])
        starts.append(end)
    return limit, [0, *reversed(starts)]


def _reached(best: Loads) -> slice:
    """Return the places from the first to the last that the stages so far can end at; nothing begins beyond."""
    places = np.flatnonzero(np.isfinite(best))
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


def too_many(graph: LayerGraph, most: int, stages: int) -> str:
    """Return the message that a model of at most ``most`` stages cannot have ``stages``, and why not."""
    text = (
        f"the model can be cut into 1 to {most} stages; got {stages}. A stage needs a layer of its own, and values "
        "changed in place and shared parameters hold layers together"
    )
    reasons = [f"{path} ({graph.classes.get(path, 'module')}): {why}" for path, why in graph.whole.items()]
    if reasons:
        text += (
            f". Modules that stay whole, of which the largest decides: {'; '.join(reasons)}. Move what such a line "
            "decides or switches into a submodule of its own inside of it, and the rest of the module is cut, too"
        )
    return text


def _positions_by_name(graph: LayerGraph) -> dict[str, int]:
    """Return the position of every name a cut can be given by; a layer's name goes before a module's path."""
    positions: dict[str, int] = {}
    for position, layer in enumerate(graph.layers):
        names = layer.scope.split(".")
        for length in range(1, len(names) + 1):
            if layer.scope:
                positions.setdefault(".".join(names[:length]), position)
    return positions | {layer.name: position for position, layer in enumerate(graph.layers)}


def _nearest(graph: LayerGraph, allowed: Sequence[int], start: int) -> str:
    below = [position for position in allowed if position < start][-1:]
    above = [position for position in allowed if position > start][:1]
    names = [graph.layers[position].name for position in (*below, *above)]
    return f"; the nearest places are before {' and before '.join(names)}" if names else "; no place is left"
