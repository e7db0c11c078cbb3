"""``--memory`` of a run: the allocator of a GPU is told, a CPU counts its first steps, and who is over is said."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from app.training.memory_limit import CHECKED, MemoryLimit, excess
from benchmarks.whole_engine import whole_engine
from parallel.comm.local import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.offload import saved_tensors
from parallel.offload.copies import Copies
from parallel.offload.host_memory import HostMemory
from pipelines.stream.augment import AugmentSettings
from pipelines.stream.batch import Batch
from pipelines.stream.device import DevicePrefetcher
from pipelines.stream.device_pixels import PixelMaker
from tests.app.conftest import QUICK, Train, summary_of

CPU = torch.device("cpu")
MIB = 1 << 20
NUMBERS = MIB // 4


def test_a_gpu_gives_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=16 << 30))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda part, device: told.append((part, device)))
    gpu = torch.device("cuda", 1)
    for limit in (4 << 30, 32 << 30, None):
        MemoryLimit(limit, gpu).impose()
    MemoryLimit(4 << 30, CPU).impose()
    assert told == [(0.25, gpu), (1.0, gpu)]
    said = MemoryLimit(4 << 30, gpu).fault()
    assert "out of memory on cuda:1 within --memory 4 GiB" in said
    assert "--largest-tile" in said
    assert "--memory" not in MemoryLimit(None, gpu).fault()


def test_the_first_steps_are_counted_on_a_cpu() -> None:
    memory, held = MemoryLimit(None, CPU), torch.ones(NUMBERS)
    assert memory.device_bytes is None
    peaks = []
    for size in range(1, CHECKED + 2):
        with memory.watching([held]):
            torch.ones(size * NUMBERS)
        peaks.append(memory.device_bytes)
    assert peaks == [2 * MIB, 3 * MIB, 3 * MIB]
    compiled = MemoryLimit(None, CPU, counts=False)
    with compiled.watching([held]):
        torch.ones(NUMBERS)
    assert compiled.device_bytes is None


def test_a_cpu_stops_where_a_gpu_of_that_size_would() -> None:
    held = torch.ones(NUMBERS)
    limit = 4 * MIB
    warned, stopped = MemoryLimit(limit, CPU), MemoryLimit(limit, CPU, stops=True)
    for memory in (warned, stopped):
        with memory.watching([held]):
            torch.ones(3 * NUMBERS)
    with warned.watching([held]):
        torch.ones(4 * NUMBERS)
    with pytest.raises(torch.OutOfMemoryError, match="5242880 bytes of 4194304"), stopped.watching([held]):
        torch.ones(4 * NUMBERS)
    assert stopped.device_bytes == warned.device_bytes == 5 * MIB
    assert "out of memory on cpu within --memory 4 MiB" in stopped.fault()


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.process)])
def test_a_run_that_takes_more_than_its_memory_stops(
    train: Train, train_ranks: Train, classify_slides: Path, tmp_path: Path, ranks: int
) -> None:
    out = tmp_path / "run"
    asked = ("--memory", "2MiB", "--memory-excess=stop", "--parallel", "single" if ranks == 1 else "ddp")
    start = train if ranks == 1 else train_ranks
    done = start("--slides", classify_slides, *QUICK, *asked, "--ranks", ranks, "--steps", 3, "--out", out)
    assert done.returncode == 1
    assert "out of memory on cpu within --memory 2 MiB" in done.stdout + done.stderr
    assert not (out / "checkpoints" / "last.pt").exists()


def test_an_engine_holds_parameters_gradients_and_state() -> None:
    module = nn.Linear(512, 512, bias=False)
    mean = lambda output, target: output.mean()  # noqa: E731
    engine = whole_engine(module, mean, torch.optim.AdamW, LocalCommunicator(), batch=1, m=1, shape=(1, 512))
    memory = MemoryLimit(None, CPU)
    for step in range(CHECKED):
        with memory.watching(engine.on_device()):
            engine.step([Microbatch(torch.ones(1, 512), torch.zeros(1), (1, 512))], step, 0.1)
    # Weights, gradients, two moments; what the update works out takes two of them more.
    assert memory.device_bytes is not None
    assert 4 <= memory.device_bytes / MIB <= 6.1


def test_microbatches_made_ahead_on_another_thread_count() -> None:
    """Of the step they are made in, and of the next one, which finds them on the device."""
    every, samples = np.ones(4, bool), np.arange(4)
    batch = Batch(np.zeros((4, 64, 64, 3), np.uint8), samples, samples, samples, 0, lambda: None, every, every, samples)
    one = 3 * 64 * 64 * 4

    def peaks(prefetch: int) -> list[int]:
        memory, found = MemoryLimit(None, CPU), []
        pixels = PixelMaker(CPU, AugmentSettings(augment="none"), 0)
        repeated = itertools.repeat(batch)
        feed = DevicePrefetcher(repeated, lambda: True, pixels, prefetch=prefetch, beside=memory.beside)
        for _step in range(CHECKED):
            next(feed)
            with memory.watching(feed.held()):
                for images, _targets in feed.microbatches(batch, [1] * 4):
                    del images, _targets
            assert memory.device_bytes is not None
            found.append(memory.device_bytes)
        return found

    labels = 4 * 8
    assert one <= peaks(0)[1] <= one + labels
    # While one is used, its successors are there; how many of them at once depends on how fast they are made.
    assert all(2 * one <= peak <= 3 * one + labels for peak in peaks(2)[1:])


def test_who_took_more_is_named() -> None:
    assert excess(None, [5]) == ""
    assert excess(5 * MIB, [MIB, 5 * MIB, None]) == ""
    said = excess(5 * MIB, [MIB, 6 * MIB, 7 * MIB])
    assert "--memory allows 5 MiB a rank" in said
    assert "on 2 of 3: rank 1 6 MiB, rank 2 7 MiB" in said
    assert "--offload overlap" in said


@pytest.mark.process
def test_a_run_says_what_its_ranks_take(classify_slides: Path, train_ranks: Train, tmp_path: Path) -> None:
    arguments = ("--slides", classify_slides, *QUICK, "--steps", "2", "--parallel", "gpipe", "--ranks", "2")
    done = train_ranks(*arguments, "--memory", "1MiB", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    summary = summary_of(tmp_path / "run")
    assert summary["memory_limit_bytes"] == MIB
    assert len(summary["device_bytes"]) == 2
    # The first stage has two tiles of 256 px, float32, and convolutions of them.
    assert summary["device_bytes"][0] > 2 * 3 * 256 * 256 * 4 > MIB
    said = done.stdout + done.stderr
    assert said.count("warning: --memory allows 1 MiB a rank, and tensors took more on") == 1
    assert "Tensors on the device at most, by rank" in (tmp_path / "run" / "report.html").read_text()


def test_offload_fills_the_ranks_share_of_the_host(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    budgets = []

    def pool(copies: Copies, budget: int | None) -> HostMemory:
        budgets.append(budget)
        return HostMemory(copies, budget)

    monkeypatch.setattr(saved_tensors, "HostMemory", pool)
    monkeypatch.setattr("app.training.session.host_share", lambda: 100 * MIB)
    command = ("--slides", classify_slides, *QUICK, "--steps", "1", "--validation", "0", "--parallel", "single")
    done = train(*command, "--offload", "overlap", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert budgets == [100 * MIB]
