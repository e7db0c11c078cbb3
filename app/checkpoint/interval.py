"""The number of steps k between checkpoints that is worth their cost, from measured seconds.

Takes the time of every step and what every checkpoint cost; gives the smallest k at which checkpoints cost no more than
a share of the time and each is on the disk before the next is due. After Mohan, Phanishayee, Chidambaram 2021,
CheckFreq, section 4.4: the cost is what a checkpoint really added, steps that ran slower beside it included, and k
follows it while the run lasts. Knows no clock and no file.
"""

from __future__ import annotations

import math
import statistics
from collections import deque

FIRST = 10
"""Steps before the first checkpoint: there is nothing yet to tune from."""
STEPS, CHECKPOINTS = 50, 5
"""How many of the last steps and checkpoints count; medians of them, so that one that was held up moves nothing."""


class CheckpointInterval:
    """The number of steps between two checkpoints, tuned while the run lasts.

    Args:
        overhead: share of the time that checkpoints may cost, above 0 to 1.
    """

    def __init__(self, overhead: float) -> None:
        self._overhead = overhead
        self._quiet_s: deque[float] = deque(maxlen=STEPS)
        self._beside_s: list[float] = []
        self._costs_s: deque[float] = deque(maxlen=CHECKPOINTS)
        self._persists_s: deque[float] = deque(maxlen=CHECKPOINTS)

    def add_step(self, step_s: float, beside: bool) -> None:
        """Add a step that took ``step_s``; ``beside``: a checkpoint was being copied or written meanwhile."""
        (self._beside_s if beside else self._quiet_s).append(step_s)

    def add_checkpoint(self, between_s: float, blocked_s: float, write_s: float) -> None:
        """Add a checkpoint that is on the disk; the steps beside it have been added.

        Args:
            between_s: what it took between two steps.
            blocked_s: how long updates waited for its copy; part of the steps beside it.
            write_s: from the end of the step before it until it was on the disk; 0 when that was all between steps.
        """
        slower_s = 0.0
        if self._quiet_s:
            usual_s = statistics.median(self._quiet_s)
            slower_s = sum(self._beside_s) - usual_s * len(self._beside_s)
        self._beside_s.clear()
        self._costs_s.append(between_s + max(blocked_s, slower_s))
        self._persists_s.append(write_s)

    @property
    def cost_s(self) -> float | None:
        """Return the seconds that a checkpoint costs, as measured; None before the first."""
        return statistics.median(self._costs_s) if self._costs_s else None

    @property
    def every(self) -> int:
        """Return k, at least 1."""
        cost_s = self.cost_s
        if cost_s is None or not self._quiet_s:
            return FIRST
        step_s = statistics.median(self._quiet_s)
        if step_s <= 0:
            return FIRST
        affordable = math.ceil(cost_s / (self._overhead * step_s))
        write_s = statistics.median(self._persists_s)
        # One step more than the disk needs: steps without a checkpoint beside them are what the others are held to.
        possible = math.ceil(write_s / step_s) + 1 if write_s else 1
        return max(1, affordable, possible)
