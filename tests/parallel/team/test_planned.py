"""What a plan says of a team beside what its members do: bytes of pieces sent, exactly, and bytes that live."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from benchmarks.out_of_core.problem import planner
from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.engine.step import Microbatch
from parallel.offload.live_bytes import LiveBytes
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.team_engine import segments, team_engine

GIB = 2**30


def step(model: str, px: int, strategy: Strategy, communicator: Communicator, _: Any) -> tuple[int, int]:
    """(bytes of pieces sent, most bytes that live) of one member, in its second step."""
    live = LiveBytes()
    with live:
        engine = team_engine(model, px, strategy, communicator)
        link = engine._work.link
        for side in (64, px):
            targets = torch.zeros((1, side, side) if segments(model) else (1,), dtype=torch.int64)
            shape = (1, 3, side, side)
            image = torch.randn(shape).contiguous(memory_format=torch.channels_last)
            live.reset_peak()
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
