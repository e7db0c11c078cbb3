"""What is remembered of stages, and worked out for all pieces of memory at once, is as worked out piece by piece."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from app.planning.workload import Workload
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions
from parallel.memory.lifetimes import Lifetimes, passes_of
from parallel.memory.liveness import pieces
from parallel.memory.policy import ActivationPolicy, Segment
from parallel.memory.stage_bytes import StageBytes
from parallel.memory.stage_memory import StageMemory
from tests.helpers.random_graphs import random_graph

RULES = [
    ActivationPolicy(),
    ActivationPolicy("stage"),
    ActivationPolicy("block"),
    ActivationPolicy(offload="overlap", smallest=0),
    ActivationPolicy("block", offload="overlap", smallest=0, ahead=60),
    ActivationPolicy("block", offload="overlap"),
]


def some_places(draw: random.Random, graph: LayerGraph) -> list[int]:
    """Where stages or segments may begin, both ends among them."""
    inner = cut_positions(graph)
    return sorted({0, *draw.sample(inner, draw.randint(0, len(inner))), len(graph.layers)})


def one_by_one(graph: LayerGraph, segments: list[Segment]) -> StageBytes:
    found = pieces(graph)
    lives = Lifetimes(found, passes_of(graph, segments, found), ActivationPolicy("optimal"))
    return lives.stage_bytes(graph, StageMemory(graph).plain((segments[0].start, segments[-1].stop)))


@pytest.mark.parametrize("seed", range(40))
def test_any_segments_of_any_stage(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_graph(seed, 24)
    memory = StageMemory(graph)
    for _ in range(10):
        places = some_places(draw, graph)
        first, last = sorted(draw.sample(range(len(places)), 2))
        segments = [Segment(*bound, draw.random() < 0.6) for bound in pairwise(places[first : last + 1])]
        assert memory.of_segments(segments, ActivationPolicy("optimal")) == one_by_one(graph, segments)


@pytest.mark.parametrize("model", ["resnet18", "unet_w4", "torchvision:densenet121"])
def test_any_segments_of_real_models(model: str) -> None:
    draw = random.Random(7)
    graph = Workload(model, 64, 2).trace()
    memory = StageMemory(graph)
    for _ in range(4):
        segments = [Segment(*bound, draw.random() < 0.6) for bound in pairwise(some_places(draw, graph))]
        assert memory.of_segments(segments, ActivationPolicy("optimal")) == one_by_one(graph, segments)


@pytest.mark.parametrize("seed", range(20))
def test_stages_of_partitions_under_rules(seed: int) -> None:
    draw = random.Random(seed)
    graph = random_graph(seed, 24)
    memory = StageMemory(graph)
    for rule in RULES * 2:  # the second time they are remembered
        partition = Partition(graph, tuple(some_places(draw, graph)[:-1]))
        stages = memory.kept(partition, rule)
        assert stages == StageMemory(graph).kept(partition, rule)
        assert memory.host(partition, rule) == StageMemory(graph).host(partition, rule)
