"""What a plan says of a team beside what its members do: bytes of pieces sent, exactly, and bytes that live."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.out_of_core.problem import planner
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.offload.live_bytes import LiveBytes, not_counted
from parallel.plan.candidates import BOXES
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.streaming.read_region import read_region
from parallel.team.region_run import RegionRun
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts
from parallel.trace.trace import trace_as_it_runs
from tests.helpers.team_engine import segments, team_engine

GIB = 2**30
BATCH = 2


def step(model: str, px: int, strategy: Strategy, communicator: Communicator, _: Any) -> tuple[int, int]:
    """(bytes of pieces sent, most bytes that live) of one member, in its second step; in boxes, beside the tile."""
    live = LiveBytes()
    with live:
        engine = team_engine(model, px, strategy, communicator)
        link = engine._work.link
        for side in (64, px):
            shape = (1, 3, side, side)
            with not_counted() if strategy.policy.stream else contextlib.nullcontext():
                targets = torch.zeros((1, side, side) if segments(model) else (1,), dtype=torch.int64)
                image = torch.randn(shape).contiguous(memory_format=torch.channels_last)
            live.peak_bytes = live.bytes
            before = link.sent_bytes
            engine.step([Microbatch(image, targets, shape) for _ in engine.share], 0, 0.0)
    engine.close()
    return link.sent_bytes - before, live.peak_bytes


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "px", "grid", "recompute", "within"),
    [
        ("unet_w4", 128, "2x1", "block", 0.08),
        ("unet_w4", 96, "1x2", "none", 0.08),
        ("torchvision:squeezenet1_1", 128, "2x1", "none", 0.08),
        ("tests.helpers.tiny_models:top_heavy", 64, "2x1", "none", 0.02),
    ],
)
def test_bytes_are_those_planned(model: str, px: int, grid: str, recompute: str, within: float) -> None:
    team = Grid.parse(grid)
    strategy = Strategy("spatial", team.members, 1, 2, grid=team).under(recompute=recompute)
    plans = planner(model, px, 2, 2 * GIB, strategy.m)
    row = plans.forecast(strategy)
    assert row is not None
    assert plans.stages.teams is not None
    members = run_on_threads(team.members, functools.partial(step, model, px, row.strategy), [None] * team.members)
    part = plans.stages.teams.part(team)
    assert sum(sent for sent, _ in members) == strategy.m * part.halo_bytes
    assert max(row.peak_bytes) == pytest.approx(max(peak for _, peak in members), rel=within)


@pytest.mark.parametrize(
    ("model", "px", "grid", "box"),
    [
        pytest.param("resnet18", 256, "1x2", 128, marks=pytest.mark.long),
        pytest.param("unet_w4", 256, "2x1", 64, marks=pytest.mark.long),
        # Every member draws the numbers of the whole map, and keeps its own.
        ("tests.helpers.tiny_models:dropping_net", 192, "2x1", None),
        ("tests.helpers.tiny_models:dropping_net", 192, "2x2", None),
    ],
)
def test_bytes_in_boxes_and_of_draws_are_those_planned(model: str, px: int, grid: str, box: int | None) -> None:
    team = Grid.parse(grid)
    strategy = Strategy("spatial", team.members, 1, BATCH, grid=team)
    row = planner(model, px, team.members, 2 * GIB, BATCH).forecast(
        strategy if box is None else strategy.under(stream=box)
    )
    assert row is not None
    members = run_on_threads(team.members, functools.partial(step, model, px, row.strategy), [None] * team.members)
    assert max(row.peak_bytes) == pytest.approx(max(peak for _, peak in members), rel=0.1)


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2), Grid(1, 3)])
def test_members_hold_as_much_of_each_map_as_on_paper(grid: Grid) -> None:
    network = nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.BatchNorm2d(4), nn.MaxPool2d(3, 2, 1), nn.Conv2d(4, 4, 3, dilation=2)
    )
    traced = trace_as_it_runs(network, (1, 3, 96, 96), torch.float32)
    nodes = list(traced.training.graph.nodes)
    region = read_region(traced.model, nodes, {nodes[0].name: torch.zeros(1, 3, 96, 96)})

    def held(communicator: Communicator, _: None) -> dict[str, tuple[int, int]]:
        run = RegionRun(region, BoxedParts(16), grid, TeamComm(communicator))
        held = run._exchange.held
        assert held.keys() == run.boxes.held.keys()
        paper.update(run.boxes.held)
        return {name: (rows.size, columns.size) for name, (rows, columns) in held.items()}

    paper: dict[str, tuple[int, int]] = {}
    members = run_on_threads(grid.members, held, [None] * grid.members)
    for name, sides in paper.items():
        assert sides == tuple(max(each[name][axis] for each in members) for axis in range(2)), name


def test_a_team_is_tried_in_boxes_where_its_parts_do_not_fit() -> None:
    plans = planner("resnet18", 1024, 2, 300 * 2**20, BATCH)
    row = plans.smallest_memory("spatial", 2, BOXES)
    assert row is not None
    assert row.fits, row
    assert row.strategy.grid == Grid(2, 1)
    assert row.strategy.policy.stream is not None
    assert row.step_s is None
    assert plans.with_time(row).step_s
