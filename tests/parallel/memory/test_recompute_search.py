"""Segments recomputed under a budget: against all plans of small graphs, in bytes and seconds on real models."""

from __future__ import annotations

import itertools
import random
import statistics
from itertools import pairwise

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import cut_positions
from parallel.memory.policy import ActivationPolicy, Segment
from parallel.memory.recompute_search import RecomputeSearch
from parallel.memory.stage_memory import StageMemory
from parallel.trace.trace import trace
from tests.helpers.random_graphs import random_graph
from tests.parallel.memory.test_rank_bytes import net

Plan = tuple[Segment, ...]


def peak(graph: LayerGraph, plan: Plan, in_flight: int) -> int:
    stage = StageMemory(graph).of_segments(plan, ActivationPolicy("optimal"))
    return (in_flight - 1) * stage.activations + max(stage.forward, stage.backward)


def choose_recompute(
    graph: LayerGraph, start: int, stop: int, forward_s: list[float], budget: float, in_flight: int = 1
) -> Plan | None:
    return RecomputeSearch(graph, start, stop, forward_s, in_flight, StageMemory(graph)).best(budget)


def seconds(plan: Plan, forward_s: list[float]) -> float:
    return sum(sum(forward_s[s.start : s.stop]) for s in plan if s.recompute)


def all_plans(graph: LayerGraph) -> list[Plan]:
    found: list[Plan] = []
    inner = cut_positions(graph)
    for chosen in itertools.chain.from_iterable(itertools.combinations(inner, k) for k in range(len(inner) + 1)):
        bounds = list(pairwise([0, *chosen, len(graph.layers)]))
        for kinds in itertools.product((False, True), repeat=len(bounds)):
            found.append(tuple(Segment(*bound, kind) for bound, kind in zip(bounds, kinds, strict=True)))
    return found


def test_against_all_plans_of_small_graphs() -> None:
    gaps, missed = [], 0
    for seed in range(10):
        graph, draw = random_graph(seed), random.Random(seed)
        forward_s = [draw.choice([1.0, 2.0, 5.0]) for _ in graph.layers]
        in_flight = draw.randint(1, 3)
        every = [(seconds(plan, forward_s), peak(graph, plan, in_flight)) for plan in all_plans(graph)]
        least, most = min(size for _, size in every), every[0][1]
        for part in (0.1, 0.4, 0.8):
            budget = least + part * (most - least)
            plan = choose_recompute(graph, 0, len(graph.layers), forward_s, budget, in_flight)
            best = min(time for time, size in every if size <= budget)
            if plan is None:
                missed += 1
                continue
            assert peak(graph, plan, in_flight) <= budget
            assert [s.start for s in plan[1:]] == [s.stop for s in plan[:-1]]
            gaps.append((seconds(plan, forward_s) - best) / sum(forward_s))
    assert missed <= 1
    assert min(gaps) >= -1e-12
    assert sum(gap < 1e-9 for gap in gaps) >= 0.85 * len(gaps)
    assert statistics.mean(gaps) < 0.035


def test_less_memory_takes_more_time() -> None:
    graph = trace(net("unet_w8")[0], (1, 3, 128, 128)).graph
    forward_s = [1e-9 * layer.flops + 1e-9 * layer.output_bytes + 1e-6 for layer in graph.layers]
    count = len(graph.layers)
    blocks = tuple(Segment(k, min(k + 6, count), False) for k in range(0, count, 6))
    full, spent = peak(graph, blocks, 2), []
    for part in (1.1, 0.9, 0.75, 0.6):
        plan = choose_recompute(graph, 0, count, forward_s, part * full, in_flight=2)
        assert plan is not None
        assert peak(graph, plan, 2) <= part * full
        spent.append(seconds(plan, forward_s) / sum(forward_s))
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert 0 < spent[1] < 0.15, spent
    assert spent[3] < 0.6, spent


def test_a_window_of_a_model_and_no_way() -> None:
    graph = trace(*net("unet_w8")).graph
    start, stop = 5, len(graph.layers) - 9
    forward_s = [1.0] * len(graph.layers)
    plan = choose_recompute(graph, start, stop, forward_s, 0.8 * peak(graph, (Segment(start, stop, False),), 3), 3)
    assert plan is not None
    assert (plan[0].start, plan[-1].stop) == (start, stop)
    assert any(segment.recompute for segment in plan)
    assert choose_recompute(graph, start, stop, forward_s, 1000.0, 3) is None
