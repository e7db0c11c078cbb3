"""From a graph to the places where it hangs by one value: what is alive between any two layers.

Takes a ``LayerGraph``; gives, for every position, the values made before it and used from it on. Where there is only
one, that value dominates all that follows and postdominates all before: between two such places lies a region with a
single entry and a single exit (Johnson, Pearson and Pingali, The program structure tree, PLDI 1994). Layers stand in
topological order and all lie on ways from input to output, so that one sweep finds what a dominator tree would.
"""

from __future__ import annotations

from itertools import accumulate

from parallel.graph.layers import INPUT, Layer, LayerGraph


def carries(layer: Layer) -> bool:
    """The layer's value is data on its way through the model: a tensor that is no parameter."""
    return layer.kind == INPUT or (layer.kind != "get_attr" and layer.output_bytes > 0)


def values_across(graph: LayerGraph, position: int) -> tuple[str, ...]:
    """Names of the values made before ``position`` and used from it on, in the order they are made."""
    return tuple(graph.layers[maker].name for maker in range(position) if graph.last_uses[maker] >= position)


def bytes_across(graph: LayerGraph) -> list[int]:
    """For every position, one past the last included, the bytes of the values across it, for the traced shapes."""
    return _swept(graph, [layer.output_bytes for layer in graph.layers])


def articulations(graph: LayerGraph) -> list[int]:
    """Positions across which a single value carries all data; increasing."""
    across = _swept(graph, [int(carries(layer)) for layer in graph.layers])
    return [position for position in range(1, len(graph.layers)) if across[position] == 1]


def _swept(graph: LayerGraph, weights: list[int]) -> list[int]:
    """For every position, the sum of ``weights`` of the values across it."""
    change = [0] * (len(graph.layers) + 1)
    for position, (last, weight) in enumerate(zip(graph.last_uses, weights, strict=True)):
        change[position + 1] += weight
        change[last + 1] -= weight
    return list(accumulate(change))
