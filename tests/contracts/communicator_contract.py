"""What every communicator must do. Run by each rank; returns what the caller compares over the ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator, Work, agree

SENT = (
    *(torch.bool, torch.uint8, torch.int64),
    *(torch.float64, torch.float32, torch.bfloat16, torch.float16),
    *(torch.complex128, torch.complex64),
)
SUMMED = SENT[2:]
CLOSE = torch.channels_last
LEAVES_WITHIN_S = 10.0


def check_communicator(communicator: Communicator, argument: Any = None, *, groups: bool = True) -> dict[str, Any]:
    """Assert the contract on this rank.

    Args:
        groups: any ranks may form one.
    """
    rank, world = communicator.rank, communicator.world
    assert 0 <= rank < world
    sums(communicator)
    for source in range(world):
        tensor = numbers(source if rank == source else 99, torch.float32).to(memory_format=CLOSE)
        communicator.broadcast(tensor, source)
        assert tensor.equal(numbers(source, torch.float32))
    for dtype in (torch.int16, torch.uint16):
        tensor = numbers(rank, dtype)
        communicator.broadcast(tensor, world - 1)
        assert tensor.long().equal(numbers(world - 1, torch.int64)), dtype
    gathers(communicator)
    communicator.barrier()
    assert agree(communicator, rank == world - 1)
    assert not agree(communicator, False)
    for _ in range(2):
        communicator.connect(list(itertools.permutations(range(world), 2)))
    if world > 1:
        messages_of_every_dtype(communicator)
        messages_keep_their_order(communicator)
        large_messages_cross(communicator)
        exchanges(communicator)
        messages_leave_by_themselves(communicator)
        if groups:
            subgroups(communicator)
    communicator.barrier()
    return {"rank": rank, "world": world, "bits": bits_of_a_sum(communicator)}


def numbers(start: int, dtype: torch.dtype) -> Tensor:
    """(2, 3, 4, 5), different for each of 0..7, exact in every dtype; of complex ones both parts are filled."""
    drawn = ((torch.arange(120).reshape(2, 3, 4, 5) + start) % 7).to(dtype)
    return drawn * (1 + 2j) if dtype.is_complex else drawn


def sums(communicator: Communicator) -> None:
    world = communicator.world
    for dtype in SUMMED:
        unit = 1 + 2j if dtype.is_complex else 1
        tensor = torch.full((3, 2), (communicator.rank + 1) * unit, dtype=dtype)
        communicator.all_reduce(tensor)
        assert tensor.tolist() == [[world * (world + 1) // 2 * unit] * 2] * 3, dtype
        rows = torch.stack([torch.full((5,), (communicator.rank + row) * unit, dtype=dtype) for row in range(world)])
        communicator.ireduce_scatter(rows).wait()
        assert (
            rows[communicator.rank].tolist() == [sum(rank + communicator.rank for rank in range(world)) * unit] * 5
        ), dtype
    under_way = [torch.full((50_000 if n % 2 else 3,), float(communicator.rank + n)) for n in range(6)]
    works = [communicator.iall_reduce(tensor) for tensor in under_way]
    for n, (tensor, work) in enumerate(zip(under_way, works, strict=True)):
        work.wait()
        assert work.done()
        work.wait()
        assert tensor.unique().tolist() == [sum(rank + n for rank in range(world))]
    parameter = torch.ones(2, 3, 4, 5, requires_grad=True)
    permuted = parameter.detach().to(memory_format=CLOSE)
    communicator.all_reduce(permuted)
    assert permuted.unique().tolist() == [world]
    assert permuted.is_contiguous(memory_format=CLOSE)


def bits_of_a_sum(communicator: Communicator) -> list[int]:
    """Of a sum whose rounding depends on the order."""
    generator = torch.Generator().manual_seed(communicator.rank)
    found = []
    for size in (7, 1000, 300_001):
        tensor = torch.randn(size, generator=generator) * 1000.0 ** torch.randn(size, generator=generator)
        communicator.all_reduce(tensor)
        found.append(int(tensor.view(torch.int32).long().mul(torch.arange(1, size + 1)).sum()))
    return found


def messages_of_every_dtype(communicator: Communicator) -> None:
    """Each rank to each other rank, both directions at once, as contiguous and as channels_last."""
    rank, world = communicator.rank, communicator.world
    others = [peer for peer in range(world) if peer != rank]
    for tag, dtype in enumerate(SENT):
        for layout in (torch.contiguous_format, CLOSE):
            places = [torch.zeros(2, 3, 4, 5, dtype=dtype).to(memory_format=layout) for _ in others]
            arriving = [communicator.irecv(place, peer, tag) for place, peer in zip(places, others, strict=True)]
            sent = numbers(rank, dtype).to(memory_format=layout)
            finish([*arriving, *(communicator.isend(sent, peer, tag) for peer in others)])
            for place, peer in zip(places, others, strict=True):
                assert place.equal(numbers(peer, dtype)), (dtype, layout, peer)
    scalar, empty = torch.tensor(float(rank)), torch.empty(0, 3)
    for message in (scalar, empty):
        place = torch.full_like(message, -1)
        finish(
            [communicator.isend(message, others[0], 9), communicator.irecv(place, others[0], 9)] if world == 2 else []
        )
        assert world > 2 or place.tolist() == ([] if message is empty else 1 - rank)


def messages_keep_their_order(communicator: Communicator) -> None:
    """Along a ring: many under way; tags are apart, messages of one tag arrive as sent."""
    rank, world = communicator.rank, communicator.world
    after, before = (rank + 1) % world, (rank - 1) % world
    sent = [torch.full((n % 5 + 1,), 1000.0 * rank + n) for n in range(60)]
    sending = [communicator.isend(tensor, after, (0, 32767, 5)[n % 3]) for n, tensor in enumerate(sent)]
    # The tags in another order than they were sent in.
    for remainder in (2, 0, 1):
        places = [torch.zeros(n % 5 + 1) for n in range(remainder, 60, 3)]
        finish([communicator.irecv(place, before, (0, 32767, 5)[remainder]) for place in places])
        assert [place[0].item() for place in places] == [1000.0 * before + n for n in range(remainder, 60, 3)]
    finish(sending)


def large_messages_cross(communicator: Communicator) -> None:
    """8 MB to the next rank while as much comes from the one before; sends begin first, receives later."""
    rank, world = communicator.rank, communicator.world
    for _ in range(2):
        sent = torch.full((1 << 20,), float(rank), dtype=torch.float64)
        sending = communicator.isend(sent, (rank + 1) % world, 1)
        place = torch.zeros_like(sent)
        finish([communicator.irecv(place, (rank - 1) % world, 1), sending])
        assert place.unique().tolist() == [(rank - 1) % world]


def gathers(communicator: Communicator) -> None:
    """Of every dtype and layout; of a scalar; of nothing."""
    rank, world = communicator.rank, communicator.world
    for dtype in SENT:
        table = communicator.all_gather(numbers(rank, dtype).to(memory_format=CLOSE))
        assert table.shape == (world, 2, 3, 4, 5)
        assert all(table[peer].equal(numbers(peer, dtype)) for peer in range(world)), dtype
    assert communicator.all_gather(torch.tensor(float(rank))).tolist() == list(range(world))
    assert communicator.all_gather(torch.empty(0, 3)).shape == (world, 0, 3)


def exchanges(communicator: Communicator) -> None:
    """With the neighbours of a ring, of two ranks both ways, large and small at once; several under way."""
    rank, world = communicator.rank, communicator.world
    near = sorted({(rank + 1) % world, (rank - 1) % world})
    under_way = []
    for turn, size in enumerate((3, 300_000, 5)):
        places = [torch.zeros(size) for _ in near]
        sends = [(peer, torch.full((size,), 10.0 * turn + rank)) for peer in near]
        under_way.append((turn, places, *communicator.exchange(sends, list(zip(near, places, strict=True)), turn)))
    for turn, places, leaving, arriving in under_way:
        finish(arriving)
        assert [place.unique().tolist() for place in places] == [[10.0 * turn + peer] for peer in near]
        finish(leaving)
    assert communicator.exchange([], [], 7) == ([], [])


def messages_leave_by_themselves(communicator: Communicator) -> None:
    """A send is done soon after its receiver has it, without anybody waiting for it: then its memory is let go of."""
    rank, world = communicator.rank, communicator.world
    sent = torch.full((1 << 18,), float(rank), dtype=torch.float64)
    sending = communicator.isend(sent, (rank + 1) % world, 2)
    communicator.irecv(torch.zeros_like(sent), (rank - 1) % world, 2).wait()
    end_s = time.monotonic() + LEAVES_WITHIN_S
    while not sending.done():
        assert time.monotonic() < end_s, f"rank {rank} of {world}: a send is not done {LEAVES_WITHIN_S:g} s later"
        time.sleep(0.005)
    sending.wait()


def subgroups(communicator: Communicator) -> None:
    """All of them in reverse order, overlapping pairs, and one rank alone."""
    rank, world = communicator.rank, communicator.world
    groups = [list(range(world))[::-1], *([k + 1, k] for k in range(world - 1)), [world - 1]]
    made = [communicator.subgroup(ranks) for ranks in groups]
    assert [group is not None for group in made] == [rank in ranks for ranks in groups]
    mine = [(ranks, group) for ranks, group in zip(groups, made, strict=True) if group is not None]
    tensors = [torch.full((100_000,), float(rank)) for _ in mine]
    works = [group.iall_reduce(tensor) for (_, group), tensor in zip(mine, tensors, strict=True)]
    finish(works)
    for (ranks, group), tensor in zip(mine, tensors, strict=True):
        assert (group.rank, group.world) == (ranks.index(rank), len(ranks))
        assert tensor.unique().tolist() == [sum(ranks)]
        word = torch.tensor([float(rank)])
        assert group.all_gather(word).tolist() == [[float(each)] for each in ranks]
        group.broadcast(word, group.world - 1)
        assert word.tolist() == [ranks[-1]]
        if group.world == 2:
            place = torch.zeros(1)
            finish([group.isend(torch.tensor([float(rank)]), 1 - group.rank, 3), group.irecv(place, 1 - group.rank, 3)])
            assert place.tolist() == [ranks[1 - group.rank]]
    whole = made[0]
    assert whole is not None
    inner = whole.subgroup([0])
    assert (inner is not None) == (rank == world - 1)


def finish(works: list[Work]) -> None:
    for work in works:
        work.wait()
        assert work.done()


def check_silence(communicator: Communicator, seconds: float) -> None:
    """Fails on rank 0, which waits for rank 1, which stays ``seconds`` and sends nothing."""
    if communicator.rank:
        time.sleep(seconds)
    else:
        communicator.irecv(torch.zeros(2), 1, 3).wait()
