"""What the simulated NCCL finds: every fault below is made on purpose."""

from __future__ import annotations

import functools
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from parallel.comm import torch_comm
from parallel.comm.torch_comm import TorchCommunicator
from tests.helpers.sim_gpu import Hang, simulated
from tests.helpers.sim_gpu.ranks import run_ranks


def ones(communicator: TorchCommunicator, count: int = 4, **form: Any) -> Tensor:
    return torch.ones(count, device=f"cuda:{communicator.rank}", **form)


def linked(communicator: TorchCommunicator) -> int:
    """Connect two ranks both ways; return the other one."""
    communicator.connect([(0, 1), (1, 0)])
    return 1 - communicator.rank


def exchange(communicator: TorchCommunicator, connected: bool) -> list[float]:
    """Between ranks that are not connected, or share a GPU, over Gloo."""
    other = linked(communicator) if connected else 1 - communicator.rank
    own, theirs = torch.full((4,), communicator.rank + 1.0, device="cuda"), torch.empty(4, device="cuda")
    for work in (communicator.irecv(theirs, other, 0), communicator.isend(own, other, 0)):
        work.wait()
    total, on_host = own + theirs, torch.ones(1)
    communicator.all_reduce(total)
    communicator.all_reduce(on_host)
    if connected:
        part = communicator.subgroup([0, 1])
        part.broadcast(total, 1)
    return [*total.tolist(), *on_host.tolist()]


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("gpus", [3, 2, 1], ids=["not connected", "a GPU each", "one GPU"])
def test_messages_and_sums(gpus: int, late: int | None) -> None:
    with simulated(gpus, late) as simulation:
        for each in run_ranks(simulation, 2, lambda communicator: exchange(communicator, gpus == 2)):
            assert each == [6.0] * 4 + [2.0]
        assert not simulation.found


def no_wait(communicator: TorchCommunicator) -> None:
    other, value = linked(communicator), ones(communicator)
    if communicator.rank:
        communicator.isend(value, other, 0).wait()
    else:
        work = communicator.irecv(value, other, 0)
        value + 1  # before ``wait``
        work.wait()


def sent_and_changed(communicator: TorchCommunicator) -> None:
    other, value = linked(communicator), ones(communicator)
    if communicator.rank:
        communicator.irecv(value, other, 0).wait()
    else:
        work = communicator.isend(value, other, 0)
        value.add_(1)
        work.wait()


@pytest.mark.parametrize("late", [0, 1])
def test_memory_is_held_until_its_message_has_left(late: int) -> None:
    def send(communicator: TorchCommunicator) -> list[float]:
        other, value = linked(communicator), ones(communicator) * 3
        if communicator.rank:
            communicator.isend(value, other, 0)
            del value
            ones(communicator) * 5
            return [3.0] * 4
        communicator.irecv(value, other, 0).wait()
        return value.tolist()

    with simulated(2, late) as gpus:
        assert run_ranks(gpus, 2, send) == [[3.0] * 4] * 2
        assert not gpus.found


def groups_in_another_order(communicator: TorchCommunicator) -> None:
    pairs = [[0, 1], [1, 2]]
    for pair in pairs if communicator.rank else reversed(pairs):
        torch_comm.dist.new_group(pair, backend="nccl")


def another_size(communicator: TorchCommunicator) -> None:
    other = linked(communicator)
    if communicator.rank:
        communicator.isend(ones(communicator, 5), other, 0)
    else:
        communicator.irecv(ones(communicator, 4), other, 0)


def missing_send(communicator: TorchCommunicator) -> None:
    other, value = linked(communicator), ones(communicator)
    if not communicator.rank:
        communicator.irecv(value, other, 0).wait()
        value.tolist()


@pytest.mark.parametrize(
    ("fault", "found"),
    [(no_wait, "unordered.*reads what NCCL's receive"), (sent_and_changed, "unordered.*writes what NCCL's send")],
)
def test_races_are_found(fault: Any, found: str) -> None:
    with simulated(2) as gpus:
        run_ranks(gpus, 2, fault)
        assert any(re.search(found, line) for line in gpus.found), gpus.found


@pytest.mark.parametrize(
    ("fault", "world", "word"),
    [
        (groups_in_another_order, 3, r"rank \d makes one of ranks .*, rank \d one of ranks"),
        (another_size, 2, "meets"),
        (missing_send, 2, "no rank can go on: rank 0"),
    ],
)
@pytest.mark.parametrize("late", [None, 0])
def test_what_would_hang(fault: Any, world: int, word: str, late: int | None) -> None:
    with simulated(world, late) as gpus, pytest.raises(Hang, match=word):
        run_ranks(gpus, world, fault)


def test_a_receive_before_a_pass_that_its_message_depends_on_never_comes() -> None:
    """A device that the host has to wait for in that pass never gets there."""

    def ping_pong(communicator: TorchCommunicator, ahead: bool) -> None:
        other, value, answer = linked(communicator), ones(communicator), ones(communicator)
        if communicator.rank:
            communicator.irecv(value, other, 0).wait()
            communicator.isend(value * 2, other, 0).wait()
            return
        receive = communicator.irecv(answer, other, 0) if ahead else None
        for _ in range(8):
            value = value + 1
        communicator.isend(value, other, 0).wait()
        (receive or communicator.irecv(answer, other, 0)).wait()

    with simulated(2, sync_every=3) as gpus:
        run_ranks(gpus, 2, functools.partial(ping_pong, ahead=False))
    with simulated(2, sync_every=3) as gpus, pytest.raises(Hang, match="rank 0 waits for its device before kernel"):
        run_ranks(gpus, 2, functools.partial(ping_pong, ahead=True))
