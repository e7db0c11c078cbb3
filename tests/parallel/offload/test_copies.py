"""Copies of one GPU share two streams, whoever asks for them: torch has 32, which links between ranks take as well."""

from __future__ import annotations

import itertools

import pytest
import torch

from parallel.offload.copies import CudaCopies, copy_streams


def test_all_copies_of_a_device_share_its_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    made = itertools.count()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: (device, next(made)))
    copy_streams.cache_clear()
    try:
        first, again, other = (CudaCopies(torch.device("cuda", index)) for index in (0, 0, 1))
    finally:
        copy_streams.cache_clear()
    assert next(made) == 4
    assert first._streams == again._streams
    assert not set(first._streams.values()) & set(other._streams.values())
