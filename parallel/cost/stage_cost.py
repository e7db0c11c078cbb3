"""Seconds of the layers of a graph, and from them the costs of the stages of a partition and of the links between them.

``Costs`` come from a data sheet, from a calibration of the device, or are measured layer by layer.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass

from parallel.cost.cluster import LinkSpec
from parallel.graph.layers import RANDOM_STATE
from parallel.graph.partition import NOMINAL_COPY_BANDWIDTH, Partition, equal_cost
from parallel.schedule.timeline import LinkCost, StageCost


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Seconds of a layer for one microbatch of the traced shape; other stages wait for ``backward_input_s``, a half."""

    forward_s: float
    backward_s: float
    backward_input_s: float

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Costs:
    """Seconds of every layer of a graph, by position.

    Attributes:
        source: how they were found, for people to read.
        expected_error: relative, the median over layers; None where it is not known.
    """

    layers: tuple[LayerCost, ...]
    source: str
    expected_error: float | None = None

    @functools.cached_property
    def seconds(self) -> list[float]:
        """Forward and backward, by position."""
        return [cost.seconds for cost in self.layers]


def stage_costs(partition: Partition, costs: Costs) -> list[StageCost]:
    """Return the costs of every stage."""
    stages = []
    for stage, begin in enumerate(partition.starts):
        layers = partition.layers_of(stage)
        own = costs.layers[begin : begin + len(layers)]
        backward = sum(cost.backward_s for cost in own)
        backward_input = sum(cost.backward_input_s for cost in own)
        saved = dict(entry for layer in layers for entry in layer.saved)
        forward, weight = sum(cost.forward_s for cost in own), backward - backward_input
        stages.append(StageCost(forward, backward, backward_input, weight, sum(saved.values())))
    return stages


def nominal_costs(partition: Partition) -> list[StageCost]:
    """Return the costs of every stage on a nominal device and host: the same on every rank."""
    layers = [LayerCost(seconds / 3, 2 * seconds / 3, seconds / 3) for seconds in equal_cost(partition.graph)]
    stages = stage_costs(partition, Costs(tuple(layers), "nominal"))
    copies = [cost.activation_bytes / NOMINAL_COPY_BANDWIDTH for cost in stages]
    return [dataclasses.replace(cost, out_s=s, back_s=s) for cost, s in zip(stages, copies, strict=True)]


def link_costs(
    partition: Partition, link_between: Callable[[int, int], LinkSpec | None]
) -> dict[tuple[int, int], LinkCost]:
    """Return (source stage, target stage) -> cost, for every two that exchange anything.

    Args:
        link_between: the link from one stage to another; None where they are on one rank and nothing travels.
    """
    links = {}
    for (source, target), flows_back in partition.links.items():
        link = link_between(source, target)
        if link is None:
            links[source, target] = LinkCost(0.0, 0.0 if flows_back else None)
            continue
        edges = [edge for edge in partition.edges if (edge.source, edge.target) == (source, target)]
        values = [edge for edge in edges if edge.value != RANDOM_STATE]
        forward = sum(partition.graph.by_name[edge.value].output_bytes for edge in values)
        backward = sum(partition.graph.by_name[edge.value].output_bytes for edge in values if edge.differentiable)
        links[source, target] = LinkCost(
            link.latency_s * len(edges) + forward / link.bandwidth,
            link.latency_s + backward / link.bandwidth if flows_back else None,
        )
    return links
