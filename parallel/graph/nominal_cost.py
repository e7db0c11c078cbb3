"""Costs of layers on a nominal device: enough to split a model evenly, the same on every rank.

Takes the ``LayerGraph``; gives seconds by position in ``graph.layers``.
"""

from __future__ import annotations

from parallel.graph.layers import INPUT, OUTPUT, LayerGraph

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
