"""What the layers of a graph cost in seconds, by position in ``graph.layers``, wherever the figures come from.

Costs are estimated from a data sheet, from a calibration of the device, or measured layer by layer; ``stage_cost``
makes of them what ``simulate`` needs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerCost:
    """What a layer costs for one microbatch of the traced shape.

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
    """What every layer of a graph costs, by position.

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
