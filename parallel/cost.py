"""What layers cost in seconds, wherever the figures come from; and an estimate that is enough to split a model evenly.

Takes the ``LayerGraph``; gives numbers by position in ``graph.layers``. Costs are estimated from a data sheet, from a
calibration of the device, or measured layer by layer; ``stage_cost`` makes of them what ``simulate`` needs.
"""

from __future__ import annotations

from dataclasses import dataclass

from parallel.graph import INPUT, OUTPUT, LayerGraph

NOMINAL_FLOPS = 10e12
"""Per second."""
NOMINAL_BANDWIDTH = 500e9
"""Bytes per second between memory and arithmetic."""
NOMINAL_COPY_BANDWIDTH = 20e9
"""Bytes per second between the device and the host."""
PASSES = 3
"""Forward, and backward with its gradients of inputs and of parameters."""


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Of one microbatch of the traced shape.

    Attributes:
        backward_s: of the whole backward pass.
        backward_input_s: of its half that other stages wait for.
    """

    forward_s: float
    backward_s: float
    backward_input_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Costs:
    """Of every layer of a graph, by position.

    Attributes:
        source: how they were found, for people to read.
        expected_error: relative, the median over layers; None where nobody knows.
    """

    layers: tuple[LayerCost, ...]
    source: str
    expected_error: float | None = None

    @property
    def seconds(self) -> list[float]:
        """Forward and backward, by position."""
        return [cost.seconds for cost in self.layers]


def equal_cost(graph: LayerGraph) -> list[float]:
    """Estimated seconds per layer, forward and backward, for the traced shapes.

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
