"""A team draws what one device draws: numbers of px in the order of the whole map's memory, whoever draws beside."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.space.team import Grid
from tests.helpers.team_error import team_error
from tests.helpers.team_operations import OPERATIONS, Call

EXACT = 1e-12


class Branches(nn.Module):
    """A head that no team computes, which draws between two dropouts of the trunk."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(c, 4, 3, padding=1) for c in (2, 4))
        self.drop, self.channels = nn.Dropout(0.3), nn.Dropout2d(0.4)
        self.head, self.last = nn.Linear(64, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.drop(self.first(x))
        beside = self.head(F.dropout(torch.flatten(F.adaptive_avg_pool2d(y, 4), 1), 0.5, self.training))
        y = self.channels(self.drop(self.second(y)))
        return self.last(y.mean((2, 3))), beside


def test_member_0_alone_draws_between_draws_of_all() -> None:
    """The others have not drawn, and go on from where it is: else their masks would be of other numbers."""
    torch.manual_seed(0)
    errors = team_error(Branches().double(), (2, 2, 24, 20), Grid(2, 2))
    assert errors.largest <= EXACT, errors
    assert errors.ends_at == ("flatten", "makes other dims of rows and columns")


@pytest.mark.parametrize(
    "name", ["convolution 3x3", "bilinear, factor 2", "batch norm", "layer norm and linear layer by px"]
)
def test_numbers_are_drawn_in_the_order_of_memory(name: str) -> None:
    """Channels last, torch draws for all channels of a px before the next px; a part has the layout of the whole, even
    where it is one column."""
    torch.manual_seed(0)
    network = OPERATIONS[name].network()
    network.operation = nn.Sequential(network.operation, nn.Dropout(0.3))  # type: ignore[assignment]
    network = network.double().to(memory_format=torch.channels_last)
    errors = team_error(network, (2, 2, 16, 4), Grid(1, 3))
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None


@pytest.mark.parametrize("p", [0.0, 1.0])
def test_certain_dropout_draws_nothing(p: float) -> None:
    """What is drawn afterwards is drawn from the same state."""
    torch.manual_seed(0)
    parts = nn.Dropout(p), nn.Dropout2d(p), nn.Conv2d(4, 4, 1), nn.Dropout(0.5)
    network = nn.Sequential(nn.Conv2d(2, 4, 3), *parts, Call(lambda x: F.dropout(x, 0.2)), nn.Conv2d(4, 2, 3))
    errors = team_error(network.double(), (2, 2, 20, 20), Grid(2, 1))
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None
