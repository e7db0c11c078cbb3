"""What the simulated NCCL finds: every fault below is made on purpose."""

from __future__ import annotations

from collections.abc import Callable
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


def exchange(communicator: TorchCommunicator) -> list[float]:
    other = linked(communicator)
    own, theirs = ones(communicator) * (communicator.rank + 1), ones(communicator)
    works = [communicator.irecv(theirs, other, 0), communicator.isend(own, other, 0)]
    for work in works:
        work.wait()
    total, on_host = own + theirs, torch.ones(1)
    communicator.all_reduce(total)
    communicator.all_reduce(on_host)
    part = communicator.subgroup([0, 1])
    assert part is not None
    part.broadcast(total, 1)
    return [*total.tolist(), *on_host.tolist()]


@pytest.mark.parametrize("late", [None, 0, 1])
@pytest.mark.parametrize("gpus", [3, 2, 1], ids=["not connected", "a GPU each", "one GPU"])
def test_messages_and_sums(gpus: int, late: int | None) -> None:
    with simulated(gpus, late) as simulation:
        for each in run_ranks(simulation, 2, exchange if gpus == 2 else through_host):
            assert each == [6.0] * 4 + [2.0]
        assert not simulation.found


def through_host(communicator: TorchCommunicator) -> list[float]:
    """``exchange`` between ranks that are not connected, or share a GPU: over Gloo."""
    other, own = 1 - communicator.rank, torch.full((4,), communicator.rank + 1.0, device="cuda")
    theirs = torch.empty_like(own)
    for work in (communicator.irecv(theirs, other, 0), communicator.isend(own, other, 0)):
        work.wait()
    total, on_host = own + theirs, torch.ones(1)
    communicator.all_reduce(total)
    communicator.all_reduce(on_host)
    return [*total.tolist(), *on_host.tolist()]


def halos(communicator: TorchCommunicator, count: int = 2) -> list[list[float]]:
    """Neighbours of a row exchange twice, before and after a sum of all."""
    rank, world = communicator.rank, communicator.world
    near = [peer for peer in (rank - 1, rank + 1) if 0 <= peer < world]
    communicator.all_reduce(ones(communicator))
    found = []
    for turn in range(count):
        own = ones(communicator) * (10 * turn + rank)
        places = [ones(communicator) for _ in near]
        _, works = communicator.exchange([(peer, own) for peer in near], list(zip(near, places, strict=True)), turn)
        del own
        total = ones(communicator)
        communicator.all_reduce(total)
        for work in works:
            work.wait()
        found.append([float(place[0]) for place in places] + [float(total[0])])
    return found


@pytest.mark.parametrize("late", [None, 0, 1])
def test_neighbours_exchange_in_one_communicator(late: int | None) -> None:
    with simulated(4, late) as gpus:
        found = run_ranks(gpus, 4, halos)
        assert found[1] == [[0, 2, 4], [10, 12, 4]]
        assert found[3] == [[2, 4], [12, 4]]
        assert not gpus.found


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


def no_wait_event(communicator: TorchCommunicator) -> None:
    side, value = torch.cuda.Stream(), ones(communicator)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        value + 1


def no_record_stream(communicator: TorchCommunicator) -> None:
    side, value = torch.cuda.Stream(), ones(communicator)  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value + 1
    del value
    ones(communicator)


def waited_elsewhere(communicator: TorchCommunicator) -> None:
    other, value, side = linked(communicator), ones(communicator), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    work = communicator.isend(value, other, 0) if communicator.rank else communicator.irecv(value, other, 0)
    with torch.cuda.stream(side):
        work.wait()
    del value, work  # given out again on a stream that has not waited
    ones(communicator)


@pytest.mark.parametrize(
    ("fault", "found"),
    [
        (no_wait, "reads what NCCL's receive"),
        (sent_and_changed, "writes what NCCL's send"),
        (no_wait_event, "reads what"),
        (no_record_stream, "memory freed"),
        (waited_elsewhere, "memory freed"),
    ],
)
def test_races_are_found(fault: Callable[[TorchCommunicator], None], found: str) -> None:
    with simulated(2) as gpus:
        run_ranks(gpus, 2, fault)
        assert any("unordered" in line and found in line for line in gpus.found), gpus.found


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
        return value.tolist()  # type: ignore[no-any-return]

    with simulated(2, late) as gpus:
        assert run_ranks(gpus, 2, send) == [[3.0] * 4] * 2
        assert not gpus.found


def cpu_tensor(communicator: TorchCommunicator) -> None:
    links(communicator).isend(torch.ones(4), 1 - communicator.rank)


def int16(communicator: TorchCommunicator) -> None:
    group = torch_comm.dist.new_group([0, 1], backend="nccl")
    torch_comm.dist.isend(ones(communicator, dtype=torch.int16), 1 - communicator.rank, group)


def strided(communicator: TorchCommunicator) -> None:
    links(communicator).isend(ones(communicator)[::2], 1 - communicator.rank)


def links(communicator: TorchCommunicator) -> torch_comm.Links:
    linked(communicator)
    return communicator._links


@pytest.mark.parametrize(
    ("fault", "error", "word"),
    [
        (cpu_tensor, RuntimeError, "No backend type associated with device type cpu"),
        (int16, TypeError, "data type is not supported"),
        (strided, (ValueError, RuntimeError), "contiguous|stride"),
    ],
)
def test_what_nccl_refuses(fault: Callable[[TorchCommunicator], None], error: Any, word: str) -> None:
    with simulated(2) as gpus, pytest.raises(error, match=word):
        run_ranks(gpus, 2, fault)


def groups_in_another_order(communicator: TorchCommunicator) -> None:
    pairs = [[0, 1], [1, 2]]
    for pair in pairs if communicator.rank else reversed(pairs):
        torch_comm.dist.new_group(pair, backend="nccl")


def groups_of_two_parts(communicator: TorchCommunicator) -> None:
    """Each half of the run makes a group of its own, as predictions over stages once did."""
    first = communicator.rank // 2 * 2
    torch_comm.dist.new_group([first, first + 1], backend="nccl")


def both_ways_in_one_group(communicator: TorchCommunicator) -> None:
    group, value, other = torch_comm.dist.new_group([0, 1], backend="nccl"), ones(communicator), 1 - communicator.rank
    torch_comm.dist.irecv(value, other, group)
    torch_comm.dist.isend(value, other, group)


def another_size(communicator: TorchCommunicator) -> None:
    other = linked(communicator)
    if communicator.rank:
        communicator.isend(ones(communicator, 5), other, 0)
    else:
        communicator.irecv(ones(communicator, 4), other, 0)


def host_meets_device(communicator: TorchCommunicator) -> None:
    """A tensor of the host leaves over Gloo, and is awaited over NCCL."""
    other = linked(communicator)
    if communicator.rank:
        communicator.isend(torch.ones(4), other, 0).wait()
    else:
        value = ones(communicator)
        communicator.irecv(value, other, 0).wait()
        value.tolist()


def missing_send(communicator: TorchCommunicator) -> None:
    other, value = linked(communicator), ones(communicator)
    if not communicator.rank:
        communicator.irecv(value, other, 0).wait()
        value.tolist()


def first_use_by_one(communicator: TorchCommunicator) -> None:
    group = torch_comm.dist.new_group([0, 1], backend="nccl")
    if not communicator.rank:
        torch_comm.dist.isend(ones(communicator), 1, group)


@pytest.mark.parametrize(
    ("fault", "world", "word"),
    [
        (groups_in_another_order, 3, r"rank \d makes one of ranks .*, rank \d one of ranks"),
        (groups_of_two_parts, 4, r"rank \d makes one of ranks .*, rank \d one of ranks"),
        (both_ways_in_one_group, 2, "receive of 4 .* meets receive"),
        (another_size, 2, "meets"),
        (host_meets_device, 2, "waits for a copy.*leave|leave.*waits for a copy|no rank can go on"),
        (missing_send, 2, "no rank can go on: rank 0"),
        (first_use_by_one, 2, "rank 0 waits for the members of communicator 0:1"),
    ],
)
@pytest.mark.parametrize("late", [None, 0])
def test_what_would_hang(fault: Callable[[TorchCommunicator], None], world: int, word: str, late: int | None) -> None:
    with simulated(world, late) as gpus, pytest.raises(Hang, match=word):
        run_ranks(gpus, world, fault)


def ping_pong(communicator: TorchCommunicator, ahead: bool) -> None:
    """Rank 0 computes and sends, rank 1 answers; ``ahead``: rank 0 posts its receive before it computes."""
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


def test_receives_before_a_pass_that_their_message_depends_on() -> None:
    """A device that the host has to wait for in that pass never gets there."""
    for sync_every in (None, 3):
        with simulated(2, sync_every=sync_every) as gpus:
            run_ranks(gpus, 2, lambda communicator: ping_pong(communicator, ahead=False))
            assert not gpus.found
    with simulated(2) as gpus:
        run_ranks(gpus, 2, lambda communicator: ping_pong(communicator, ahead=True))
    with simulated(2, sync_every=3) as gpus, pytest.raises(Hang, match="rank 0 waits for its device before kernel"):
        run_ranks(gpus, 2, lambda communicator: ping_pong(communicator, ahead=True))
