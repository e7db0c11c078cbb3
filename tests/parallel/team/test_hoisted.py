"""Halos that travel with the moments of a norm: which do, what they cost, and that recomputation is told both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exactness.spatial_ops import Call
from benchmarks.exactness.team_error import team_error
from parallel.comm.thread_comm import run_on_threads
from parallel.space.rule import Window
from parallel.space.team import Grid, Territory
from parallel.team import nodes
from parallel.team.hoisted import NOTHING
from parallel.team.link import TeamLink
from parallel.team.tape import Tape

EXACT = 1e-12
SHAPE = (2, 2, 37, 29)


def network(*between: nn.Module, window: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    window = nn.Conv2d(4, 3, 3, padding=1) if window is None else window
    return nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), *between, window).double()


def swaps(model: nn.Module, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> float:
    """Exchanges of each member in a pass forward and back, which is exact."""
    counted = 0
    swap = TeamLink._swap

    def counting(self: TeamLink, *arguments: Any, **named: Any) -> Any:
        nonlocal counted
        counted += 1
        return swap(self, *arguments, **named)

    monkeypatch.setattr(TeamLink, "_swap", counting)
    errors = team_error(model, SHAPE, grid)
    monkeypatch.setattr(TeamLink, "_swap", swap)
    assert errors.largest <= EXACT, errors
    return counted / grid.members


HOISTED: dict[str, Callable[[], nn.Module]] = {
    "convolution": lambda: network(nn.ReLU(inplace=True)),
    "nothing between": lambda: network(),
    "pool": lambda: network(nn.ReLU(), window=nn.MaxPool2d(3, 2, 1)),
    "1x1 between": lambda: network(nn.GELU(), nn.Conv2d(4, 4, 1)),
    "resampled": lambda: network(nn.SiLU(), window=nn.UpsamplingBilinear2d(scale_factor=2)),
    "stride": lambda: network(nn.ReLU(), window=nn.Conv2d(4, 3, 3, 2, 1)),
    "rows of one side": lambda: network(nn.ReLU(), window=nn.Conv2d(4, 3, 2)),
}


@pytest.mark.parametrize("grid", [Grid(2, 1), Grid(2, 2)], ids=str)
@pytest.mark.parametrize("name", HOISTED)
def test_moments_and_halos_are_one_message(name: str, grid: Grid, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tile's halo, one message for norm and window, and the output to member 0: each way."""
    assert swaps(HOISTED[name](), grid, monkeypatch) == 6
    monkeypatch.setattr(nodes, "hoisted", lambda *_: NOTHING)
    assert swaps(HOISTED[name](), grid, monkeypatch) == 8


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.BatchNorm2d(4), nn.Conv2d(4, 3, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(F.relu(self.norm(x) + x))
        return y


FETCHED: dict[str, Callable[[], nn.Module]] = {
    "joined with another map": lambda: nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), Residual()).double(),
    "used twice": lambda: network(Call(lambda x: x + F.avg_pool2d(x, 1)), nn.Dropout(0.5)),
    "drawn by px": lambda: network(nn.ReLU(), nn.Dropout(0.5)),
}


@pytest.mark.parametrize("name", FETCHED)
def test_what_others_need_of_more_than_the_normed_map_is_fetched(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert swaps(FETCHED[name](), Grid(2, 1), monkeypatch) == 8


def test_teams_too_large_for_messages_to_each_gather_and_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norm's is a sum over all, and no exchange."""
    assert swaps(HOISTED["convolution"](), Grid(5, 1), monkeypatch) == 6


def test_sent_bytes_are_of_pieces_alone() -> None:
    """As those of the plan."""
    rule, sides = Window(3, 1, 1, 1, 1), (8, 6)
    exchange = Territory(Grid(2, 1), sides).exchange((rule, rule), sides, sides)

    def rank(communicator: Any, _: Any) -> int:
        link, tape = TeamLink(communicator), Tape()
        x = torch.full((1, 2, 4, 6), float(link.member))
        for replays in (False, True):
            link.tape = tape
            if replays:
                tape._next = 0
            parts, (halo,) = link.gather_and_fetch(torch.tensor([3.0 + link.member]), exchange, x, (2, 3))
            assert [float(part) for part in parts] == [3.0, 4.0]
            assert halo.shape == (1, 2, 1, 6)
            assert float(halo.mean()) == 1 - link.member
        link.finish()
        return link.sent_bytes

    assert run_on_threads(2, rank, [None] * 2) == [48, 48]
