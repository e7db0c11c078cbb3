"""Counts and measurements of a run so far: speed, idle time, memory against ``--memory``, and replaced tiles.

Takes counts from the loop, step by step; returns what checkpoints keep and the summary reports. On a GPU the allocator
keeps to ``--memory``. A CPU has no memory of its own to run out of, so the tensors of its first steps are counted
(``parallel.offload.live_bytes``); unless asked to stop as a GPU would, a run that takes more gets a warning.
"""

from __future__ import annotations

import contextlib
import resource
import statistics
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from app.settings.cli import RunError
from app.training.metrics import Example
from parallel.offload.live_bytes import LiveBytes
from parallel.schedule.shares import Shares
from parallel.units import bytes_text

CHECKED = 2
"""Steps that are counted on a CPU: the second has the optimizer's state and all gradients. They are those that speed
figures leave out as a warm-up."""
HELP = (
    "lower --tile, raise --microbatches, or use --stream 512, --recompute block, --offload overlap or --precision bf16"
)
WARM_UP = 2
"""Steps left out of every speed figure: allocators, thread pools and autotuning settle in them."""
UNKNOWN = -1
"""In place of microseconds: where a clock does not show it, or there is one rank."""
JUDGED_FROM = 200
"""Tiles of a start after which a run most of whose tiles are replaced is given up: few beside a run, and enough that a
bad slide among the first that are read does not decide."""


class MemoryLimit:
    """Memory limit of one rank, beyond which allocations fail on a GPU.

    Args:
        limit: bytes that it may take; None: all.
        counts: count on a CPU; not compiled stages, which what watches every operation would keep from being compiled.
        stops: on a CPU, fail where a GPU of that size would.
    """

    def __init__(self, limit: int | None, device: torch.device, *, counts: bool = True, stops: bool = False) -> None:
        self.limit = limit
        self._device = device
        self._left = CHECKED if device.type == "cpu" and counts else 0
        # One count for all steps: fsdp gathers parameters by resizing storages that its first step made.
        self._live = LiveBytes(limit if stops else None)
        if limit is not None and device.type == "cuda":
            total = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total), device)

    @contextlib.contextmanager
    def watching(self, held: Iterable[Tensor]) -> Iterator[None]:
        """Count the tensors of a step inside this block."""
        if not self._left:
            yield
            return
        self._left -= 1
        self._live.add(held)
        with self._live:
            yield

    def on_other_thread(self) -> AbstractContextManager[None]:
        """Count tensors that another thread makes on the device inside this block, in a step that is watched."""
        return self._live.on_other_thread()

    @property
    def device_bytes(self) -> int | None:
        """The most that tensors took on the device at a time; None where that was not counted."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device)
        return self._live.peak_bytes or None

    def fault(self) -> str:
        """Return the error message when a device has no memory left."""
        within = f" within --memory {bytes_text(self.limit)}" if self.limit is not None else ""
        return f"out of memory on {self._device}{within}: {HELP}; `python -m app.plan --largest-tile` says what fits"


def excess(limit: int | None, device_bytes: Sequence[int]) -> str:
    """Return a warning about the ranks that took more than ``limit``; empty where none did."""
    over = [f"rank {rank} {bytes_text(size)}" for rank, size in enumerate(device_bytes) if limit and size > limit]
    if limit is None or not over:
        return ""
    return (
        f"--memory allows {bytes_text(limit)} a rank, and tensors took more on {len(over)} of "
        f"{len(device_bytes)}: {', '.join(over)}. A device of that size could not train this: {HELP}"
    )


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
    # gVisor has no such line. This peak comes second: it begins at what the parent process held.
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


class IdleTime:
    """Idle time of all ranks."""

    def __init__(self, world: int) -> None:
        self._idle_s = [0.0] * world
        self._step_s = 0.0
        self._steps = 0

    @staticmethod
    def to_microseconds(waited_s: float | None) -> int:
        """Return the idle time that a rank sends to the others: whole microseconds."""
        return UNKNOWN if waited_s is None else round(waited_s * 1e6)

    def add(self, waited_us: Sequence[int], step_s: float) -> None:
        """Count a step by the idle time of each rank; one in which any is unknown is left out, as is the warm-up."""
        self._steps += 1
        if self._steps <= WARM_UP or min(waited_us) < 0:
            return
        least = min(waited_us)
        self._step_s += step_s
        for rank, waited in enumerate(waited_us):
            self._idle_s[rank] += (waited - least) * 1e-6

    @property
    def fractions(self) -> list[float] | None:
        """Return the idle share of all steps by rank; None where nothing is known, or where there is one rank."""
        if len(self._idle_s) < 2 or not self._step_s:
            return None
        return [idle_s / self._step_s for idle_s in self._idle_s]


@dataclass
class Outcome:
    """Counts of a run so far; all but speed and examples is kept in checkpoints.

    Attributes:
        images: tiles really trained on, counted on every rank, since the run began.
        replaced: those of them that stand in for a tile that cannot be read.
        validation: step of the last one, its tiles, those of them that cannot be read, and slides left without a score.
        best: step, metric and value of the best validation so far.
        stale: validations since that one.
        shares: microbatches of each group as they were last, where they have changed.
        examples: tiles of the last validation that the report shows.
    """

    throughput: Throughput
    idle: IdleTime
    step: int = 0
    images: int = 0
    replaced: int = 0
    loss: float | None = None
    status: str = "completed"
    metrics: dict[str, float | None] = field(default_factory=dict)
    validation: dict[str, Any] = field(default_factory=dict)
    best: dict[str, Any] | None = None
    stale: int = 0
    shares: Shares = ()
    examples: tuple[Example, ...] = ()

    def stopped_early(self, patience: int, total_steps: int) -> dict[str, Any] | None:
        """Return why and when the run ended before its last step, as the summary has it; None where it did not.

        Args:
            patience: validations without a better score after which it ends; 0: it does not.
        """
        if not patience or self.stale < patience or self.step >= total_steps:
            return None
        best = {f"best_{key}": self.best[key] for key in ("step", "metric", "value")} if self.best else {}
        return {"step": self.step, "patience": patience, "validations": self.stale, **best}

    def check_replaced(self, failed_slides: Path, *, images: int = 0, replaced: int = 0, judged_from: int = 0) -> None:
        """Fail when more than half of the tiles are replaced.

        Args:
            images, replaced: leave out these, which were counted before.
            judged_from: tiles before that is judged.

        Raises:
            RunError: they are.
        """
        images, replaced = self.images - images, self.replaced - replaced
        if images < judged_from or 2 * replaced <= images:
            return
        raise RunError(
            f"{replaced} of {images} tiles that were trained on are replaced by others, as they cannot be read: a run "
            f"fails when more than half of the tiles are. {failed_slides} names the slides: mend them, or take them "
            "out, and start again"
        )
