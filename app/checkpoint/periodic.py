"""The checkpoints of a run: when one is due, and how it is written.

Takes settings, run folder and engine, then every step and every state. Every rank has one, the first writes.
With ``--checkpoint-every 0`` the number of steps between two is tuned from measured seconds: the smallest at which
checkpoints cost no more than a share of the time and each is on the disk before the next is due. After Mohan,
Phanishayee, Chidambaram 2021, CheckFreq, section 4.4: the cost is what a checkpoint added, slower steps included.
"""

from __future__ import annotations

import contextlib
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from app.checkpoint.file import save_checkpoint
from app.checkpoint.two_phase import TwoPhaseCheckpoints
from app.settings.cli import RunError
from app.settings.optimization import CheckpointSettings
from parallel.engine.step import TrainingEngine

FIRST = 10
"""Steps before the first checkpoint: there is nothing yet to tune from."""
STEPS, CHECKPOINTS = 50, 5
"""How many of the last steps and checkpoints count; medians of them, so that one that was held up moves nothing."""
log = logging.getLogger(__name__)


class CheckpointInterval:
    """The number of steps between two checkpoints, tuned while the run lasts."""

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self._quiet_s: deque[float] = deque(maxlen=STEPS)
        self._overlapped_s: list[float] = []
        self._costs_s: deque[float] = deque(maxlen=CHECKPOINTS)
        self._persists_s: deque[float] = deque(maxlen=CHECKPOINTS)

    def add_step(self, step_s: float, overlapped: bool) -> None:
        """Add a step that took ``step_s``; ``overlapped``: a checkpoint was being copied or written meanwhile."""
        (self._overlapped_s if overlapped else self._quiet_s).append(step_s)

    def add_checkpoint(self, between_s: float, blocked_s: float, write_s: float) -> None:
        """Add a checkpoint that is on the disk; the steps that overlapped with it have been added.

        Args:
            between_s: what it took between two steps.
            blocked_s: how long updates waited for its copy; part of the overlapped steps.
            write_s: of overlapped copying and writing, until it was on the disk; 0 when it was written between steps.
        """
        slower_s = 0.0
        if self._quiet_s:
            usual_s = statistics.median(self._quiet_s)
            slower_s = sum(self._overlapped_s) - usual_s * len(self._overlapped_s)
        self._overlapped_s.clear()
        self._costs_s.append(between_s + max(blocked_s, slower_s))
        self._persists_s.append(write_s)

    @property
    def cost_s(self) -> float | None:
        """Return the seconds that a checkpoint costs, as measured; None before the first."""
        return statistics.median(self._costs_s) if self._costs_s else None

    @property
    def every(self) -> int:
        """Return the steps between two checkpoints, at least 1."""
        cost_s, step_s = self.cost_s, statistics.median(self._quiet_s or [0.0])
        if cost_s is None or step_s <= 0:
            return FIRST
        affordable = math.ceil(cost_s / (self._overhead * step_s))
        write_s = statistics.median(self._persists_s)
        # One step more than the disk needs: steps without an overlapping checkpoint are what the others are held to.
        possible = math.ceil(write_s / step_s) + 1 if write_s else 1
        return max(1, affordable, possible)


class CheckpointManager:
    """The checkpoints of a run. A context: whatever happened, a checkpoint that was begun is on the disk at its end.

    Args:
        engine: whose updates wait until they are copied.
        step: steps done when the run starts.
        on_disk: called when one has been written.
    """

    def __init__(
        self,
        settings: CheckpointSettings,
        last: Path,
        best: Path,
        engine: TrainingEngine,
        device: torch.device,
        step: int,
        on_disk: Callable[[], None] = lambda: None,
    ) -> None:
        self._settings, self._engine, self._last_step, self._on_disk = settings, engine, step, on_disk
        self._last, self._best = last, best
        self._interval = CheckpointInterval(settings.checkpoint_overhead)
        self._between_s = 0.0
        self._overlapped = False
        self._two_phase = TwoPhaseCheckpoints(device) if settings.checkpoint_write == "two-phase" else None
        if self._two_phase is not None:
            engine.before_update(self._two_phase.await_copy)

    @property
    def every(self) -> int:
        """Return the steps between two checkpoints, as asked for or as they are tuned now."""
        return self._settings.checkpoint_every or self._interval.every

    def due(self, step: int) -> bool:
        """Return whether one is due after ``step`` steps. Ranks measure different times: ask the first."""
        if self._settings.checkpoint_every:
            return step % self._settings.checkpoint_every == 0
        # One that is still being written would have to be waited for: that is dearer than a step more.
        return step - self._last_step >= self.every and not self.busy

    def add_step(self, step_s: float) -> None:
        """Count a step that took ``step_s``.

        Raises:
            RunError: a checkpoint could not be written meanwhile.
        """
        self._interval.add_step(step_s, self._overlapped)
        if not self.busy:
            self.finish()
        self._overlapped = self.busy

    def save(self, state: dict[str, Any], step: int, begun_s: float, *, best: bool, at_once: bool = False) -> None:
        """Write ``state``, or begin to: the engine continues immediately.

        Args:
            state: of the first rank; {} on the others, which write nothing.
            begun_s: when it began to be gathered, in ``time.monotonic`` seconds.
            best: name it the best too.
            at_once: no step follows that it could overlap with.

        Raises:
            RunError: it, or the one before it, could not be written; the last that was is still there.
        """
        self.finish()
        self._last_step = step
        if not state:
            return
        begun = not at_once and self._begin(state, best)
        if not begun:
            save_checkpoint(self._last, state, self._best if best else None)
        self._overlapped = begun
        self._between_s = time.monotonic() - begun_s
        if not begun:
            self._interval.add_checkpoint(self._between_s, 0.0, 0.0)
            self._on_disk()

    def finish(self) -> None:
        """Wait until the checkpoint under way is on the disk.

        Raises:
            RunError: it could not be written; the one before is still there.
        """
        written = self._two_phase.finish() if self._two_phase is not None else None
        if written is not None:
            self._interval.add_checkpoint(self._between_s, *written)
            text = (
                "checkpoint of step %d: %.3f s between two steps, an update waited %.3f s, on the disk after %.3f s; "
                "overlapped steps included, checkpoints cost %.3f s each"
            )
            log.info(text, self._last_step, self._between_s, *written, self._interval.cost_s)
            self._on_disk()

    @property
    def busy(self) -> bool:
        """Return whether a checkpoint is being copied or written."""
        return self._two_phase is not None and self._two_phase.busy

    def _begin(self, state: dict[str, Any], best: bool) -> bool:
        """Begin a checkpoint in two phases; return False where it has to be written between steps."""
        if self._two_phase is None:
            return False
        try:
            also = self._best if best else None
            self._two_phase.begin(state, self._engine.parameter_names, self._last, also)
        except MemoryError as error:
            log.warning("checkpoints are written between two steps: they cannot be copied first (%s)", error)
            self._two_phase = None
            return False
        return True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is KeyboardInterrupt:  # pressed twice: end immediately
            return
        # The error of the run is reported, not that of its last checkpoint.
        with contextlib.suppress(RunError) if kind is not None else contextlib.nullcontext():
            self.finish()
