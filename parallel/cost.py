"""Seconds a layer may take, from what it computes and moves: enough to split a model evenly without running it.

Takes the ``LayerGraph``; gives one number per layer. The device is a nominal one, so that every rank of every machine
finds the same split; only ratios matter.
"""

from __future__ import annotations

from parallel.graph import INPUT, OUTPUT, LayerGraph

NOMINAL_FLOPS = 10e12
"""Per second."""
NOMINAL_BANDWIDTH = 500e9
"""Bytes per second between memory and arithmetic."""
PASSES = 3
"""Forward, and backward with its gradients of inputs and of parameters."""


def equal_cost(graph: LayerGraph) -> list[float]:
    """Estimated seconds per layer, forward and backward, for the traced shapes."""
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
