"""Tensors on a GPU over an MPI that only records: nothing blocks; threads work on the GPU of their rank."""

from __future__ import annotations

import atexit
import importlib
import queue
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from app.checkpoint import two_phase
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from parallel.comm import torch_rendezvous
from parallel.comm.device_thread import OrderedTasks
from parallel.comm.kinds import RankKind
from parallel.comm.mixed_comm import MixedCommunicator
from parallel.comm.thread_comm import LocalCommunicator
from parallel.offload.copies import Copies
from parallel.offload.host_optimizer import HostOptimizer
from tests.helpers.sim_gpu import Gpus, simulated

MODULES = ("mpi4py", "parallel.comm.mpi_comm")


class FakeMpi:
    """MPI that does at once what it is asked for, and notes it.

    Attributes:
        begun: (name, tag) of each operation; ``places``: the addresses of their memory.
    """

    Exception = type("Exception", (RuntimeError,), {})
    COMM_TYPE_SHARED = THREAD_MULTIPLE = 3
    BYTE = UINT8_T = INT32_T = INT64_T = FLOAT = DOUBLE = 1
    buffer = SimpleNamespace(fromaddress=lambda address, size: address)

    def __init__(self) -> None:
        self.begun: list[tuple[str, int]] = []
        self.places: list[int] = []
        self.COMM_WORLD = self

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name in ("Isend", "Irecv"):
            return lambda memory, peer, tag: self._begin(name, memory, tag)
        if name == "Iallreduce":
            return lambda place, memory: self._begin(name, memory, -1)
        if name in ("Dup", "Split_type"):
            return lambda *_: self
        return lambda *_: {"Get_size": 2, "Query_thread": 3}.get(name, 0)

    def _begin(self, name: str, memory: Any, tag: int) -> Any:
        self.begun.append((name, tag))
        self.places.append(memory[0])
        return SimpleNamespace(Test=lambda: True)


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A rank on the second of two GPUs, which do nothing until somebody waits for them, and its MPI."""
    for name in MODULES:
        monkeypatch.setitem(sys.modules, name, None)
        del sys.modules[name]
    mpi, made = FakeMpi(), list[Any]()
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=mpi))

    def make() -> Any:
        module = importlib.import_module("parallel.comm.mpi_comm")
        made.append(module.MpiCommunicator(5, 2))
        return made[-1]

    with simulated(2, late=0) as gpus:
        torch.cuda.set_device(1)
        waits = gpus.process.hazards.syncs
        yield SimpleNamespace(mpi=mpi, make=make, waits=waits.total)
        for communicator in made:
            communicator.progress.stop()
            atexit.unregister(communicator.progress.stop)
        assert gpus.process.contexts == {1}
        assert not gpus.found


def test_copies_to_the_host_run_beside_the_device_and_keep_the_order(rank: Any) -> None:
    communicator, sent = rank.make(), torch.arange(4.0, device="cuda")
    assert not communicator._device_memory  # this process has no CUDA-aware MPI
    works = [communicator.isend(sent, 1, 5), communicator.iall_reduce(sent), communicator.isend(torch.zeros(1), 1, 6)]
    assert not any(work.done() for work in works)
    assert (rank.mpi.begun, rank.waits()) == ([], 0), "what is on the host does not overtake, either"
    torch.cuda.synchronize()
    for work in works:
        work.wait()
    assert rank.mpi.begun == [("Isend", 5), ("Iallreduce", -1), ("Isend", 6)]
    assert rank.waits() == 1


def test_received_data_are_copied_to_the_device_without_waiting(rank: Any) -> None:
    rank.make().irecv(torch.zeros(4, device="cuda"), 1, 5).wait()
    assert (rank.mpi.begun, rank.waits()) == ([("Irecv", 5)], 0)


@pytest.mark.parametrize(("variable", "direct"), [(None, True), ("1", True), ("0", False)])
def test_device_memory_is_given_to_mpi_once_it_is_computed_and_unless_switched_off(
    variable: str | None, direct: bool, rank: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    query = SimpleNamespace(MPIX_Query_cuda_support=lambda: 1)
    monkeypatch.setattr("ctypes.CDLL", lambda name: query)
    if variable is not None:
        monkeypatch.setenv("MEGATILE_CUDA_AWARE_MPI", variable)
    sent = torch.arange(4.0, device="cuda")
    communicator = rank.make()
    works = [communicator.isend(sent, 1, 5), communicator.iall_reduce(sent)]
    assert rank.mpi.begun == []
    torch.cuda.synchronize()
    for work in works:
        work.wait()
    assert rank.mpi.begun == [("Isend", 5), ("Iallreduce", -1)]
    assert [place == sent.data_ptr() for place in rank.mpi.places] == [direct, False], "sums are on the host"


def test_a_fault_of_the_gpu_is_not_that_of_another_rank(rank: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(event: object) -> bool:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)

    monkeypatch.setattr(torch.cuda.Event, "query", fail)
    work = rank.make().isend(torch.arange(4.0, device="cuda"), 1, 5)
    with pytest.raises(torch.AcceleratorError):
        work.wait()


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
    mixed._sums.add = told
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
    torch_rendezvous.join_group(RankKind("a", "cpu"), 0, 1, None, 1.0)


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
