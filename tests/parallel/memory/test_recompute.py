"""Segments recomputed under a number of bytes: against all plans of small graphs, on stages and ranks of models."""

from __future__ import annotations

import functools
import itertools
import random
import statistics
from itertools import pairwise

import pytest

from parallel.graph.blocks import block_cuts
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions, partition_equal
from parallel.memory.policy import ActivationPolicy, Segment, segments_of
from parallel.memory.rank_bytes import rank_bytes
from parallel.memory.recompute_search import UNKNOWN, RecomputeSearch, chosen_runs
from parallel.memory.stage_bytes import StageMemory
from parallel.schedule.registry import build_schedule, mesh_for
from parallel.trace.trace import trace
from tests.helpers.lanes import long_where
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


def test_no_segment_that_fits_is_left_out_for_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    def chosen() -> list[Plan | None]:
        plans = []
        for seed, in_flight in itertools.product(range(12), (1, 3)):
            graph, draw = random_graph(seed), random.Random(seed)
            count, forward_s = len(graph.layers), [draw.choice([1.0, 2.0, 5.0]) for _ in graph.layers]
            most = peak(graph, (Segment(0, count, False),), in_flight)
            plans += [choose_recompute(graph, 0, count, forward_s, k / 8 * most, in_flight) for k in range(3, 8)]
        return plans

    quick = chosen()
    monkeypatch.setattr(RecomputeSearch, "_kept_alone", lambda *_: -UNKNOWN)
    assert quick == chosen()


def test_less_memory_takes_more_time() -> None:
    graph, forward_s = large()
    count = len(graph.layers)
    blocks = tuple(Segment(k, min(k + 6, count), False) for k in range(0, count, 6))
    full, spent = peak(graph, blocks, 2), []
    for part in (1.1, 0.9, 0.75, 0.6):
        plan = choose_recompute(graph, 0, count, forward_s, part * full, in_flight=2)
        assert peak(graph, plan, 2) <= part * full
        spent.append(seconds(plan, forward_s) / sum(forward_s))
    assert spent[0] == 0.0
    assert spent == sorted(spent)
    assert 0 < spent[1] < 0.15, spent
    assert spent[3] < 0.6, spent


def test_a_window_of_a_model_and_no_way() -> None:
    graph = unet(1).graph
    start, stop = 5, len(graph.layers) - 9
    forward_s = [1.0] * len(graph.layers)
    plan = choose_recompute(graph, start, stop, forward_s, 0.8 * peak(graph, (Segment(start, stop, False),), 3), 3)
    assert (plan[0].start, plan[-1].stop) == (start, stop)
    assert any(segment.recompute for segment in plan)
    assert choose_recompute(graph, start, stop, forward_s, 1000.0, 3) is None


@functools.cache
def large() -> tuple[LayerGraph, list[float]]:
    graph = trace(net("unet_w8")[0], (1, 3, 128, 128)).graph
    return graph, [1e-9 * layer.flops + 1e-9 * layer.output_bytes + 1e-6 for layer in graph.layers]


SCHEDULES = ("single", "gpipe", "1f1b", "bidirectional", "interleaved")


@pytest.mark.parametrize("name", long_where(SCHEDULES, "single", "gpipe"))
def test_ranks_fit(name: str) -> None:
    graph, forward_s = large()
    mesh = mesh_for(name, groups=1, depth=1 + (name != "single"), chunks=1 + (name == "interleaved"))
    partition, schedule = partition_equal(graph, mesh.stages), build_schedule(name, mesh, 4)

    def fullest(policy: ActivationPolicy) -> int:
        stages = StageMemory(graph).kept(partition, policy)
        return max(rank.total for rank in rank_bytes(stages, mesh, schedule, slots=2))

    full = fullest(ActivationPolicy())
    limit = 0.8 * full
    runs = chosen_runs(partition, mesh, schedule, forward_s, limit, slots=2)
    assert runs
    assert 0.9 * limit < fullest(ActivationPolicy("optimal", runs)) <= limit
    assert chosen_runs(partition, mesh, schedule, forward_s, full, slots=2) == ()
    most = max(stage.parameters for stage in StageMemory(graph).kept(partition))
    assert chosen_runs(partition, mesh, schedule, forward_s, 4 * most, slots=2) is None
    again = [
        each for k in range(partition.depth) for each in segments_of(partition, k, ActivationPolicy("optimal", runs))
    ]
    assert sum(segment.recompute for segment in again) == len(runs)


@functools.cache
def unet(stages: int) -> Partition:
    return partition_equal(trace(*net("unet_w8")).graph, stages)


def every(partition: Partition, policy: ActivationPolicy) -> list[Segment]:
    return [each for stage in range(partition.depth) for each in segments_of(partition, stage, policy)]


@pytest.mark.parametrize("stages", [1, 3])
def test_they_cover_every_stage(stages: int) -> None:
    partition = unet(stages)
    found = every(partition, ActivationPolicy("block"))
    allowed = {0, *cut_positions(partition.graph), len(partition.graph.layers)}
    assert [each.start for each in found] == [0, *(each.stop for each in found[:-1])]
    assert found[-1].stop == len(partition.graph.layers)
    assert allowed.issuperset(each.start for each in found)
    assert set(partition.starts) <= {each.start for each in found}
    assert all(each.recompute for each in found[:-1])
    assert not found[-1].recompute  # its backward pass follows at once
    assert {each.start for each in found} == {*partition.starts, *block_cuts(partition.graph)}


def test_without_segments_a_stage_is_one() -> None:
    for policy in (ActivationPolicy(), ActivationPolicy("stage"), ActivationPolicy(offload="overlap")):
        assert [each.recompute for each in every(unet(3), policy)] == [False] * 3
        assert [each.start for each in every(unet(3), policy)] == list(unet(3).starts)


def test_chosen_runs_end_with_stages() -> None:
    graph = unet(1).graph
    places = cut_positions(graph)
    bounds = [(places[1], places[4]), (places[4], places[-3])]
    chosen = tuple((graph.layers[start].name, graph.layers[stop - 1].name) for start, stop in bounds)
    policy = ActivationPolicy("optimal", chosen)
    whole = every(unet(1), policy)
    assert [(each.start, each.stop) for each in whole if each.recompute] == bounds
    assert [each.recompute for each in whole] == [False, True, True, False]
    parts = [each for each in every(unet(3), policy) if each.recompute]
    cut = {place for start, stop in bounds for place in (start, stop)} | set(unet(3).starts[1:])
    assert {each.start for each in parts} | {each.stop for each in parts} == cut


def test_runs_that_are_not_in_the_model() -> None:
    partition = unet(1)
    last, first = partition.graph.layers[6].name, partition.graph.layers[2].name
    for run, message in [
        (("nowhere", last), "'nowhere' .* no layer of the model: plan anew"),
        ((last, first), f"'{last}' to '{first}' cannot be recomputed alone.*plan anew"),
    ]:
        with pytest.raises(ValueError, match=message):
            segments_of(partition, 0, ActivationPolicy("optimal", (run,)))
