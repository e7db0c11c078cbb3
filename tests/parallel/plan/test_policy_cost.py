"""Seconds that computing again and moving add, worked out by hand on a chain of four equal layers."""

from __future__ import annotations

import math

import pytest

from parallel.cost.stage_cost import Costs, LayerCost, stage_costs
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.liveness import pieces
from parallel.memory.policy import MIB, ActivationPolicy, segments_of
from parallel.plan.policy_cost import MovedBytes, moved_bytes, policy_costs
from parallel.schedule.timeline import StageCost

RUNS = (("x", "conv1"),)


def chain() -> LayerGraph:
    """x -> conv0 -> ... -> conv3: each keeps its input, 2 MiB, and ``conv3`` besides 1 KiB."""
    found = [Layer("x", INPUT, (), differentiable=False, output_bytes=2 * MIB, output_storages=((0, 2 * MIB),))]
    for n in range(4):
        saved = ((n, 2 * MIB), *(((9, 1024),) if n == 3 else ()))
        found.append(
            Layer(
                f"conv{n}",
                "Conv2d",
                (found[-1].name,),
                module=f"conv{n}",
                output_bytes=2 * MIB,
                saved=saved,
                output_storages=((n + 1, 2 * MIB),),
            )
        )
    found.append(Layer("output", OUTPUT, (found[-1].name,), output_bytes=2 * MIB, output_storages=((4, 2 * MIB),)))
    return LayerGraph(tuple(found))


GRAPH = chain()
COSTS = Costs((LayerCost(0, 0, 0), *[LayerCost(1.0, 2.0, 1.0)] * 4, LayerCost(0, 0, 0)), "test")


def cost(
    policy: ActivationPolicy, *, starts: tuple[int, ...] = (0,), copy_s: float = 0.0, beside: bool = False
) -> StageCost:
    """Of the first stage; ``copy_s`` of a piece."""
    partition = Partition(GRAPH, starts)
    bandwidth = 2 * MIB / copy_s if copy_s else math.inf
    given = stage_costs(partition, COSTS)
    return policy_costs(partition, given, COSTS, policy, copy_bandwidth=bandwidth, beside=beside)[0]


def test_nothing_is_added_where_all_is_kept() -> None:
    assert cost(ActivationPolicy()) == stage_costs(Partition(GRAPH, (0,)), COSTS)[0]
    assert cost(ActivationPolicy("stage")).backward_s == 8  # an action of its own computes again


def test_computing_again_is_part_of_the_backward_pass() -> None:
    found = cost(ActivationPolicy("optimal", RUNS))
    assert (found.forward_s, found.backward_s, found.backward_input_s) == (4, 8 + 2, 4 + 2)
    assert cost(ActivationPolicy("block")).backward_s == 8 + 3  # what is last is kept
    assert cost(ActivationPolicy("optimal", (("conv2", "conv2"),)), starts=(0, 3)).backward_s == 4  # of another stage


def moved(policy: ActivationPolicy, starts: tuple[int, ...] = (0,)) -> MovedBytes:
    return moved_bytes(pieces(GRAPH), segments_of(Partition(GRAPH, starts), 0, policy), policy)


def test_what_is_moved() -> None:
    everything = ActivationPolicy(offload="overlap")
    assert moved(everything) == MovedBytes(8 * MIB, 0)  # without what is small
    assert moved(everything, (0, 3)) == MovedBytes(4 * MIB, 0)
    assert moved(ActivationPolicy(offload="overlap", smallest=1)) == MovedBytes(8 * MIB + 1024, 0)
    # The model's input enters the run, conv2 and conv3 keep what they are given; conv1's input is made again.
    assert moved(ActivationPolicy("optimal", RUNS, "overlap")) == MovedBytes(6 * MIB, 2 * MIB)
    assert moved(ActivationPolicy("stage", offload="overlap"), (0, 3)) == MovedBytes(2 * MIB, 2 * MIB)


def test_copies_on_a_cpu_are_added() -> None:
    found = cost(ActivationPolicy(offload="overlap"), copy_s=0.5)
    assert (found.forward_s, found.backward_s) == (4 + 2, 8 + 2)
    again = cost(ActivationPolicy("optimal", RUNS, "overlap"), copy_s=0.5)
    assert (again.forward_s, again.backward_s) == (4 + 1.5, 8 + 2 + 1.5 + 1)


@pytest.mark.parametrize(("copy_s", "expected"), [(0.5, (4, 8)), (1.0, (4, 8)), (1.5, (6, 8)), (3.0, (12, 12))])
def test_copies_beside_a_gpu_count_where_they_take_longer(copy_s: float, expected: tuple[float, float]) -> None:
    found = cost(ActivationPolicy(offload="overlap"), copy_s=copy_s, beside=True)
    assert (found.forward_s, found.backward_s) == expected
