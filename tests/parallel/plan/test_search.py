"""The search: every strategy is there, the best one is found, and what does not fit is made to fit or told apart."""

from __future__ import annotations

import dataclasses
import itertools
import re

import pytest

from parallel.cost.cluster import FILL, LIBRARIES, Cluster, LinkSpec
from parallel.cost.stage_cost import Costs, LayerCost
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.memory.gathered import Sharding
from parallel.memory.policy import NO_BLOCKS, ActivationPolicy
from parallel.plan.candidates import ON_DEVICE, PLAIN, MemoryOptions, candidates
from parallel.plan.plan import PlanRow, best_of, too_small
from parallel.plan.search import Planner
from parallel.plan.stages import Task, communication_bytes
from parallel.schedule.registry import SCHEDULES
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE, Strategy
from tests.helpers.lanes import long_where

NAMES = (*WHOLE, *SCHEDULES)
LINK = LinkSpec("fast", 1e15, 0.0)
MIB = 1 << 20


def chain(layers: int = 12, saved: int = 8 * MIB, params: int = MIB) -> LayerGraph:
    """Equal layers, each keeping its input."""
    names, size = ["x", *(f"conv{n}" for n in range(layers))], {"output_bytes": saved}
    convs = (
        Layer(name, "Conv2d", (before,), module=name, param_bytes=params, saved=((n, saved),), **size)
        for n, (before, name) in enumerate(itertools.pairwise(names))
    )
    first, last = Layer("x", INPUT, (), differentiable=False, **size), Layer("output", OUTPUT, (names[-1],), **size)
    return LayerGraph((first, *convs, last))


def planner(
    memory: int = 1 << 40,
    batch: int = 8,
    graph: LayerGraph | None = None,
    copies: float = 1e6,
    host: float = 1e18,
    **more: str,
) -> Planner:
    graph = graph or chain()

    def estimate(tiles: int) -> Costs:
        cost = LayerCost(1.0 * tiles, 2.0 * tiles, 1.0 * tiles)
        return Costs((LayerCost(0, 0, 0), *[cost] * (len(graph.layers) - 2), LayerCost(0, 0, 0)), "test")

    whole = round((memory + LIBRARIES["cuda"]) / FILL["cuda"])
    cluster = Cluster("test", whole, 8, 8, LINK, LINK, 1e18, copy_bandwidth=copies, host_bytes=host)
    return Planner(Task(graph, estimate, batch, 2, more), cluster)


def test_every_strategy_has_a_row_and_ddp_wins_where_it_fits() -> None:
    rows = list(planner().search(NAMES, ranks=4))
    assert {row.strategy.name for row in rows} == set(NAMES) - {"single"}
    assert all(row.fits for row in rows)
    best = best_of(rows)
    assert best.strategy.name == "ddp"
    assert best.step_s == pytest.approx(2 * 12 * 3, rel=1e-3)


def test_a_pipeline_wins_where_the_model_does_not_fit_each_rank() -> None:
    """12 layers of 8 MiB a tile, and 48 MiB of parameters and what belongs to them: 144 MiB at least for all of it.
    Moving activations would make room, too, and takes far longer."""
    rows = list(planner(130 * MIB).search(NAMES, ranks=2))
    best = best_of(rows)
    assert best.strategy.splits
    assert max(best.peak_bytes) <= 130 * MIB
    assert all(row.strategy.policy.saves for row in rows if row.strategy.name == "ddp" and row.fits)
    (ddp,) = planner(130 * MIB).search(["ddp"], ranks=2, m=8, savings=PLAIN)
    assert ddp.over_bytes > 0
    least = planner(130 * MIB).smallest_memory("1f1b", 2)
    assert (least.fits, least.strategy.m) == (True, 8)
    assert planner(130 * MIB).smallest_memory("mast", 1) is None
    fixed = planner().smallest_memory("1f1b", 4, depth=2, m=4)
    assert (fixed.strategy.depth, fixed.strategy.m) == (2, 4)


def wide() -> LayerGraph:
    """Equal layers that keep three times what each is given: computing them again one by one saves two thirds."""
    layers = [
        dataclasses.replace(layer, saved=(*layer.saved, (100 + n, 16 * MIB))) if layer.saved else layer
        for n, layer in enumerate(chain().layers)
    ]
    return LayerGraph(tuple(layers))


def test_of_several_savings_that_fit_the_fastest_is_taken() -> None:
    candidate = Strategy("ddp", 2, 1, 8)
    plain = planner(graph=wide()).evaluate(candidate, PLAIN)
    memory = max(plain.peak_bytes) - 100 * MIB
    slow, fast = (planner(memory, graph=wide(), copies=copies).evaluate(candidate) for copies in (1e6, 1e12))
    assert slow.strategy.policy == ActivationPolicy("block")
    assert fast.strategy.policy == ActivationPolicy(offload="overlap", ahead=2 * 16 * MIB)
    assert fast.step_s == pytest.approx(plain.step_s)  # copies hide behind what is computed
    # For each of four microbatches the forward passes of all blocks but the last once more.
    assert slow.step_s == pytest.approx(plain.step_s + 4 * 11)


def test_both_savings_where_the_host_is_too_small_for_all() -> None:
    candidate = Strategy("ddp", 2, 1, 8)
    free = planner(graph=wide())
    block, moved, both = (
        row
        for way in ({"recompute": "block"}, {"offload": "overlap"}, {"recompute": "block", "offload": "overlap"})
        if (row := free.forecast(candidate.under(**way))) is not None
    )
    memory = max(block.peak_bytes) - MIB
    assert max(*moved.peak_bytes, *both.peak_bytes) < memory
    # 12 layers keep 24 MiB each; of 11 that are computed again, one at a time, 8 MiB are there meanwhile.
    assert str(planner(memory, graph=wide(), host=12 * 24 * MIB).evaluate(candidate).strategy) == "ddp 2, m=8 +offload"
    whole = MemoryOptions(zero=(0,))
    less = planner(memory, graph=wide(), host=12 * 24 * MIB - 1).evaluate(candidate, whole)
    assert str(less.strategy) == "ddp 2, m=8 +recompute block +offload"
    assert planner(memory, graph=wide(), host=9 * 8 * MIB).evaluate(candidate, whole).over_bytes > 0


def test_fsdp_recomputes_its_own_blocks() -> None:
    """Two modules of four layers, of twelve; a third holds units of fsdp."""
    layers = [dataclasses.replace(layer, scope=f"blocks.{k // 4}.conv") for k, layer in enumerate(wide().layers[1:-1])]
    graph = LayerGraph((wide().layers[0], *layers, wide().layers[-1]))
    candidate, ends = Strategy("fsdp", 2, 1, 8), (("x", "conv3"), ("conv4", "conv7"))

    def evaluated(memory: int, blocks: tuple[str, ...], savings: MemoryOptions = ON_DEVICE) -> PlanRow:
        one = planner(memory, graph=graph)
        task = dataclasses.replace(one.task, sharding=Sharding((), blocks))
        return Planner(task, one.cluster).evaluate(candidate, savings)

    blocks = "blocks.0", "blocks.1"
    plain = evaluated(1 << 40, blocks)
    assert not plain.strategy.policy.saves
    less = evaluated(max(plain.peak_bytes) - MIB, blocks)
    assert less.fits
    assert less.strategy.policy == ActivationPolicy("block", ends)
    # Of eight layers that keep 24 MiB, 8 MiB for the input of each block are left; of four microbatches each rank has.
    assert max(plain.peak_bytes) - max(less.peak_bytes) == (8 * 24 - 2 * 8) * MIB
    assert less.step_s == pytest.approx(plain.step_s + 4 * 8, rel=1e-3)
    assert evaluated(max(plain.peak_bytes) - MIB, ()).over_bytes == MIB
    assert evaluated(1 << 40, (), MemoryOptions(("block",))).refused == NO_BLOCKS


def test_state_is_divided_before_anything_is_recomputed() -> None:
    """Of ddp with several microbatches the stage that sends less, as long as it is enough."""
    candidate = Strategy("ddp", 2, 1, 8)
    free = planner(graph=wide())
    one, two = (free.forecast(dataclasses.replace(candidate, zero=zero)) for zero in (1, 2))
    for row, kept in ((one, "zero 1"), (two, "zero 2")):
        found = planner(max(row.peak_bytes), graph=wide()).evaluate(candidate)
        assert str(found.strategy) == f"ddp 2, m=8 +{kept}"


@pytest.mark.parametrize(("candidate", "less"), [(Strategy("ddp", 2, 1, 8), 20), (Strategy("1f1b", 2, 2, 8), 120)])
def test_the_best_choice_of_what_is_computed_again_is_faster_than_all_blocks(candidate: Strategy, less: int) -> None:
    plenty = planner(graph=wide()).evaluate(candidate)
    assert not plenty.strategy.policy.saves
    one = planner(max(plenty.peak_bytes) - less * MIB, graph=wide())
    rough = one.evaluate(candidate, ON_DEVICE)
    assert rough.strategy.policy.recompute in ("block", "stage")
    best, other = one.tune_recompute([rough, PlanRow(Strategy("mast", 2, 2, 2), images_per_second=1e-9)])
    assert other.strategy.name == "mast"
    assert best.fits
    assert best.strategy.policy.recompute == "optimal"
    assert len(best.strategy.policy.chosen) >= 1
    assert plenty.step_s < best.step_s < rough.step_s
    (asked,) = one.search([candidate.name], ranks=2, m=8, savings=MemoryOptions(("optimal",)))
    assert (asked.strategy.policy.chosen, asked.step_s) == (best.strategy.policy.chosen, best.step_s)
    # What keeps everything, or is asked to recompute blocks, is left alone.
    assert one.tune_recompute([plenty]) == [plenty]
    assert one.tune_recompute([rough], MemoryOptions(("block",), (False,))) == [rough]
    assert MemoryOptions().with_optimal(Strategy("zero-bubble", 2, 2, 8).under(recompute="stage")) is None
    assert MemoryOptions().with_optimal(candidate.under(recompute="block", offload="overlap")) is None


def test_savings_asked_for_are_taken_though_memory_abounds_or_refused() -> None:
    rows = list(planner().search(NAMES, ranks=2, savings=MemoryOptions(("block",), (True,))))
    assert {row.strategy.name for row in rows if row.refused} == {"fsdp", "zero-bubble"}
    assert all(
        row.refused or (row.strategy.policy.recompute, row.strategy.policy.moves) == ("block", True) for row in rows
    )
    refusal = MemoryOptions(zero=(1,)).refusal(Strategy("subgraph", 2, 1, 2, ways=2))
    assert refusal.startswith("zero 1 is asked for, and subgraph keeps each branch on one rank already")


@pytest.mark.parametrize(
    ("name", "savings", "memory", "words"),
    [
        ("fsdp", MemoryOptions(offload=(True,)), 1 << 40, "offload .* fsdp gathers"),
        ("single", MemoryOptions(("stage",), (False,)), 1 << 40, "recompute stage .* single"),
        ("1f1b", MemoryOptions(zero=(1,)), 1 << 40, "zero 1 .* 1f1b has each stage on one rank alone"),
        ("zero-bubble", PLAIN, 1 << 40, "no layer to split"),
        ("ddp", MemoryOptions(("optimal",), (False,)), 50 * MIB, "no choice of what is recomputed .* fits"),
    ],
)
def test_what_cannot_be_says_why(name: str, savings: MemoryOptions, memory: int, words: str) -> None:
    one = planner(memory, graph=wide(), **{"zero-bubble": "no layer to split"})
    (row,) = one.search([name], ranks=1 if name == "single" else 2, m=8, savings=savings)
    assert re.search(words, row.refused)
    assert not row.fits


def test_the_best_of_rows() -> None:
    """The first of those that are hardly slower; where times are not known that with the least saving."""
    one = Strategy("single", 1, 1, 2)
    slow, fast, faster = (
        PlanRow(dataclasses.replace(one, m=m), images_per_second=s) for m, s in ((1, 1.0), (2, 1.005), (4, 1.1))
    )
    assert best_of([slow, fast]) is slow
    assert best_of([slow, fast, faster]) is faster
    assert best_of([]) is None
    saving, plain = PlanRow(one.under(offload="overlap")), PlanRow(dataclasses.replace(one, m=4))
    assert best_of([saving, plain]) is best_of([plain, saving, plain]) is plain


def test_nothing_fits() -> None:
    small = planner(4 * MIB)
    rows = list(small.search(NAMES, ranks=2))
    assert best_of(rows) is None
    assert all(row.over_bytes > 0 for row in rows)
    least = min(rows, key=lambda row: row.over_bytes)
    assert str(least.strategy) in too_small(rows, small.cluster)
    assert "no strategy can run: name another --parallel, --stages or --microbatches" in too_small([], small.cluster)
    enough = planner(4 * MIB + least.over_bytes)
    assert enough.evaluate(least.strategy).fits


def test_what_fits_the_device_and_not_the_host_says_so() -> None:
    """12 layers keep 24 MiB each of a microbatch."""
    small = planner(graph=wide(), host=MIB)
    row = small.evaluate(Strategy("ddp", 2, 1, 8), MemoryOptions(("none",), (True,), zero=(0,)))
    said = too_small([row], small.cluster)
    assert "nothing fits in 1 MiB of host memory a rank: ddp 2, m=8 +offload needs least, 288 MiB. " in said
    assert "--host-memory of app.plan, --offload-host of app.train" in said


def test_stages_that_are_asked_for_leave_out_spatial() -> None:
    """It was refused because no team could divide such tiles."""
    rows = list(planner().search(("1f1b", "spatial"), ranks=4, depth=2))
    assert {row.strategy.name for row in rows} == {"1f1b"}


@pytest.mark.parametrize(("stream", "speed"), [(None, 10.0), (64, 0.0)])
def test_only_a_best_without_boxes_rules_out_slower_pipelines_of_teams(
    stream: int | None, speed: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row without boxes is preferred to one with them that is hardly faster."""
    speeds: list[float] = []

    def promising(_: Planner, tried: object, savings: object, speed: float, margin: float) -> list[PlanRow]:
        speeds.append(speed)
        return []

    monkeypatch.setattr(Planner, "_teams", lambda *_: [Strategy("1f1b", 4, 2, 8, grid=TWO)])
    monkeypatch.setattr(Planner, "_promising", promising)
    best = PlanRow(Strategy("ddp", 4, 1, 8).under(stream=stream), images_per_second=10.0)
    assert list(planner()._of_teams(["1f1b"], 4, None, None, MemoryOptions(), best)) == []
    assert speeds == [speed]


@pytest.mark.long
def test_no_row_is_left_out_that_would_have_been_the_best_of_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    def best(name: str) -> float:
        row = best_of(planner(200 * MIB, batch=32, graph=chain(20)).search([name], ranks=16))
        return -1.0 if row is None or row.images_per_second is None else row.images_per_second

    everything = {name: best(name) for name in NAMES}
    monkeypatch.setattr("parallel.plan.search.FEW", 0)
    assert {name: best(name) for name in NAMES} == pytest.approx(everything)


def test_the_partition_of_a_row_is_the_one_it_was_forecast_with() -> None:
    one = planner()
    row = one.evaluate(Strategy("gpipe", 4, 4, 8))
    partition = one.partition_of(row)
    assert [len(partition.layers_of(stage)) for stage in range(4)] == [4, 3, 3, 4]
    timeline = one.timeline(row)
    assert row.step_s == pytest.approx(timeline.makespan_s, rel=1e-3)


@pytest.mark.parametrize(("memory", "copies"), long_where([(60 * MIB, 1e9), (130 * MIB, 1e7)], (130 * MIB, 1e7)))
def test_what_takes_too_long_to_move_is_left_out_of_no_answer(
    memory: int, copies: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = list(candidates(4, 9, names=NAMES, most_stages=12))
    quick = [planner(memory, 9, copies=copies).evaluate(candidate) for candidate in given]
    monkeypatch.setattr(Planner, "_may_beat", lambda *_: True)
    assert quick == [planner(memory, 9, copies=copies).evaluate(candidate) for candidate in given]


GPUS = Cluster("GPUs", 1 << 34, 8, 8, LINK, LINK, 1e12, link_bytes=1, communicator_bytes=1000)
"""Counts links in ones, communicators in thousands."""
TWO = TeamGrid(2, 1)


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        (Strategy("single", 1, 1, 8), 0),
        (Strategy("ddp", 8, 1, 8), 1000),
        (Strategy("fsdp", 8, 1, 8), 1000),
        (Strategy("1f1b", 2, 2, 8), 2),
        (Strategy("1f1b", 4, 4, 8), 4),
        (Strategy("1f1b", 8, 4, 8), 1004),
        (Strategy("bidirectional", 4, 4, 8), 1004),
        (Strategy("bidirectional", 4, 4, 8, zero=1), 1004),
        (Strategy("spatial", 2, 1, 8, grid=TWO), 2000),
        (Strategy("1f1b", 4, 2, 8, grid=TWO), 2002),
        (Strategy("1f1b", 6, 3, 8, grid=TWO), 2004),
    ],
)
def test_links_and_sums_of_the_fullest_rank(strategy: Strategy, expected: int) -> None:
    assert communication_bytes(strategy, GPUS) == expected
    if strategy.splits:
        pairs = strategy.mesh.pairs({(stage, stage + 1): True for stage in range(strategy.stages - 1)})
        assert max(sum(rank in pair for pair in pairs) for rank in range(strategy.ranks)) == expected % 1000


def test_a_plan_counts_them_in_each_rank() -> None:
    one = planner()
    candidate = Strategy("1f1b", 4, 4, 8)
    without = one.evaluate(candidate).peak_bytes
    one = planner()
    one.stages.cluster = dataclasses.replace(one.cluster, link_bytes=1 << 20)
    assert one.evaluate(candidate).peak_bytes == tuple(peak + (4 << 20) for peak in without)
