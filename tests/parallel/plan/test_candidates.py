"""What a planner chooses from: every candidate can run and none is missing, teams and boxes among them; its file."""

from __future__ import annotations

import dataclasses
import json

import pytest

from benchmarks.out_of_core.problem import planner
from parallel.cost.cluster import Cluster, LinkSpec
from parallel.cost.stage_cost import LayerCost
from parallel.graph.layers import INPUT, OUTPUT, Layer, LayerGraph
from parallel.memory.policy import ActivationPolicy
from parallel.memory.rank_bytes import RankBytes
from parallel.plan.added_costs import Halo, HaloTraffic, with_traffic
from parallel.plan.candidates import (
    BOXES,
    ON_DEVICE,
    PLAIN,
    RECOMPUTE,
    MemoryOptions,
    candidates,
    grids_of,
    in_branches,
    in_teams,
)
from parallel.plan.largest_tile import LIMIT, STEP, largest_tiles, steps_of
from parallel.plan.plan import Plan, PlanRow, limit_of, working_set
from parallel.plan.search import Planner
from parallel.plan.step_time import largest_weights, schedule_of, weights_of
from parallel.schedule.registry import SCHEDULES
from parallel.space.team import TeamGrid
from parallel.strategy import WHOLE, Strategy
from tests.helpers.lanes import long_where

NAMES = (*WHOLE, *SCHEDULES)


def found(ranks: int, batch: int, **more: int | None) -> set[tuple[str, int, int]]:
    return {(c.name, c.depth, c.m) for c in candidates(ranks, batch, names=NAMES, most_stages=100, **more)}


def test_what_is_tried() -> None:
    assert found(1, 8) == {("single", 1, m) for m in (1, 2, 4, 8)}
    two = found(2, 4)
    for name, numbers in {"single": set(), "ddp": {2, 4}, "mast": {2}, "1f1b": {1, 2, 4}}.items():
        assert {m for each, _, m in two if each == name} == numbers
    assert {name for name, _, _ in two} == set(NAMES) - {"single"}
    assert {depth for _, depth, _ in found(8, 2)} == {4, 8}  # more ranks than tiles leave only deep splits
    assert "ddp" not in {name for name, _, _ in found(8, 2)}
    assert {(depth, m) for _, depth, m in found(8, 16, depth=4, m=8)} == {(4, 8)}  # what the user fixes is kept
    assert {name for name, _, _ in found(8, 16, depth=4)} == set(SCHEDULES)


@pytest.mark.parametrize(("ranks", "batch"), [(2, 3), (6, 8), (8, 8), (12, 30), (64, 64)])
def test_every_candidate_can_run(ranks: int, batch: int) -> None:
    for candidate in candidates(ranks, batch, names=tuple(SCHEDULES), most_stages=30):
        assert candidate.groups * candidate.depth == ranks
        assert candidate.stages <= 30
        schedule, mesh = schedule_of(candidate)
        assert set(schedule) == set(range(candidate.depth))
        assert mesh.stages == candidate.stages
        numbers = {action.microbatch for actions in schedule.values() for action in actions}
        assert numbers == set(range(len(weights_of(candidate, batch))))
    (uneven,) = [c for c in candidates(2, 5, names=["1f1b"], most_stages=9) if c.m == 3]
    assert weights_of(uneven, 5) == (1.0, 1.0, 0.5)
    shared = Strategy("ddp", 2, 1, 3, shares=((0,), (1, 2)))
    assert weights_of(shared, 5, group=1) == (1.0, 0.5)
    assert largest_weights(shared, 5) == (1.0, 1.0)


def row(name: str, over: int) -> PlanRow:
    return PlanRow(Strategy(name, 1, 1, 1), over_bytes=max(0, over))


@pytest.mark.parametrize("memory", [STEP**2, 1000**2, 1024**2, 1025**2, 5000**2])
def test_the_next_side_does_not_fit(memory: int) -> None:
    asked = []

    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        asked.append(tile)
        return row(name, tile**2 - memory)

    (found,) = largest_tiles(["single"], [PLAIN], least)
    assert found.tile**2 <= memory < (found.tile + STEP) ** 2
    assert found.row.fits
    assert not found.next_row.fits
    assert found.doubled is not None
    assert len(asked) - 1 <= len(set(asked)) <= 20  # twice the side may have been asked for before


@pytest.mark.parametrize("fixed", [0, 1000**2, -(10**9)])
def test_bytes_of_the_rows_shorten_the_search(fixed: int) -> None:
    """They are right, shifted, or no guide at all: the answer is the same."""
    memory, asked = 5000**2, []

    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        asked.append(tile)
        peak = fixed + tile**2 if fixed >= 0 else 1
        over = max(0, tile**2 - memory)
        return PlanRow(Strategy(name, 1, 1, 1), peak_bytes=(peak,), over_bytes=over)

    (found,) = largest_tiles(["single"], [PLAIN], least)
    assert found.tile == 4992
    assert len(set(asked)) <= (12 if fixed >= 0 else 16)


def test_what_never_fits_what_always_does_and_what_runs_on_no_small_tiles() -> None:
    never, always = largest_tiles(["never", "always"], [PLAIN], lambda tile, name, _: row(name, int(name == "never")))
    assert (never.tile, never.row) == (0, None)
    assert never.next_row is not None
    assert (always.tile, always.next_row, always.doubled) == (LIMIT, None, None)
    assert largest_tiles(["mast"], [PLAIN], lambda tile, name, savings: None) == []
    for memory, tiles in ((5000**2, [4992]), (400**2, [384]), (100**2, [])):
        least = lambda side, name, _, memory=memory: None if side < 256 else row(name, side**2 - memory)  # noqa: E731
        assert [each.tile for each in largest_tiles(["single"], [PLAIN], least)] == tiles


def test_what_does_not_fit_is_not_tried_again() -> None:
    candidate, steps = Strategy("gpipe", 2, 2, 4), steps_of(MemoryOptions())
    tried = [variant for step in steps for tier in step.escalation(candidate) for variant in tier]
    assert len(steps) == 4
    assert len(tried) == len(set(tried)) > 4
    assert set(tried) == {variant for tier in MemoryOptions().escalation(candidate) for variant in tier}


def test_savings_follow_each_other_as_far_as_they_gain_anything() -> None:
    def least(tile: int, name: str, savings: MemoryOptions) -> PlanRow:
        side = {"ddp": 1000, "fsdp": 600}[name]
        if name == "ddp":
            side *= len(savings.offload) * (1 + (savings.recompute != ("none",))) * (1 + 5 * savings.stream)
        return row(name, tile - side)

    found = largest_tiles(["ddp", "fsdp"], steps_of(MemoryOptions()), least)
    assert [(one.name, one.tile, one.savings) for one in found] == [
        ("ddp", 960, PLAIN),
        ("ddp", 1984, ON_DEVICE),
        ("ddp", 3968, MemoryOptions(stream=False)),
        ("ddp", 5952, BOXES),
        ("fsdp", 576, PLAIN),
    ]


def test_steps_of_what_is_asked_for() -> None:
    assert steps_of(PLAIN) == [PLAIN]
    block = [MemoryOptions(("block",), (False,), False), MemoryOptions(("block",), (False, True), False)]
    assert steps_of(MemoryOptions(("block",))) == block
    assert steps_of(MemoryOptions(("none",), (True,))) == [MemoryOptions(("none",), (True,), False)]
    assert steps_of(MemoryOptions())[-2:] == [MemoryOptions(RECOMPUTE, (False, True), False), BOXES]


def test_teams_take_the_place_of_ranks() -> None:
    asked = {"names": ["spatial", "1f1b", "zero-bubble", "ddp"], "most_stages": 9, "most_members": 4}
    made = list(in_teams(4, 2, **asked))
    assert {str(each) for each in made if each.name == "1f1b"} == {"1f1b 1 x 2 of 2x1, m=1", "1f1b 1 x 2 of 2x1, m=2"}
    assert {each.name for each in made} == {"spatial", "1f1b"}
    assert all(each.group_ranks * each.groups == 4 for each in made)
    assert all(each.mesh for each in made)
    assert [str(grid) for grid in grids_of(8)] == ["8x1", "4x2"]  # rows alone, then the shortest borders
    assert grids_of(3) == [TeamGrid(3, 1)]


def test_teams_lie_on_one_node() -> None:
    """Of 24 ranks, eight a node, the third team of three and the second of six had members on two nodes."""
    spatial = in_teams(24, 24, names=["spatial"], most_stages=9, most_members=8)
    for made in (spatial, in_branches(24, 24, most_members=8)):
        assert {each.members for each in made} == {2, 4, 8}


def test_where_a_region_ends_is_named_and_rims_are_counted_as_work() -> None:
    parts = planner("resnet18", 64, 4, 2**30, 2).stages.teams
    assert "not every member of a 4x1 team has a part" in parts.plan(TeamGrid(4, 1)).ends_at[1]
    assert parts.plan(TeamGrid(2, 1)).ends_at is None
    graph = planner("resnet18", 256, 2, 2**30, 2).stages.teams.part(TeamGrid(2, 1)).graph
    own, *rims = (op.convolution for op in graph.by_name["layer1_0_conv1"].ops if op.convolution)
    assert (own.size_out, [rim.size_out for rim in rims]) == ((32, 64), [(1, 64)])


def test_halos_hide_behind_the_computing_of_accelerators_and_on_the_way_between_nodes() -> None:
    link = LinkSpec("slow", 1e12, 2e-3)
    cost, talk = LayerCost(3e-3, 1e-3, 1e-3), HaloTraffic([Halo(0, 0, 1, back=True, overlapped=True)])
    cluster = Cluster("test", 2**30, 2, 2.0, link, link, 1e12, "cuda")
    hidden = with_traffic(cost, talk, 1, 2, cluster)
    assert (hidden.forward_s, hidden.backward_s) == (3e-3, 2e-3)  # 1 ms of the way back shows
    apart = dataclasses.replace(talk, halos=[dataclasses.replace(talk.halos[0], overlapped=False)])
    assert with_traffic(cost, apart, 1, 2, cluster).forward_s == 5e-3
    cores = dataclasses.replace(cluster, kind="cpu")
    assert with_traffic(cost, talk, 1, 2, cores).forward_s == 5e-3
    assert with_traffic(cost, talk, 1, 2, dataclasses.replace(cores, per_node=1)).forward_s == 3e-3


@pytest.mark.parametrize("model", long_where(["resnet18", "unet"], "unet"))
def test_the_largest_boxes_that_fit_are_found(model: str) -> None:
    """And no larger box needs more of the host."""
    made = planner(model, 512, 1, 1000 * 2**20, 1)
    candidate, cluster = Strategy("single", 1, 1, 1), dataclasses.replace(made.cluster, kind="cuda", host_bytes=2**40)
    made = Planner(made.task, cluster)
    rows = {side: made.forecast(candidate.under(stream=side)) for side in made.stages.box_sides(candidate)}
    host, peaks = ([getattr(row, name) for row in rows.values()] for name in ("host_bytes", "peak_bytes"))
    assert len(rows) > 3
    assert host == sorted(host, reverse=True)
    assert peaks == sorted(peaks)
    limits = [peaks[0][0] - 1, *(peak for (peak,) in peaks)]
    for limit in limits + limits[::-1]:
        memory = cluster.needed_bytes(limit)
        on_gpu = Planner(made.task, dataclasses.replace(cluster, memory_bytes=memory))
        row = on_gpu.in_boxes(candidate)  # whatever was found before
        fitting = [side for side, peak in zip(rows, peaks, strict=True) if peak[0] <= on_gpu.cluster.usable_bytes]
        assert row.strategy.policy.stream == max(fitting, default=min(rows))
        assert row.fits == bool(fitting)
        if fitting:  # what is left holds maps
            assert row.strategy.policy.map_bytes == on_gpu.cluster.usable_bytes - peaks[len(fitting) - 1][0]
            assert max(row.peak_bytes) <= on_gpu.cluster.usable_bytes
            assert row.host_bytes <= host[len(fitting) - 1]
    row = Planner(made.task, dataclasses.replace(cluster, memory_bytes=100 * max(limits))).in_boxes(candidate)
    assert row.host_bytes == 3 * 512**2  # the tile
    assert max(row.peak_bytes) > peaks[-1][0]


RUNS = (("conv1", "pool"),)
MASTER = Strategy("master", 4, 2, 8, 1, ("layer2", "layer4"), ActivationPolicy("optimal", RUNS, "overlap", 7), 2)
PLAN = Plan({"model": "resnet18"}, PlanRow(MASTER, 1.5, 5.3, 0.1, (10, 20)), "calibrated", 0.07, (0.5, 0.25))


def test_round_trip() -> None:
    assert Plan.loads(PLAN.dumps()) == PLAN
    row = PlanRow(Strategy("master", 8, 2, 4, grid=TeamGrid(2, 2)))
    assert PlanRow.from_json(row.to_json()) == row
    assert not PlanRow(row.strategy, over_bytes=1).fits
    assert not PlanRow(row.strategy, refused="no").fits
    for text, words in (("{", "not a plan"), ("[]", "not a plan"), ('{"version": 1}', "version 1, .*version 3")):
        with pytest.raises(ValueError, match=words):
            Plan.loads(text)
    saving = Strategy("single", 1, 1, 2).under(recompute="block", offload="overlap")
    texts = [str(each) for each in (saving, Strategy("master", 8, 4, 16, zero=1).under(recompute="stage"))]
    assert texts == ["single, m=2 +recompute block +offload", "master 2 x 4, m=16 +recompute +zero 1"]


def test_the_names_that_others_read() -> None:
    written = json.loads(PLAN.dumps())
    expected = {"strategy": "master", "fits": True, "images_per_second": 1.5, "peak_memory_bytes": [10, 20]}
    expected |= {"ranks": 4, "depth": 2, "m": 8, "chunks": 1, "recompute": "optimal", "recomputed": [["conv1", "pool"]]}
    expected |= {"offload": True, "ahead_bytes": 7, "zero": 2, "cuts": ["layer2", "layer4"]}
    assert {name: written[name] for name in expected} == expected


IMAGE = Layer("x", INPUT, (), differentiable=False, output_bytes=10, output_storages=((0, 10),))
FIRST, SECOND, ADDED, LAST = (
    Layer(name, kind, inputs, output_bytes=100, saved=saved, output_storages=((number, 100),) if number else ())
    for name, kind, inputs, saved, number in (
        ("wide", "Conv2d", ("x",), ((0, 10),), 1),
        ("norm", "BatchNorm2d", ("wide",), ((1, 100), (2, 4)), 3),
        ("added", "add", ("wide", "norm"), (), 4),
        ("output", OUTPUT, ("added",), (), 0),
    )
)
GRAPH = LayerGraph((IMAGE, FIRST, SECOND, ADDED, LAST))


@pytest.mark.parametrize(
    ("held", "says"),
    [
        (RankBytes(1 << 20, 1 << 20, 2 << 20, 1 << 20, 1 << 20, 0), "parameters, gradients, optimizer state: 4 MiB"),
        (RankBytes(1, 1, 2, 5 << 10, 1 << 10, 1 << 10), "activations kept: 6 KiB"),
        (RankBytes(1, 1, 2, 5, 1 << 20, 1), "working set of norm: 304 B"),
    ],
)
def test_the_largest_part(held: RankBytes, says: str) -> None:
    assert str(limit_of(held, GRAPH, GRAPH.layers)) == says
    assert working_set(GRAPH, FIRST) == 10 + 100  # the gradient of the image is not needed
    assert working_set(GRAPH, SECOND) == 104 + 2 * 100  # backward: what it keeps and two gradients
    assert working_set(GRAPH, ADDED) == 3 * 100
