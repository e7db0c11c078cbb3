"""Threads that a rank starts work on its GPU: a call on another opens a context there, of a third of a gigabyte."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from app.checkpoint import two_phase
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from parallel.comm import torch_rendezvous
from parallel.comm.device_thread import OrderedTasks
from parallel.comm.kinds import RankKind
from parallel.comm.local import LocalCommunicator
from parallel.comm.mixed_comm import MixedCommunicator
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import HostOptimizer
from tests.helpers.sim_gpu import Gpus, simulated

Told = Callable[..., None]


def host_optimizer(told: Told, patch: pytest.MonkeyPatch, folder: Path) -> None:
    layer = nn.Linear(2, 2)
    host = HostOptimizer(lambda named: torch.optim.SGD(named, lr=0.1), dict(layer.named_parameters()), Copies())
    host.before_update = told
    layer(torch.ones(1, 2)).sum().backward()
    host.apply(0.1)


def sends(told: Told, patch: pytest.MonkeyPatch, folder: Path) -> None:
    messages = OrderedTasks("sends")
    messages.add(told).wait()
    messages.close()


def mixed_sums(told: Told, patch: pytest.MonkeyPatch, folder: Path) -> None:
    mixed = MixedCommunicator(LocalCommunicator(), [RankKind("a", "cuda", "0")], "device")
    mixed._sums.add = told  # type: ignore[method-assign]
    mixed.all_reduce(torch.ones(2))
    mixed.close()


def checkpoint(told: Told, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(two_phase, "save_checkpoint", told)
    checkpoints = TwoPhaseCheckpoints(torch.device("cpu"))
    checkpoints.begin({"model": {}, "optimizer": {}}, frozenset(), folder / "last.pt", None)
    checkpoints.finish()


def connection(told: Told, patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(torch_rendezvous, "open_store", lambda *_: None)
    patch.setattr(torch_rendezvous, "join_attempt", lambda *_: (None, ()))
    patch.setattr(dist, "init_process_group", told)
    torch_rendezvous.join_group(lambda kinds: "gloo", RankKind("a", "cpu"), 0, 1, None, 1.0)  # type: ignore[arg-type]


@pytest.fixture
def on_gpu_1() -> Iterator[Gpus]:
    with simulated(2) as gpus:
        torch.cuda.set_device(1)
        yield gpus


@pytest.mark.parametrize("start", [host_optimizer, sends, mixed_sums, checkpoint, connection])
def test_a_thread_works_on_the_gpu_of_its_rank(
    start: Callable[..., None], on_gpu_1: Gpus, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    devices: queue.SimpleQueue[int] = queue.SimpleQueue()

    start(lambda *_, **__: devices.put(torch.cuda.current_device()), monkeypatch, tmp_path)
    assert devices.get(timeout=10) == 1
    assert on_gpu_1.process.contexts == {1}
