"""Runs that ranks recompute under a number of bytes each: they fit, nearly fill them, and run."""

from __future__ import annotations

import pytest

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import partition_equal
from parallel.memory.policy import ActivationPolicy, segments_of
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.recompute_ranks import chosen_runs
from parallel.memory.stage_memory import StageMemory
from parallel.schedule.registry import build_schedule, mesh_for
from parallel.trace.trace import trace
from tests.parallel.memory.test_rank_bytes import net


def unet() -> LayerGraph:
    return trace(net("unet_w8")[0], (1, 3, 128, 128)).graph


def seconds(graph: LayerGraph) -> list[float]:
    return [1e-9 * layer.flops + 1e-9 * layer.output_bytes + 1e-6 for layer in graph.layers]


@pytest.mark.parametrize("name", ["single", "gpipe", "1f1b", "bidirectional", "interleaved"])
def test_ranks_fit(name: str) -> None:
    graph = unet()
    mesh = mesh_for(name, groups=1, depth=1 + (name != "single"), chunks=1 + (name == "interleaved"))
    partition, schedule = partition_equal(graph, mesh.stages), build_schedule(name, mesh, 4)

    def fullest(policy: ActivationPolicy) -> int:
        stages = StageMemory(graph).kept(partition, policy)
        return max(rank.total for rank in rank_bytes(stages, mesh, schedule, slots=2))

    full = fullest(ActivationPolicy())
    limit = 0.8 * full
    runs = chosen_runs(partition, mesh, schedule, seconds(graph), limit, slots=2)
    assert runs
    assert 0.9 * limit < fullest(ActivationPolicy("optimal", runs)) <= limit
    assert chosen_runs(partition, mesh, schedule, seconds(graph), full, slots=2) == ()
    most = max(stage.parameters for stage in StageMemory(graph).kept(partition))
    assert chosen_runs(partition, mesh, schedule, seconds(graph), 4 * most, slots=2) is None
    again = [
        each for k in range(partition.depth) for each in segments_of(partition, k, ActivationPolicy("optimal", runs))
    ]
    assert sum(segment.recompute for segment in again) == len(runs)
