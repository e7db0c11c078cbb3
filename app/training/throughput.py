"""Counting what was trained and how fast, and telling reading from computing.

Takes the times of every step; returns the figures of ``summary.json``. Times are seconds of this rank's clock.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import torch

WARM_UP = 2
"""Steps left out of every speed figure: allocators, thread pools and autotuning settle in them."""


@dataclass
class Throughput:
    """Step times of one run on one rank."""

    batch: int
    step_s: list[float] = field(default_factory=list)
    wait_s: list[float] = field(default_factory=list)
    rest_s: list[float] = field(default_factory=list)
    """After each step, what passed until the next one could begin: checkpoints, validation."""

    def add(self, step_s: float, wait_s: float) -> None:
        """One finished step: its whole duration, waiting for data included, and that wait alone."""
        self.step_s.append(step_s)
        self.wait_s.append(wait_s)

    @property
    def images_per_second(self) -> float | None:
        """Global batch over the median step, warm-up dropped; None before any step."""
        counted = settled(self.step_s)
        return self.batch / statistics.median(counted) if counted else None

    @property
    def images_per_second_sustained(self) -> float | None:
        """Images of all steps over all the time they took, with what came between them, warm-up dropped; None before
        any step. What comes after the last is the end of the run, as long as it is for a short one."""
        counted = settled(self.step_s)
        between = settled(self.rest_s)[:-1]
        return self.batch * len(counted) / (sum(counted) + sum(between)) if counted else None

    @property
    def data_wait_fraction(self) -> float | None:
        """Share of the step time spent waiting for tiles, warm-up dropped."""
        counted = settled(self.step_s)
        return sum(settled(self.wait_s)) / sum(counted) if counted else None


def settled(values: list[float]) -> list[float]:
    """All but the warm-up; of a run shorter than that, the last value."""
    return values[WARM_UP:] or values[-1:]


class PeakMemory:
    """Most memory a process held beyond what importing took.

    On a GPU: bytes allocated by tensors. On the CPU: growth of the resident set since this object was made, because the
    import of torch alone takes hundreds of megabytes that no setting of a run changes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._baseline = psutil.Process().memory_info().rss
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    @property
    def bytes(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return max(0, peak_resident_bytes() - self._baseline)


def peak_resident_bytes() -> int:
    """Largest resident set this process has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise OSError("/proc/self/status has no VmHWM line: peak memory is read from Linux's process table")


class Stopwatch:
    """Seconds since the last lap."""

    def __init__(self) -> None:
        self._start = time.perf_counter()

    def lap(self) -> float:
        now = time.perf_counter()
        elapsed, self._start = now - self._start, now
        return elapsed
