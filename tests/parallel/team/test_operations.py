"""Every kind of operation by a team, on parts of any size, gives what one device gives: outputs, and all gradients."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from benchmarks.exactness.spatial_ops import OPERATIONS, Network
from benchmarks.exactness.team_error import team_error
from parallel.space.team import Grid, SpatialMesh

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
