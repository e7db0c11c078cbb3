"""Copies are timed as often as said, and kept."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from parallel.profile import link_speed
from parallel.profile.link_speed import COPIES, SIZE, CopySpeed, load_or_measure_copies, measure_copies

CPU = torch.device("cpu")


def test_what_goes_out_and_comes_back() -> None:
    assert CopySpeed(2.0, 6.0).bandwidth == pytest.approx(3.0)  # 1/2 s and 1/6 s for two bytes


def test_a_copy_in_memory_is_timed_by_every_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_speed, "SIZE", SIZE // 16)
    assert len(link_speed._in_memory(2)) == 2 * COPIES
    threads = torch.get_num_threads()
    found = measure_copies(CPU, threads=1, together=2)
    assert torch.get_num_threads() == threads
    assert found.to_host == found.to_device
    assert 1e7 < found.bandwidth < 1e13  # bytes a second, and not megabytes or bits


def test_a_speed_is_kept_by_threads_and_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    asked = []

    def measure(device: torch.device, *, threads: int, together: int) -> CopySpeed:
        asked.append((threads, together))
        return CopySpeed(1e9 * together, 2e9)

    monkeypatch.setattr(link_speed, "measure_copies", measure)
    first = load_or_measure_copies(CPU, threads=2)
    assert load_or_measure_copies(CPU, threads=2) == first
    assert load_or_measure_copies(CPU, threads=1, together=2).to_host == 2e9
    assert asked == [(2, 1), (1, 2)]
    files = sorted((tmp_path / "megatile").iterdir())
    assert all(file.name.startswith("copies-") for file in files)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu() -> None:
    found = measure_copies(torch.device("cuda"))
    assert found.to_host > 1e9
    assert found.to_device > 1e9
