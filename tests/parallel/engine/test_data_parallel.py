"""Transparency: every number of ranks gives the loss, gradients and running statistics of the plain step."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.comm.local import LocalCommunicator
from parallel.engine.engine import Engine
from parallel.engine.step import Microbatch, NonFiniteLoss, microbatch_seed
from parallel.schedule.shares import split_batch
from tests.helpers.ranks import run_on_ranks

BATCH, M, SEED, STEPS = 7, 3, 11, 3
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}


def small_model(momentum: float | None = 0.1) -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),  # a bias before a norm has no gradient but rounding
        nn.BatchNorm2d(8, momentum=momentum),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Conv2d(8, 6, 3, stride=2, bias=False),
        nn.BatchNorm2d(6, momentum=momentum),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 3),
    )


def data(dtype: torch.dtype, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    size = 12 + 4 * (step % 2)  # tile shapes may change between steps
    return (
        torch.randn(BATCH, 3, size, size, generator=generator, dtype=dtype),
        torch.randint(0, 3, (BATCH,), generator=generator),
    )


def plain_run(dtype: torch.dtype, momentum: float | None) -> dict[str, Any]:
    """The step written out: forward, backward, gradients accumulated per microbatch; nothing of ours but the seeds."""
    model = small_model(momentum).to(dtype)
    optimizer = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(STEPS):
        images, labels = data(dtype, step)
        optimizer.zero_grad()
        total = 0.0
        for i, part in enumerate(cut(step)):
            torch.manual_seed(microbatch_seed(SEED, step, i))
            loss = F.cross_entropy(model(images[list(part)]), labels[list(part)]) * (len(part) / BATCH)
            loss.backward()
            total += loss.item()
        gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        optimizer.step()
        losses.append(total)
    return {"losses": losses, "gradients": gradients, "state": model.state_dict()}


def cut(step: int) -> list[range]:
    """Tiles of each microbatch: near equal at first, then as uneven as they can be."""
    return list(split_batch(BATCH, M)) if step == 0 else [range(1), range(1, 6), range(6, 7)]


def parts_of(engine: Engine, images: Tensor, labels: Tensor, step: int) -> Iterator[Microbatch]:
    """The microbatches that ``engine`` computes."""
    for i in engine.share:
        part = cut(step)[i]
        tiles = images[part.start : part.stop]
        yield Microbatch(tiles, labels[part.start : part.stop], tuple(tiles.shape))


def engine_run(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    dtype, momentum = getattr(torch, argument["dtype"]), argument["momentum"]
    model = small_model(momentum).to(dtype)
    engine = whole(model, communicator, gradient_bytes=argument["buckets"])
    losses = []
    for step in range(STEPS):
        images, labels = data(dtype, step)
        result = engine.step(parts_of(engine, images, labels, step), step, 0.1)
        assert result.tiles == sum(len(cut(step)[i]) for i in engine.share)
        losses.append(result.loss)
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    assert bool(engine.state_dict()) == (communicator.rank == 0)
    sums = [len(reducer.buckets) for reducer in engine._work.reducers.values()]
    return {"losses": losses, "gradients": gradients, "state": model.state_dict(), "sums": sums}


def whole(model: nn.Module, communicator: Communicator, **strategy: Any) -> Engine:
    rule = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    strategy |= {"batch": BATCH, "m": M, "seed": SEED, "shape": (2, 3, 12, 12)}
    return whole_engine(model, F.cross_entropy, rule, communicator, **strategy)


BUCKETS = {"0": 0, "1 KiB": 1 << 10, "default": None}


def all_runs(communicator: Communicator, argument: Any) -> dict[str, Any]:
    """Every case in one start of the ranks, because importing torch is what a start costs."""
    return {
        f"{dtype}-{momentum}": engine_run(communicator, {"dtype": dtype, "momentum": momentum, "buckets": None})
        for dtype in ("float64", "float32")
        for momentum in (0.1, None)
    } | {
        "nan": nan_step(communicator),
        "buckets": {
            name: engine_run(communicator, {"dtype": "float64", "momentum": 0.1, "buckets": size})
            for name, size in BUCKETS.items()
        },
    }


def nan_step(communicator: Communicator) -> dict[str, Any]:
    """Microbatch 2 holds a NaN; only the last rank computes it, all must refuse."""
    model = small_model()
    before = copy.deepcopy(model.state_dict())
    engine = whole(model, communicator)
    images, labels = data(torch.float32, 0)
    images[cut(0)[2][0], 0, 0, 0] = float("nan")
    with pytest.raises(NonFiniteLoss) as caught:
        engine.step(parts_of(engine, images, labels, 0), 0, 0.1)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    return {"microbatches": caught.value.microbatches}


SEVERAL = [pytest.param(2, marks=pytest.mark.process), pytest.param(3, marks=pytest.mark.process)]


class Runs:
    """What every rank of so many gives; they run when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[int, list[dict[str, Any]]] = {}

    def __getitem__(self, world: int) -> list[dict[str, Any]]:
        if world not in self._done:
            target = "tests.parallel.engine.test_data_parallel:all_runs"
            self._done[world] = run_on_ranks(world, target, self._folder / str(world)) if world > 1 else self._alone()
        return self._done[world]

    def _alone(self) -> list[dict[str, Any]]:
        return [all_runs(LocalCommunicator(), None)]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("world", [1, *SEVERAL])
@pytest.mark.parametrize("momentum", [0.1, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ranks_equal_the_plain_step(runs: Runs, dtype: torch.dtype, momentum: float | None, world: int) -> None:
    plain = plain_run(dtype, momentum)
    tolerance = TOLERANCE[dtype]
    for rank in runs[world]:
        ours = rank[f"{str(dtype).removeprefix('torch.')}-{momentum}"]
        assert ours["losses"] == pytest.approx(plain["losses"], rel=tolerance)
        for expected, found in zip(plain["gradients"], ours["gradients"], strict=True):
            assert (expected - found).abs().max() <= tolerance * expected.abs().max()
        for name, expected in plain["state"].items():
            difference = (expected - ours["state"][name]).abs().max()
            assert difference <= tolerance * max(1, expected.abs().max()), name


@pytest.mark.parametrize("world", [1, *SEVERAL])
@pytest.mark.parametrize("size", BUCKETS)
def test_gradients_summed_in_buckets_of_any_size(runs: Runs, size: str, world: int) -> None:
    plain = plain_run(torch.float64, 0.1)
    for rank in runs[world]:
        ours = rank["buckets"][size]
        assert ours["losses"] == pytest.approx(plain["losses"], rel=1e-10)
        for expected, found in zip(plain["gradients"], ours["gradients"], strict=True):
            assert (expected - found).abs().max() <= 1e-10 * expected.abs().max()
        if world > 1:
            # The convolutions are 1728 and 3456 bytes.
            assert ours["sums"] == [4 if size == "1 KiB" else 1]


@pytest.mark.parametrize("world", SEVERAL)
def test_ranks_hold_equal_parameters(runs: Runs, world: int) -> None:
    first, *others = (rank["float32-0.1"]["state"] for rank in runs[world])
    for other in others:
        assert all(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("world", [1, *SEVERAL])
def test_nan_in_one_microbatch_stops_every_rank_before_the_update(runs: Runs, world: int) -> None:
    assert [rank["nan"]["microbatches"] for rank in runs[world]] == [[2]] * world


def test_more_ranks_than_microbatches_is_refused() -> None:
    with pytest.raises(ValueError, match="9 microbatches need a batch of at least 9 tiles, got 7"):
        whole_engine(small_model(), F.cross_entropy, torch.optim.SGD, LocalCommunicator(), batch=7, m=9)
