"""Halos of several operations at once: exact, fewer messages, and the bytes that the plan says."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from torch import nn

from benchmarks.exactness.team_error import team_error
from parallel.space.side_by_side import divide_among
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.team.team_plan import TeamPlans
from parallel.trace.trace_alone import trace_as_it_runs

EXACT = 1e-12


def convolutions() -> nn.Sequential:
    """Six operations that need what others have, in a chain with strides, pooling and dilation between them."""
    return nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2),
        nn.ReLU(inplace=True),
        nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False),
        nn.GELU(),
        nn.MaxPool2d(3, stride=2, padding=1),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=2),
        nn.ReLU(),
        nn.AvgPool2d(3, stride=1, padding=1),
        nn.Conv2d(6, 4, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    )


def normed() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.LeakyReLU(),
        nn.Conv2d(4, 4, 3, padding=1),
        nn.BatchNorm2d(4),
        nn.Dropout2d(0.5),
        nn.Conv2d(4, 3, 3, padding=1),
        nn.Upsample(scale_factor=2, mode="bilinear"),
        nn.Conv2d(3, 2, 3, padding=1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    )


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("network", [convolutions, normed])
@pytest.mark.parametrize("grid", ["2x1:2", "1x2:3", "2x2:6", "3x1:9"])
def test_as_one_device(network: Callable[[], nn.Sequential], grid: str, training: bool) -> None:
    torch.manual_seed(0)
    model = network().double()
    errors = team_error(model, (2, 3, 61, 53), Grid.parse(grid), training=training)
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)])
def test_fewer_fetches_of_the_bytes_that_are_planned(grid: Grid) -> None:
    torch.manual_seed(0)
    model, shape = convolutions().double(), (1, 3, 64, 64)
    traced = trace_as_it_runs(model, shape, torch.float64)
    fetches = []
    for fuse, most in ((1, 6), (2, 3), (3, 2), (6, 1)):
        fused = dataclasses.replace(grid, fuse=fuse)
        plan = TeamPlans(traced).plan(fused, shape, True)
        assert plan.region is not None
        side = divide_among(plan.region.on_paper(), fused)
        made = [fetch for step in side.steps for fetch in side.fetches(step)]
        assert len(made) == most
        of_px = {name: plan.region.forms[name][0][1] * 8 for name in side.sides}
        planned = sum(fetch.exchange.px * of_px[fetch.source] for fetch in made)
        errors = team_error(model, shape, fused)
        assert sum(errors.sent_bytes) == 2 * planned  # and their gradients
        fetches.append(sum(fetch.messages for fetch in made))
    assert fetches == sorted(fetches, reverse=True)


def test_a_value_that_two_take_ends_a_chain() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for first, second in zip(self.convolutions[::2], self.convolutions[1::2], strict=True):
                x = x + second(first(x).relu())
            return x

    torch.manual_seed(0)
    errors = team_error(Residual().double(), (1, 3, 32, 32), Grid(2, 2, 4))
    assert errors.largest <= EXACT, errors


def test_said_in_text() -> None:
    assert str(Grid.parse("2x1:3")) == "2x1:3"
    assert str(Grid.parse("2x1:1")) == "2x1"
    with pytest.raises(ValueError, match="2x1:3"):
        Grid.parse("2x1:0")


def test_boxes_fetch_at_once_already() -> None:
    boxed = Strategy("spatial", 2, 1, 1, grids=(Grid(2, 1, 3),)).under(stream=64)
    (fault,) = boxed.team_faults
    assert "leave --stream or the :3 out" in fault
