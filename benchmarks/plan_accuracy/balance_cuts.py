"""The partitions that are compared, and what a cost model says of their slowest stage.

Takes a graph and its costs; gives partitions by name: planned, with as many layers in each stage, and torchgpipe's.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.plan_accuracy.published_balances import published_cuts
from parallel.graph.layers import RANDOM_STATE, LayerGraph
from parallel.graph.partition import Partition, cut_positions, partition_at
from parallel.plan.balance import partition_optimal

PLANNED, EQUAL, PUBLISHED = "planned", "equal layers", "published"


def partitions(
    name: str, graph: LayerGraph, stages: int, seconds: Sequence[float], link_s: float
) -> dict[str, Partition]:
    """All three.

    Args:
        name: of the model, as ``published_cuts`` knows it.
        seconds: of each layer, forward and backward.
        link_s: per byte between two stages.
    """
    return {
        PLANNED: partition_optimal(graph, stages, seconds, link_s=link_s),
        EQUAL: equal_layers(graph, stages),
        PUBLISHED: partition_at(graph, published_cuts(name, stages)),
    }


def equal_layers(graph: LayerGraph, stages: int) -> Partition:
    """Stages of as many layers each, as near as cuts may fall."""
    allowed = cut_positions(graph)
    asked = [len(graph.layers) * k / stages for k in range(1, stages)]
    starts = [min(allowed, key=lambda position: abs(position - place)) for place in asked]
    assert len(set(starts)) == len(starts), f"{graph} has too few layers for {stages} stages"
    return Partition(graph, (0, *starts))


def slowest_s(partition: Partition, seconds: Sequence[float], link_s: float) -> float:
    """Seconds of the slowest stage with what it receives and the gradients that it gives back."""
    loads = []
    for stage, (begin, end) in enumerate(
        zip(partition.starts, (*partition.starts[1:], len(partition.graph.layers)), strict=True)
    ):
        received = [edge for edge in partition.edges if edge.target == stage and edge.value != RANDOM_STATE]
        travels = sum(partition.graph.by_name[edge.value].output_bytes * (1 + edge.differentiable) for edge in received)
        loads.append(sum(seconds[begin:end]) + link_s * travels)
    return max(loads)
