"""A rank that hangs on its GPU is named with the action that the GPU is at, not with that of the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from app.launch.progress_record import NO_ACTION, ProgressRecord
from app.launch.watchdog import Watchdog
from app.launch.watchdog_process import WatchdogProcess
from parallel.schedule.text import from_csv

SCHEDULE = from_csv("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1")


class Gpu:
    """Comes to as many of the events recorded on it as it is told to."""

    def __init__(self) -> None:
        self.recorded = self.reached = 0

    def event(self) -> SimpleNamespace:
        self.recorded += 1
        number = self.recorded
        return SimpleNamespace(record=lambda stream: None, query=lambda: self.reached >= number)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    fake = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return fake


def watched() -> tuple[Watchdog, ProgressRecord]:
    """A watchdog that nobody has started, of a rank that has queued a whole step."""
    watchdog = Watchdog(1, stuck_s=60, device=torch.device("cuda", 0))
    watchdog.step(0)
    for position in range(4):
        watchdog.at(position, waiting=True)
        watchdog.at(position, shapes=f"inputs {position}")
    watchdog.at(NO_ACTION)
    return watchdog, watchdog._progress


@pytest.mark.parametrize(
    ("reached", "expected"),
    [
        (0, (NO_ACTION, False, "", True)),
        (5, (2, True, "", True)),
        (6, (2, False, "inputs 2", True)),
        (9, (NO_ACTION, False, "", False)),
    ],
    ids=["not begun", "waits for a message", "computes", "done"],
)
def test_the_record_says_where_the_gpu_is(reached: int, expected: tuple[int, bool, str, bool], gpu: Gpu) -> None:
    watchdog, record = watched()
    assert watchdog._device is not None
    watchdog._device.look()
    gpu.reached = reached
    watchdog._device.look()
    found = record.read(of_device=True)
    assert (found.position, found.waiting, found.shapes, found.of_device) == expected
    assert (record.read().position, found.step) == (NO_ACTION, 0)
    before_s = found.since_s
    watchdog._device.look()
    assert record.read(of_device=True).since_s == before_s  # still there


def test_a_rank_stuck_on_its_gpu_is_named_with_its_action(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    watchdog, record = watched()
    assert watchdog._device is not None
    gpu.reached = 6
    watchdog._device.look()
    file = tmp_path / "fault.txt"
    process = WatchdogProcess(0, 1, record.descriptor, stuck_s=0.0, stopped_s=60, fault_file=str(file))
    process._schedule = SCHEDULE
    monkeypatch.setattr(process, "_is_connected", lambda: True)
    killed = list[bool]()
    rank = SimpleNamespace(status=lambda: psutil.STATUS_SLEEPING, kill=lambda: killed.append(True))
    assert not process._watch(rank)  # type: ignore[arg-type]
    said = file.read_text()
    assert killed
    assert said.startswith("rank 1 made no progress on its GPU")
    assert "in 1F1: " in said
    assert "inputs 2" in said


def test_a_rank_on_the_cpu_records_no_events(gpu: Gpu) -> None:
    watchdog = Watchdog(0, stuck_s=60, device=torch.device("cpu"))
    watchdog.at(1)
    assert not gpu.recorded
    assert not watchdog._progress.read(of_device=True).of_device


def test_the_thread_ends_with_the_gpu(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that fails raises in the rank, too; its last place stays recorded."""

    def fail() -> bool:
        raise torch.AcceleratorError("CUDA error", 700)

    devices = list[torch.device]()
    monkeypatch.setattr(torch.cuda, "set_device", devices.append)
    monkeypatch.setattr("app.launch.watchdog.POLL_S", 0.001)
    watchdog, _ = watched()
    assert watchdog._device is not None
    monkeypatch.setattr(watchdog._device, "look", fail)
    watchdog._device.start()
    watchdog._device._thread.join(10)
    assert not watchdog._device._thread.is_alive()
    assert devices == [torch.device("cuda", 0)]
    watchdog._device.close()
