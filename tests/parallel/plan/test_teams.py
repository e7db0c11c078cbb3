"""Teams as candidates: which grids and teams are tried, what a plan's file says of them, and where regions end."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.out_of_core.problem import planner
from parallel.cost.cluster import Cluster
from parallel.cost.devices import LinkSpec
from parallel.cost.stage_cost import LayerCost
from parallel.plan.candidates import grids_of, in_teams
from parallel.plan.halo_traffic import Halo, HaloTraffic, with_traffic
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.lanes import long_where

GIB = 2**30


def test_rows_alone_come_before_the_grid_with_the_shortest_borders() -> None:
    assert [str(grid) for grid in grids_of(8)] == ["8x1", "4x2"]
    assert grids_of(3) == [Grid(3, 1)]


def test_teams_take_the_place_of_ranks() -> None:
    asked = {"names": ["spatial", "1f1b", "zero-bubble", "ddp"], "most_stages": 9, "most_members": 4}
    made = list(in_teams(4, 2, **asked))  # type: ignore[arg-type]
    assert {str(each) for each in made if each.name == "1f1b"} == {"1f1b 1 x 2 of 2x1, m=1", "1f1b 1 x 2 of 2x1, m=2"}
    assert {each.name for each in made} == {"spatial", "1f1b"}
    assert all(each.group_ranks * each.groups == 4 for each in made)
    assert all(each.mesh for each in made)


def test_a_plan_is_read_back_with_its_grids() -> None:
    row = PlanRow(Strategy("master", 8, 2, 4, grid=Grid(2, 2)))
    assert PlanRow.from_json(row.to_json()) == row


def test_where_a_region_ends_is_named() -> None:
    parts = planner("resnet18", 64, 4, GIB, 2).stages.teams
    assert parts is not None
    ends = parts.plan(Grid(4, 1)).ends_at
    assert ends is not None
    assert "of which not every member of a 4x1 team has a part" in ends[1]
    assert parts.plan(Grid(2, 1)).ends_at is None


def test_halos_hide_behind_the_computing_of_accelerators_and_on_the_way_between_nodes() -> None:
    link = LinkSpec("slow", 1e12, 2e-3)
    cost, talk = LayerCost(3e-3, 1e-3, 1e-3), HaloTraffic([Halo(0, 0, 1, back=True, overlapped=True)])
    cluster = Cluster("test", GIB, 2, 2.0, link, link, 1e12, "cuda")
    hidden = with_traffic(cost, talk, 1, 2, cluster)
    assert (hidden.forward_s, hidden.backward_s) == (3e-3, 2e-3)  # 1 ms of the way back shows
    apart = dataclasses.replace(talk, halos=[dataclasses.replace(talk.halos[0], overlapped=False)])
    assert with_traffic(cost, apart, 1, 2, cluster).forward_s == 5e-3
    cores = dataclasses.replace(cluster, kind="cpu")
    assert with_traffic(cost, talk, 1, 2, cores).forward_s == 5e-3
    assert with_traffic(cost, talk, 1, 2, dataclasses.replace(cores, per_node=1)).forward_s == 3e-3


def test_rims_of_convolutions_are_counted_as_work() -> None:
    parts = planner("resnet18", 256, 2, GIB, 2).stages.teams
    assert parts is not None
    graph = parts.part(Grid(2, 1)).graph
    rows = {layer.name: [op.convolution for op in layer.ops if op.convolution] for layer in graph.layers}
    own, *rims = rows["layer1_0_conv1"]
    assert (own.size_out, [rim.size_out for rim in rims]) == ((32, 64), [(1, 64)])


MIB = 2**20


@pytest.mark.parametrize("model", long_where(["resnet18", "unet"], "unet"))
def test_the_largest_boxes_that_fit_are_found(model: str) -> None:
    """And no larger box needs more of the host."""
    made = planner(model, 512, 1, 1000 * MIB, 1)
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
        assert row is not None
        fitting = [side for side, peak in zip(rows, peaks, strict=True) if peak[0] <= on_gpu.cluster.usable_bytes]
        assert row.strategy.policy.stream == max(fitting, default=min(rows))
        assert row.fits == bool(fitting)
        if fitting:  # what is left holds maps
            assert row.strategy.policy.map_bytes == on_gpu.cluster.usable_bytes - peaks[len(fitting) - 1][0]
            assert max(row.peak_bytes) <= on_gpu.cluster.usable_bytes
            assert row.host_bytes <= host[len(fitting) - 1]
    row = Planner(made.task, dataclasses.replace(cluster, memory_bytes=100 * max(limits))).in_boxes(candidate)
    assert row is not None
    assert row.host_bytes == 3 * 512**2  # the tile
    assert max(row.peak_bytes) > peaks[-1][0]
