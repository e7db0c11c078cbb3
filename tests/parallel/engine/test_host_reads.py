"""No step reads from its device before its end: on a GPU the host would wait, and queue nothing meanwhile.

The device is torch's "meta", whose tensors have no values: whatever reads one fails. Losses, which are read at the end
of a step, are counted in place of being read.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from app.training.engines import build_engine
from models.losses import TileClassLoss
from parallel.comm.communicator import Communicator
from parallel.comm.grad_reducer import GradReducer
from parallel.comm.local import LocalCommunicator
from parallel.comm.thread_comm import ThreadGroup, run_on_threads
from parallel.engine import engine, step
from parallel.engine.step import Microbatch
from parallel.memory.policy import ActivationPolicy
from parallel.space.team import Grid
from parallel.strategy import Strategy
from tests.helpers.sim_gpu import simulated

META = torch.device("meta")
M = 4
STRATEGIES = {
    "single": Strategy("single", 1, 1, M),
    "offload": Strategy("single", 1, 1, M, policy=ActivationPolicy(offload="overlap")),
    "ddp": Strategy("ddp", 2, 1, M),
    "gpipe": Strategy("gpipe", 2, 2, M),
    "1f1b in two groups": Strategy("1f1b", 4, 2, M),
    "deferred statistics": Strategy("1f1b", 4, 2, M, statistics="deferred"),
    "zero-bubble": Strategy("zero-bubble", 2, 2, M),
    "master, recomputed": Strategy("master", 2, 2, M, policy=ActivationPolicy("block")),
}


def net() -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(4, 2)),
    )


@pytest.fixture(autouse=True)
def no_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not know the device."""
    monkeypatch.setattr(torch, "autocast", lambda *_, **__: contextlib.nullcontext())
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)


def without_values(losses: Mapping[int, tuple[Tensor, int]], m: int) -> Tensor:
    assert all(mean.is_meta for mean, _ in losses.values())
    return step.read_losses({i: (torch.tensor(1.0), tiles) for i, (_, tiles) in losses.items()}, m)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_step_reads_nothing_but_its_losses(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "read_losses", without_values)
    strategy = STRATEGIES[name]
    shape = (1, 3, 16, 16)
    microbatch = Microbatch(torch.empty(shape, device=META), torch.empty(1, dtype=torch.int64, device=META), shape)

    def two_steps(communicator: Communicator, _: Any) -> int:
        make = functools.partial(torch.optim.SGD, lr=0.1)
        made = build_engine(strategy, net(), F.cross_entropy, make, communicator, batch=M, tile=16, seed=0, device=META)
        return sum(made.step([microbatch for _ in made.share], number, 0.1).tiles for number in range(2))

    assert sum(run_on_threads(strategy.ranks, two_steps, timeout_s=20)) == 2 * M


def test_a_team_reads_as_often_whatever_the_microbatches() -> None:
    """Its members lack the gradients of what one of them computes alone, and read once a step whether any has them."""
    cuda, shape = torch.device("cuda", 0), (1, 3, 16, 16)

    def waits(m: int) -> list[int]:
        group = ThreadGroup(2, 20)
        strategy = Strategy("spatial", 2, 1, m, grid=Grid(2, 1))

        def step_of(rank: int) -> int:
            make = functools.partial(torch.optim.SGD, lr=0.1)
            made = build_engine(
                strategy,
                net(),
                TileClassLoss(None),
                make,
                group.communicator(rank),
                batch=m,
                tile=16,
                seed=0,
                device=cuda,
            )
            images, targets = torch.ones(shape).to(cuda), torch.zeros(1, dtype=torch.int64).to(cuda)
            for number in range(2):
                gpus.process.hazards.syncs.clear()  # indices of boxes go to the device in the first step
                made.step([Microbatch(images, targets, shape)] * m, number, 0.1)
            return gpus.process.hazards.syncs.total()

        with simulated(1) as gpus:
            return gpus.run(2, step_of)

    assert waits(1) == waits(2) == [1, 1]


def test_losses_are_read_in_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[Tensor] = []
    cpu: Callable[[Tensor], Tensor] = Tensor.cpu
    monkeypatch.setattr(Tensor, "cpu", lambda tensor: copies.append(tensor) or cpu(tensor))
    losses = {i: (torch.tensor(0.1 * i), i) for i in (3, 0, 2)}
    table = step.read_losses(losses, 5)
    assert len(copies) == 1
    assert table.dtype == torch.float64
    expected = [float(torch.tensor(0.1 * i)) for i in range(4)]
    assert table.tolist() == [[0, 0, expected[2], expected[3], 0], [0, 0, 2, 3, 0]]


def test_hooks_of_gradients_ask_the_device_for_nothing() -> None:
    """Which parameters a rank has gradients for is counted once a step, with one operation on all of a bucket."""
    reducer = GradReducer(nn.Linear(3, 3).parameters(), LocalCommunicator(), overlap=False)
    reducer.begin_step()
    with Operations() as asked:
        reducer._added(0, 0)
        reducer._added(0, 1)
    assert not asked.names
    with Operations() as asked:
        reducer.begin()
        reducer.finish()
    assert asked.names == ["aten.slice.Tensor", "aten.fill_.Scalar", "aten.as_strided.default"]  # two of them are views


class Operations(TorchDispatchMode):
    """Notes what is asked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.detach.default:  # no work for a device
            self.names.append(str(func))
        return func(*args, **(kwargs or {}))
