"""The buffer of checkpoints on a GPU, page-locked or not."""

from __future__ import annotations

import pytest
import torch

from app.checkpoint.shared_buffer import SharedBuffer
from tests.helpers.cuda_runtime import CudaRuntime
from tests.helpers.sim_gpu import simulated


@pytest.mark.parametrize("refuses", [False, True])
def test_a_buffer_that_cannot_be_page_locked_leaves_no_error(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime(monkeypatch, refuses=refuses)
    buffer = SharedBuffer(pinned=True)
    for size in (4096, 1024, 16384):
        buffer.reserve(size)
        assert runtime.error == 0
    assert list(runtime.locked.values()) == ([] if refuses else [16384])
    buffer.part(64, 3).copy_(torch.tensor([1, 2, 3], dtype=torch.uint8))
    assert buffer.part(64, 3).tolist() == [1, 2, 3]
    buffer.close()
    assert (runtime.locked, runtime.error) == ({}, 0)


def test_parts_of_a_buffer_hold_what_a_gpu_copies_to_them() -> None:
    with simulated(1, late=0) as gpus:
        device, buffer = torch.device("cuda", 0), SharedBuffer(pinned=True)
        buffer.reserve(8192)
        parts = [buffer.part(offset, 3) for offset in (0, 4096)]
        for number, part in enumerate(parts):
            part.copy_(torch.full((3,), number, dtype=torch.uint8, device=device), non_blocking=True)
        torch.cuda.synchronize()
        assert [part.tolist() for part in parts] == [[0] * 3, [1] * 3]
        buffer.close()
        assert not gpus.found
