"""Host memory: as much is locked as is counted, what is freed is given back, and files without a name take the rest."""

from __future__ import annotations

import errno
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from parallel.comm import device_thread as module
from parallel.comm.device_thread import page_lock
from parallel.comm.mixed_comm import SharedSegment
from parallel.comm.thread_comm import LocalCommunicator
from parallel.memory.policy import LEAST, buffer_bytes
from parallel.offload.copies import Copies, CudaCopies
from parallel.offload.host_memory import HostMemory
from tests.helpers.sim_gpu import Gpus, simulated

MIB = 1 << 20
SIZES = (5 * MIB, 9 * MIB + 1, 3 * MIB)


@pytest.fixture
def gpus() -> Iterator[Gpus]:
    with simulated(2) as gpus:
        yield gpus


def waits(gpus: Gpus) -> int:
    return gpus.process.hazards.syncs.total()


def test_as_much_is_locked_as_is_counted(gpus: Gpus) -> None:
    pool = HostMemory(CudaCopies(torch.device("cuda", 0)), budget=20 * MIB)
    buffers = [pool.take(size) for size in SIZES]
    assert [buffer.numel() for buffer in buffers if buffer is not None] == list(map(buffer_bytes, SIZES))
    assert sum(gpus.memories.locked.values()) == pool.taken_bytes == sum(map(buffer_bytes, SIZES))
    assert pool.taken_bytes <= sum(SIZES) * 9 / 8  # torch would lock 8 + 16 + 4 MiB
    assert pool.take(7 * MIB) is None
    while buffers:
        pool.give(buffers.pop())
    assert waits(gpus) == 0
    buffers.append(pool.take(7 * MIB))  # in place of the largest, once no copy uses it
    assert waits(gpus) == 1
    assert (
        sum(gpus.memories.locked.values())
        == pool.taken_bytes
        == buffer_bytes(SIZES[0]) + buffer_bytes(SIZES[2]) + 7 * MIB
    )
    del pool, buffers
    assert not gpus.memories.locked


def test_a_cpu_locks_nothing(gpus: Gpus) -> None:
    pool = HostMemory(Copies())
    assert pool.take(MIB) is not None
    assert (gpus.memories.locked, pool.taken_bytes) == ({}, MIB)


@pytest.mark.parametrize("late", [0, 1])
def test_copies_run_beside_the_host_and_end_before_their_memory_is_unlocked(late: int) -> None:
    device = torch.device("cuda", 0)
    with simulated(1, late=late) as gpus:
        copies = CudaCopies(device)
        pool, source = HostMemory(copies), torch.arange(LEAST, device=device).to(torch.uint8)
        before = sum(gpus.process.hazards.syncs.values())
        buffer = pool.take(LEAST)
        copies.wait(copies.to_host(source, buffer))
        back, mark = copies.to_device(buffer)
        copies.wait(mark)
        assert sum(gpus.process.hazards.syncs.values()) == before
        pool.give(buffer)
        del buffer, pool
        assert sum(gpus.process.hazards.syncs.values()) == before + 1
        assert torch.equal(back.cpu(), source.cpu())
        assert not gpus.found


def on_disk(folder: Path) -> int:
    """Bytes that this process has mapped of files in ``folder``."""
    total = 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        if str(folder) in line:
            start, stop = (int(address, 16) for address in line.split()[0].split("-"))
            total += stop - start
    return total


def test_what_does_not_fit_lies_in_files_that_go_with_their_tensors(tmp_path: Path) -> None:
    host = HostMemory(Copies(), 3 * MIB, tmp_path)
    kept = [host.zeros((2, 1024, 256), torch.float32)]
    assert on_disk(tmp_path) == 0
    view = host.zeros((2, 1024, 1024), torch.uint8)[1]
    assert on_disk(tmp_path) == 2 * MIB
    assert not list(tmp_path.iterdir()), "a file with a name would outlive a killed process"
    view[5, 7] = 3
    assert int(view.sum()) == 3
    kept.append(host.zeros((MIB,), torch.uint8))
    assert on_disk(tmp_path) == 2 * MIB
    assert (host.peak_bytes, host.peak_file_bytes) == (3 * MIB, 2 * MIB)
    kept.clear()
    del view
    assert on_disk(tmp_path) == 0
    kept.append(host.zeros((3 * MIB,), torch.uint8))
    assert on_disk(tmp_path) == 0, "what was let go of is there again"
    assert host.zeros((0, 4), torch.int64).shape == (0, 4)


def test_what_the_disk_refuses_is_told_before_anything_is_written(tmp_path: Path) -> None:
    """Here a limit of the system; a full disk is refused at the same place."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4 * MIB, hard))
    try:
        with pytest.raises(OSError, match=r"no place for a file of 5 MiB, beside 3 MiB of memory .*File too") as told:
            HostMemory(Copies(), 3 * MIB, tmp_path).zeros((5 * MIB,), torch.uint8)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert (told.value.errno, told.value.filename) == (errno.EFBIG, str(tmp_path))


def test_arrays_of_a_gpu_are_locked_and_used_again(gpus: Gpus, tmp_path: Path) -> None:
    host = HostMemory(CudaCopies(torch.device("cuda", 0)), 4 * MIB, tmp_path)
    array = host.empty((3, MIB), torch.uint8).fill_(7)
    assert (host.bytes, sum(gpus.memories.locked.values())) == (3 * MIB, 3 * MIB)
    held = host.empty((2 * MIB,), torch.uint8)
    assert on_disk(tmp_path) == host.file_bytes == 2 * MIB
    place, part = array.data_ptr(), array[1]
    del array
    assert host.bytes == 3 * MIB, "a view of it is there"
    del part
    assert (host.bytes, host.taken_bytes) == (0, 3 * MIB)
    zeros = host.zeros((3 * MIB // 4,), torch.float32)
    assert zeros.data_ptr() == place
    assert not zeros.any()
    del zeros
    tile = host.empty((4 * MIB,), torch.uint8, locked=False)
    assert not gpus.memories.locked, "what nobody uses goes"
    assert (host.bytes, host.peak_file_bytes) == (4 * MIB, 2 * MIB)
    del tile, held
    assert (host.taken_bytes, host.file_bytes, on_disk(tmp_path)) == (0, 0, 0)
    assert host.empty((0, 4), torch.int64).shape == (0, 4)


def test_all_copies_of_a_device_share_its_streams(gpus: Gpus) -> None:
    first, again, other = (CudaCopies(torch.device("cuda", index)) for index in (0, 0, 1))
    assert first._streams == again._streams
    assert not set(first._streams.values()) & set(other._streams.values())


def test_memory_is_unlocked_when_it_is_freed_and_once(gpus: Gpus) -> None:
    memory = torch.ones(64, dtype=torch.uint8)
    unlock = page_lock(memory)
    assert gpus.memories.locked == {memory.data_ptr(): 64}
    del memory
    assert not gpus.memories.locked
    unlock()
    assert (gpus.process.error, waits(gpus)) == (0, 1)


def test_a_refusal_leaves_no_error_and_is_told_once(gpus: Gpus, caplog: pytest.LogCaptureFixture) -> None:
    module._warn.cache_clear()
    gpus.refuses_locking, memory = True, torch.ones(64, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        assert page_lock(memory) is None
        assert page_lock(memory) is None
    assert gpus.process.error == 0
    (message,) = caplog.messages
    assert "page-lock" in message
    del memory
    assert gpus.process.error == 0


@pytest.mark.parametrize("refuses", [False, True])
def test_a_segment_is_shared_either_way(refuses: bool, gpus: Gpus) -> None:
    gpus.refuses_locking = refuses
    segment = SharedSegment(LocalCommunicator(), 4096, pinned=True)
    assert list(gpus.memories.locked.values()) == ([] if refuses else [4096])
    segment.part(0, torch.ones(3)).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert segment.part(0, torch.ones(3)).tolist() == [1, 2, 3]
    segment.close()
    segment.close()
    assert (gpus.memories.locked, gpus.process.error) == ({}, 0)
