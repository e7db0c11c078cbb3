"""Communicators of every kind keep their contract, count what they send, and tell faults apart."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist

from parallel.comm.communicator import CommunicationError, Communicator, Operation
from parallel.comm.kinds import RankKind, are_mixed, backend_of, from_text, has_gpu_each, own_kind, to_text
from parallel.comm.thread_comm import LocalCommunicator, run_on_threads
from parallel.comm.torch_comm import TorchCommunicator, TorchWork, is_lost_peer
from tests.contracts.communicator_contract import check_communicator
from tests.helpers.forked import run_ranks
from tests.helpers.ranks import run_on_ranks

CONTRACT = "tests.contracts.communicator_contract:check_communicator"
SILENCE = "tests.contracts.communicator_contract:check_silence"
Launcher = Literal["forked", "mpi", "threads"]


def test_local_communicator_keeps_the_contract() -> None:
    assert check_communicator(LocalCommunicator())["world"] == 1


@pytest.mark.parametrize(
    ("launcher", "world"),
    [
        *(("threads", n) for n in (1, 2, 3)),
        pytest.param("threads", 4, marks=pytest.mark.long),
        pytest.param("forked", 2, marks=pytest.mark.process),
        pytest.param("forked", 3, marks=pytest.mark.process),
        *(pytest.param("mpi", n, marks=pytest.mark.process) for n in (1, 3)),
    ],
)
def test_communicator_keeps_the_contract(launcher: Launcher, world: int, tmp_path: Path) -> None:
    results = run_on_ranks(world, CONTRACT, tmp_path, launcher=launcher)
    assert [(result["rank"], result["world"]) for result in results] == [(rank, world) for rank in range(world)]
    assert all(result["bits"] == results[0]["bits"] for result in results)


@pytest.mark.parametrize(
    "launcher", ["threads", *(pytest.param(name, marks=pytest.mark.process) for name in ("forked", "mpi"))]
)
def test_silent_rank_is_named_after_the_time_given(launcher: Launcher, tmp_path: Path) -> None:
    said = r"rank 0 of 2: \w+ of \(2,\) float32 from rank 1, tag 3 failed: "
    # A thread's own error comes out; processes have printed it.
    with pytest.raises((AssertionError, CommunicationError), match=said):
        run_on_ranks(2, SILENCE, tmp_path, 4.0, launcher=launcher, patience_s=2)


BOTH = "cpu:gloo,cuda:nccl"
CPU, GPU, NEXT = RankKind("a", "cpu"), RankKind("a", "cuda", "GPU-0"), RankKind("a", "cuda", "GPU-1")


@pytest.mark.parametrize(
    ("kinds", "backend"),
    [
        ([CPU, CPU], "gloo"),
        ([GPU, NEXT], BOTH),
        ([GPU, GPU], "gloo"),
        ([GPU, RankKind("b", "cuda", "GPU-0")], BOTH),
        ([GPU, CPU], "gloo"),
        ([GPU], BOTH),
    ],
)
def test_nccl_is_for_ranks_with_a_gpu_each(kinds: list[RankKind], backend: str) -> None:
    assert backend_of(kinds) == backend
    assert has_gpu_each(kinds) == (backend == BOTH)
    assert are_mixed(kinds) == ({CPU, GPU} <= set(kinds))
    assert from_text(to_text(kinds)) == tuple(kinds)


def test_a_rank_on_a_cpu_names_its_machine() -> None:
    own = own_kind(torch.device("cpu"))
    assert own == RankKind(own.node, "cpu", "")
    assert own.node


def joined(folder: str) -> None:
    rank = int(os.environ["RANK"])
    own = CPU if rank % 2 else RankKind("a", "cuda", f"GPU-{rank}")
    communicator = TorchCommunicator(torch.device("cpu"), 30, 30, own)
    tensor = torch.tensor([float(rank)])
    communicator.all_reduce(tensor)
    Path(folder, f"{rank}.txt").write_text(f"{to_text(communicator.kinds)} {tensor.item():g}")
    communicator.close()


@pytest.mark.process
def test_ranks_of_two_kinds_join_without_waiting_for_groups_that_others_do_not_make(tmp_path: Path) -> None:
    codes, printed = run_ranks(3, f"{__name__}:joined", [str(tmp_path)], tmp_path, 60)
    assert codes == [0, 0, 0], printed
    told = [(tmp_path / f"{rank}.txt").read_text() for rank in range(3)]
    assert told == [f"{to_text([GPU, CPU, RankKind('a', 'cuda', 'GPU-2')])} 3"] * 3


def test_first_failure_ends_the_others_at_once_and_is_raised() -> None:
    told: list[str] = []

    def one_fails(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 1:
            raise ValueError("tile 7 is broken")
        try:
            communicator.irecv(torch.zeros(1), 1, 0).wait()
        except CommunicationError as fault:
            told.append(str(fault))
            raise

    begun = time.monotonic()
    with pytest.raises(ValueError, match="tile 7 is broken"):
        run_on_threads(3, one_fails, timeout_s=60)
    assert time.monotonic() - begun < 20
    assert len(told) == 2
    assert all("rank 1 failed: ValueError: tile 7 is broken" in text for text in told)


def test_messages_that_do_not_fit_are_a_fault_of_the_sender_or_receiver() -> None:
    def sizes_differ(communicator: Communicator, _: Any) -> None:
        tensor = torch.zeros(2 + communicator.rank)
        act = communicator.irecv if communicator.rank else communicator.isend
        act(tensor, 1 - communicator.rank, 0).wait()

    with pytest.raises(AssertionError, match="2 numbers sent, 3 expected"):
        run_on_threads(2, sizes_differ, timeout_s=10)


def test_abort_stops_the_ranks_that_wait() -> None:
    def stop(communicator: Communicator, _: Any) -> None:
        if communicator.rank:
            communicator.abort()
        else:
            communicator.barrier()

    with pytest.raises(CommunicationError, match="rank 1 asked all to stop"):
        run_on_threads(2, stop, timeout_s=10)


NCCL_MEMORY = dist.DistBackendError(
    "NCCL error in: NCCLUtils.cpp:94, unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n"
    "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 4194304 bytes"
)
CUDA_MEMORY = dist.DistBackendError("NCCL error\nLast error:\nCuda failure 2 'out of memory'")
LOST = dist.DistBackendError("NCCL communicator was aborted on rank 1")
GLOO = RuntimeError("[gloo/transport/tcp/pair.cc] Connection closed by peer")
DEVICE = torch.AcceleratorError("CUDA error: an illegal memory access was encountered", 700)


@pytest.mark.parametrize(
    ("fault", "expected", "is_lost"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), torch.OutOfMemoryError, False),
        (NCCL_MEMORY, torch.OutOfMemoryError, False),
        (CUDA_MEMORY, torch.OutOfMemoryError, False),
        (DEVICE, torch.AcceleratorError, False),
        (LOST, CommunicationError, True),
        (GLOO, CommunicationError, True),
    ],
)
def test_faults_keep_their_kind(fault: RuntimeError, expected: type[RuntimeError], is_lost: bool) -> None:
    def wait() -> None:
        raise fault

    with pytest.raises(expected, match=r"(?i)memory|rank|peer"):
        TorchWork(SimpleNamespace(wait=wait), [], Operation(0, 2, "irecv")).wait()
    assert is_lost_peer(fault) == is_lost


def test_rank_that_still_computes_long_after_a_failure_is_named() -> None:
    release = threading.Event()

    def one_fails(communicator: Communicator, _: Any) -> None:
        if communicator.rank == 0:
            raise ValueError("no")
        release.wait(30)

    try:
        with pytest.raises(CommunicationError, match=r"ranks \[1\] still compute"):
            run_on_threads(2, one_fails, timeout_s=0.2)
    finally:
        release.set()


def test_nothing_is_left_of_messages_that_have_arrived() -> None:
    def chat(communicator: Communicator, _: Any) -> int:
        other = 1 - communicator.rank
        begin = communicator.isend if communicator.rank else communicator.irecv
        for tag in range(5):
            begin(torch.ones(2), other, tag).wait()
        communicator.barrier()
        return len(communicator._group.waiting)

    assert run_on_threads(2, chat) == [0, 0]
