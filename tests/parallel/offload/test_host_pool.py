"""Host memory of a GPU: as much is locked as is counted, and what is freed is given back."""

from __future__ import annotations

import pytest
import torch

from parallel.memory.policy import LEAST, buffer_bytes
from parallel.offload.copies import Copies, CudaCopies
from parallel.offload.host_pool import HostPool
from tests.helpers.cuda_runtime import CudaRuntime
from tests.helpers.sim_gpu import simulated

MIB = 1 << 20
SIZES = (5 * MIB, 9 * MIB + 1, 3 * MIB)


def test_as_much_is_locked_as_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime(monkeypatch)
    pool = HostPool(CudaCopies(torch.device("cuda", 0)), budget=20 * MIB)
    buffers = [pool.take(size) for size in SIZES]
    assert [buffer.numel() for buffer in buffers if buffer is not None] == list(map(buffer_bytes, SIZES))
    assert sum(runtime.locked.values()) == pool.taken_bytes == sum(map(buffer_bytes, SIZES))
    assert pool.taken_bytes <= sum(SIZES) * 9 / 8  # torch would lock 8 + 16 + 4 MiB
    assert pool.take(7 * MIB) is None
    while buffers:
        pool.give(buffers.pop())
    assert runtime.waits == 0
    buffers.append(pool.take(7 * MIB))  # in place of the largest, once no copy uses it
    assert runtime.waits == 1
    assert sum(runtime.locked.values()) == pool.taken_bytes == buffer_bytes(SIZES[0]) + buffer_bytes(SIZES[2]) + 7 * MIB
    del pool, buffers
    assert not runtime.locked


def test_a_cpu_locks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, pool = CudaRuntime(monkeypatch), HostPool(Copies())
    assert pool.take(MIB) is not None
    assert (runtime.locked, pool.taken_bytes) == ({}, MIB)


@pytest.mark.parametrize("late", [0, 1])
def test_copies_run_beside_the_host_and_end_before_their_memory_is_unlocked(late: int) -> None:
    device = torch.device("cuda", 0)
    with simulated(1, late=late) as gpus:
        copies = CudaCopies(device)
        pool, source = HostPool(copies), torch.arange(LEAST, device=device).to(torch.uint8)
        before = sum(gpus.process.hazards.syncs.values())
        buffer = pool.take(LEAST)
        assert buffer is not None
        copies.wait(copies.to_host(source, buffer))
        back, mark = copies.to_device(buffer)
        copies.wait(mark)
        assert sum(gpus.process.hazards.syncs.values()) == before
        pool.give(buffer)
        del buffer, pool
        assert sum(gpus.process.hazards.syncs.values()) == before + 1
        assert torch.equal(back.cpu(), source.cpu())
        assert not gpus.found
