"""Operations by a team, on parts of any size, give what one device gives: outputs, draws, statistics, all gradients."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from timm.layers import DropPath
from torch import Tensor, nn

from parallel.comm.communicator import Communicator
from parallel.comm.thread_comm import run_on_threads
from parallel.graph.partition import Partition
from parallel.space.team import SpatialMesh, TeamGrid
from parallel.team.team_comm import TeamComm
from parallel.team.team_plan import BoxedParts, team_plans
from parallel.team.team_stages import team_stages
from parallel.trace.trace import trace_as_it_runs
from tests.helpers.small_nets import Made
from tests.helpers.team_error import team_error
from tests.helpers.team_operations import OPERATIONS, Call, Network

EXACT, SHAPE, SQUARE = 1e-12, (2, 2, 37, 29), (2, 2, 20, 20)
HALVES, QUARTERS = TeamGrid(2, 1), TeamGrid(2, 2)


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
    grid = random.Random(name).choice([HALVES, TeamGrid(1, 2), TeamGrid(3, 1), QUARTERS])
    torch.manual_seed(0)
    errors = team_error(OPERATIONS[name].network().double(), SHAPE, grid)
    assert errors.largest <= EXACT, errors
    assert errors.ends_at is None
    assert sum(errors.sent_bytes) > 0


class Branches(nn.Module):
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


class Skips(nn.Module):
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


def changed() -> nn.Module:
    """Member 0 changes the map that it gathered; whoever takes the map later must not take the parts."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        y.relu_()
        return m.last(y)

    return Made(compute, first=nn.Conv2d(2, 4, 3, padding=1), last=nn.Conv2d(4, 2, 3))


def assigned() -> nn.Module:
    """Each member follows the gradients of what is assigned; what is assigned to is with member 0."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        both = y.new_zeros(y.shape)
        both[:, :2] = y[:, 2:]
        z = 2 * y
        z[:, :2] = m.second(y)[:, :2]
        z[:, 1:] /= 2
        z.mul_(0.5).add_(m.drop(m.second(y)))
        return m.last(m.drop(z) + both)

    second = nn.Conv2d(4, 4, 1)
    return Made(
        compute, first=nn.Conv2d(2, 4, 3, padding=1), second=second, drop=nn.Dropout(0.4), last=nn.Conv2d(4, 2, 3)
    )


def cut_off() -> nn.Module:
    """Of some values that member 0 computes, nothing flows back."""

    def compute(m: Any, x: Tensor) -> Tensor:
        y = m.first(x)
        chosen = m.second(y).argmax(1, keepdim=True)
        with torch.no_grad():
            before = m.second(y).sort(3).values
        return m.last(y.sort(2).values + y.detach().sort(3).values + before) * chosen

    return Made(
        compute, first=nn.Conv2d(2, 4, 3, padding=1), second=nn.Conv2d(4, 4, 3, padding=1), last=nn.Conv2d(4, 2, 1)
    )


def sequence(parts: Callable[[], Iterable[nn.Module]]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*parts())


def drawing(name: str) -> Callable[[], nn.Module]:
    """Channels last, torch draws for all channels of a px before the next px, even where a part is one column."""

    def make() -> nn.Module:
        network = OPERATIONS[name].network()
        network.operation = nn.Sequential(network.operation, nn.Dropout(0.3))
        return network.to(memory_format=torch.channels_last)

    return make


def certain(p: float) -> list[nn.Module]:
    """Dropout that draws nothing: what is drawn afterwards is drawn from the same state."""
    first = [nn.Conv2d(2, 4, 3), nn.Dropout(p), nn.Dropout2d(p), nn.Conv2d(4, 4, 1), nn.Dropout(0.5)]
    return [*first, Call(lambda x: F.dropout(x, 0.2)), nn.Conv2d(4, 2, 3)]


FLATTENED = ("flatten", "makes other dims of rows and columns")
ONE_PX = ("_1 (1)", "gives maps of 1 x 1 px, of which not every member of a 2x1 team has a part")
CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], TeamGrid, Any, Any]] = {
    # The others have not drawn, and go on from where it is: else their masks would be of other numbers.
    "member 0 alone draws between draws of all": (Branches, (2, 2, 24, 20), QUARTERS, {}, FLATTENED),
    **{f"draws after {name}": (drawing(name), (2, 2, 16, 4), TeamGrid(1, 3), {}, None) for name in (
        "convolution 3x3", "bilinear, factor 2", "batch norm", "layer norm and linear layer by px")},
    **{f"dropout of {p}": (sequence(functools.partial(certain, p)), SQUARE, HALVES, {}, None) for p in (0.0, 1.0)},
    **{f"evaluation of {name}": (OPERATIONS[name].network, SHAPE, QUARTERS, {"training": False}, None) for name in (
        "convolution, batch norm, ReLU", "dropout", "squeeze and excitation")},
    # Member 1 has the last row, which no window comes to; of a map of 2 rows it makes the row after.
    "windows of padding alone": (
        lambda: Network(nn.Conv2d(4, 4, 1, (2, 1), (2, 0)), 4), (2, 2, 2, 9), HALVES, {}, None),
    # As dropout behind the pool of torchvision's EfficientNet does.
    "a sum that is changed in place": (
        sequence(lambda: (
            nn.Conv2d(2, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Dropout(0.5, inplace=True), nn.Conv2d(4, 3, 1))),
        SQUARE, HALVES, {}, ...),
    **{f"boxes of {grid}": (Skips, (2, 3, 36, 48), grid, {"training": training, "boxed": BoxedParts(8, 0)}, ...)
       for grid, training in ((HALVES, True), (QUARTERS, True), (TeamGrid(1, 3), False))},
    "a whole map that leaves is gathered": (
        sequence(lambda: (nn.Conv2d(3, 4, 5, padding=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3, dilation=3))),
        (1, 3, 40, 33), HALVES, {"boxed": BoxedParts(7)}, ...),
    # A norm of 1 x 1 px over two members has no second part; the plan says so.
    "maps with less px than members": (
        sequence(lambda: (nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 20, 20), nn.BatchNorm2d(4), nn.ReLU())),
        SQUARE, HALVES, {}, ONE_PX),
    "ties of maxima go to the px that torch takes": (
        lambda: Network(Call(lambda x: F.max_pool2d((4 * x).clamp(-1, 1), 3, 2, 1)), 4), SHAPE, HALVES, {}, None),
    "parts that are assigned": (assigned, SHAPE, HALVES, {}, ...),
    "parts that are assigned, in boxes": (assigned, SHAPE, HALVES, {"boxed": BoxedParts(8)}, ...),
    "values that nothing flows back through": (cut_off, SHAPE, HALVES, {}, ...),
    "dropped paths": (lambda: Network(DropPath(0.4), 4), SHAPE, HALVES, {}, None),
    "a map that is changed in place outside the team": (changed, SHAPE, HALVES, {}, ...),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_exact(case: str) -> None:
    make, shape, grid, options, ends_at = CASES[case]
    torch.manual_seed(0)
    errors = team_error(make().double(), shape, grid, **options)
    assert errors.largest <= EXACT, errors
    assert ends_at is ... or errors.ends_at == ends_at
    assert make is not Skips or all(errors.sent_bytes), "every member has rims that others look at"
    assert make is not changed or errors.ends_at is not None


def test_several_maps_as_one_value_of_a_layer_outside_the_team_are_refused() -> None:
    """Member 0 gathered a tuple, and training ended in an error of it."""
    net = Network(Call(lambda x: torch.vstack(x.chunk(2, 1))), 2)
    with pytest.raises(ValueError, match="chunk is several tensors, which vstack takes outside the boxes"):
        team_error(net, SHAPE, HALVES)


def test_factors_have_the_type_of_their_map_in_mixed_precision() -> None:
    """Factors in float32, the type of the plan, made a float32 map of a bfloat16 map."""
    drawn = Call(lambda x: x * torch.rand((x.shape[0], 1, 1, 1), dtype=x.dtype, device=x.device))
    net = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.Dropout2d(0.3), DropPath(0.4), drawn)
    traced = trace_as_it_runs(net, SQUARE, torch.float32)

    def member(communicator: Communicator, _: None) -> torch.dtype:
        own, comm, whole = copy.deepcopy(traced), TeamComm(communicator), Partition(traced.graph, (0,))
        stage = team_stages(own, whole, [0], HALVES, comm, team_plans(own, HALVES), torch.device("cpu"))[0].train()
        with stage.context(SQUARE), torch.autocast("cpu", torch.bfloat16):
            return stage(stage.tiles(torch.randn(SQUARE), SQUARE))[0].dtype

    assert run_on_threads(2, member, timeout_s=30) == [torch.bfloat16] * 2
