"""Ranks of a run, as threads with a simulated GPU each, that talk through the project's ``TorchCommunicator``.

``run_ranks`` gives each thread what a process would have of its own: rank and world in the environment, a device, and
``torch.distributed`` (``nccl.Distributed``).
"""

from __future__ import annotations

import collections
import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch

from parallel.comm import torch_comm, torch_rendezvous
from parallel.comm.kinds import RankKind, from_text, to_text
from parallel.comm.torch_comm import TorchCommunicator
from parallel.offload import rng
from tests.helpers.sim_gpu.gpus import Gpus
from tests.helpers.sim_gpu.nccl import Distributed
from tests.helpers.sim_gpu.timeline import Timeline


def run_ranks(gpus: Gpus, world: int, function: Callable[[TorchCommunicator], Any], timeout_s: float = 60) -> list[Any]:
    """Call ``function`` with the communicator of each of ``world`` ranks, which take the GPUs in turn; return what they
    give, in order.

    Raises:
        Hang: no rank can go on, or ranks do what NCCL would mix up.
    """

    def rank_of(rank: int) -> Any:
        device = torch.device("cuda", rank % gpus.count)
        torch.cuda.set_device(device)
        communicator = TorchCommunicator(device, timeout_s, timeout_s)
        result = function(communicator)
        communicator.close()
        return result

    with within(gpus, world):
        return gpus.run(world, rank_of)


@contextlib.contextmanager
def within(gpus: Gpus, world: int) -> Iterator[Distributed]:
    """Let processes of ``gpus`` be ranks of a run of ``world``."""
    store = Store(gpus.timeline)
    distributed = Distributed(gpus, world, store)
    with pytest.MonkeyPatch.context() as patch:
        for module in (torch_comm, torch_rendezvous):
            patch.setattr(module, "dist", distributed)
        patch.setattr(torch_rendezvous, "open_store", lambda *_: store)
        patch.setattr(torch_rendezvous, "join_attempt", _join_attempt)
        patch.setattr(torch_rendezvous, "call_with_timeout", lambda call, _: call())
        patch.setattr(torch_comm, "OrderedTasks", SendReaper)
        patch.setattr(rng, "DRAWING", contextlib.nullcontext())  # each process has a generator of its own
        patch.setattr(os, "environ", Environment(gpus, world))
        yield distributed


class SendReaper:
    """Waits for sends over Gloo, without the thread: nobody would see that it hangs."""

    def __init__(self, name: str) -> None:
        """Nothing is held."""

    def add(self, wait: Any) -> Any:
        return wait.__self__

    def close(self) -> None:
        """Nothing is held."""


class Store:
    """The key-value store of a run."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._values: dict[str, bytes] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def set(self, key: str, value: str | bytes) -> None:
        with self._timeline.lock:
            self._values[key] = value.encode() if isinstance(value, str) else value
            self._timeline.note()

    def wait(self, keys: Iterable[str], timeout: timedelta | None = None) -> None:
        for key in keys:
            self._timeline.block(lambda key=key: key in self._values, f"the store has no {key}")  # type: ignore[misc]

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self._values[key]

    def add(self, key: str, amount: int) -> int:
        with self._timeline.lock:
            self._counts[key] += amount
            return self._counts[key]


class Environment(collections.UserDict[str, str]):
    """``os.environ``, with what a launcher tells each rank."""

    def __init__(self, gpus: Gpus, world: int) -> None:
        super().__init__(os.environ)
        self._gpus, self._size = gpus, str(world)

    def __getitem__(self, name: str) -> str:
        if name in ("RANK", "LOCAL_RANK"):
            return str(self._gpus.process.rank)
        return self._size if name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE") else super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        return name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE") or super().__contains__(name)


def _join_attempt(store: Store, own: RankKind, rank: int, world: int, _: float) -> tuple[Store, tuple[RankKind, ...]]:
    store.set(f"kind/{rank}", to_text([own]))
    return store, tuple(from_text(store.get(f"kind/{each}"))[0] for each in range(world))
