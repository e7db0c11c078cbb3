"""A member's part of a tile, computed in boxes, has the numbers of the plain step: sums, rims and what follows."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.exactness.team_error import team_error
from parallel.space.team import Grid
from parallel.team.boxed_nodes import BoxedParts

EXACT = 1e-12


class Skips(nn.Module):
    """Norms, a pool, a gate, channels dropped, maps added after resampling, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(c, 4, 3, stride=s, padding=1) for c, s in ((3, 1), (4, 2), (4, 1))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.gate, self.drop, self.head = nn.Conv2d(4, 4, 1), nn.Dropout2d(0.4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        wide = F.relu(self.norms[0](self.first(x)))
        deep = self.drop(self.norms[1](self.second(wide)))
        deep = deep * torch.sigmoid(self.gate(deep.mean((2, 3), keepdim=True)))
        y = wide + F.interpolate(self.third(F.max_pool2d(deep, 3, 1, 1)), scale_factor=2, mode="bilinear")
        return self.head(y.mean((2, 3)))


@pytest.mark.parametrize(("grid", "training"), [(Grid(2, 1), True), (Grid(2, 2), True), (Grid(1, 3), False)])
def test_boxes_of_members_are_exact(grid: Grid, training: bool) -> None:
    torch.manual_seed(0)
    errors = team_error(Skips().double(), (2, 3, 36, 48), grid, training, boxed=BoxedParts(8, 0))
    assert errors.largest <= EXACT, errors
    assert all(errors.sent_bytes), "every member has rims that others look at"


def test_a_whole_map_that_leaves_is_gathered() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(
        nn.Conv2d(3, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.ReLU(), nn.Conv2d(4, 2, 3, dilation=3)
    )
    errors = team_error(network.double(), (1, 3, 40, 33), Grid(2, 1), boxed=BoxedParts(7))
    assert errors.largest <= EXACT, errors
