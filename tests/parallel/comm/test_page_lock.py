"""Memory that is page-locked, or not, leaves no error for whoever launches a kernel next."""

from __future__ import annotations

import logging

import pytest
import torch

from parallel.comm import page_lock as module
from parallel.comm.local import LocalCommunicator
from parallel.comm.mixed_comm import SharedSegment
from parallel.comm.page_lock import page_lock
from tests.helpers.cuda_runtime import CudaRuntime


def test_memory_is_unlocked_when_it_is_freed_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, memory = CudaRuntime(monkeypatch), torch.ones(64, dtype=torch.uint8)
    unlock = page_lock(memory)
    assert unlock is not None
    assert runtime.locked == {memory.data_ptr(): 64}
    del memory
    assert not runtime.locked
    unlock()
    assert (runtime.error, runtime.waits) == (0, 1)


def test_a_refusal_leaves_no_error_and_is_told_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module._warn.cache_clear()
    runtime, memory = CudaRuntime(monkeypatch, refuses=True), torch.ones(64, dtype=torch.uint8)
    with caplog.at_level(logging.WARNING):
        assert page_lock(memory) is None
        assert page_lock(memory) is None
    assert runtime.error == 0
    (message,) = caplog.messages
    assert "page-lock" in message
    del memory
    assert runtime.error == 0


@pytest.mark.parametrize("refuses", [False, True])
def test_a_segment_is_shared_either_way(refuses: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = CudaRuntime(monkeypatch, refuses=refuses)
    segment = SharedSegment(LocalCommunicator(), 4096, pinned=True)
    assert list(runtime.locked.values()) == ([] if refuses else [4096])
    segment.part(1, 64, torch.ones(3)).copy_(torch.tensor([1.0, 2.0, 3.0]))
    assert segment.part(1, 64, torch.ones(3)).tolist() == [1, 2, 3]
    segment.close()
    segment.close()
    assert (runtime.locked, runtime.error) == ({}, 0)
