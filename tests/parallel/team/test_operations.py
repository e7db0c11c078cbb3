"""Every kind of operation by a team, on parts of any size, gives what one device gives: outputs, and all gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parallel.space.team import Grid, SpatialMesh
from parallel.team.team_plan import BoxedParts
from tests.helpers.team_error import team_error
from tests.helpers.team_operations import OPERATIONS, Network

EXACT = 1e-12
SHAPE = (2, 2, 37, 29)


@pytest.fixture
def uneven(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Cuts drawn at random, so that a part may be much smaller than another."""

    def cuts_from(seed: str) -> None:
        def cuts(side: int, parts: int) -> tuple[int, ...]:
            draw = random.Random(f"{seed} {side} {parts}")  # every member asks for them
            return (0, *sorted(draw.sample(range(8, side - 8, 3), parts - 1)), side)

        monkeypatch.setattr("parallel.space.team.team_cuts", cuts)

    caches = SpatialMesh.exchange, SpatialMesh.gathered
    for cache in caches:
        cache.cache_clear()
    yield cuts_from
    for cache in caches:
        cache.cache_clear()


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("name", OPERATIONS)
def test_one_operation_on_uneven_parts(name: str, uneven: Callable[[str], None]) -> None:
    uneven(name)
    grid = random.Random(name).choice([Grid(2, 1), Grid(1, 2), Grid(3, 1), Grid(2, 2)])
    torch.manual_seed(0)
    errors = team_error(OPERATIONS[name].network().double(), SHAPE, grid)
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None
    assert sum(errors.sent_bytes) > 0


@pytest.mark.parametrize("name", ["convolution, batch norm, ReLU", "dropout", "squeeze and excitation"])
def test_evaluation(name: str) -> None:
    torch.manual_seed(0)
    errors = team_error(OPERATIONS[name].network().double(), SHAPE, Grid(2, 2), training=False)
    assert errors.largest <= EXACT, errors


def test_windows_of_padding_alone_do_not_come_to_the_map() -> None:
    """Member 1 has the last row, which no window comes to; of a map of 2 rows it makes the row after."""
    torch.manual_seed(0)
    network = Network(nn.Conv2d(4, 4, 1, (2, 1), (2, 0)), 4)
    errors = team_error(network.double(), (2, 2, 2, 9), Grid(2, 1))
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None


def test_what_follows_a_sum_may_change_it_in_place() -> None:
    """As dropout behind the pool of torchvision's EfficientNet does."""
    torch.manual_seed(0)
    parts = nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5, inplace=True), nn.Conv2d(4, 3, 1)
    errors = team_error(nn.Sequential(*parts).double(), (2, 2, 20, 20), Grid(2, 1))
    assert errors.largest <= EXACT, errors


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
