"""Seconds that ranks wait for each other before gradients are summed, over a run.

Takes what each rank waited in each step, sum included; returns what it waited for others. The rank that is last waits
for the sum alone, which takes all of them as long: what another waits longer than it is idle time.
"""

from __future__ import annotations

from collections.abc import Sequence

from app.training.throughput import WARM_UP

UNKNOWN = -1
"""In place of microseconds: where a clock does not show it, or there is nobody to wait for."""


class IdleTime:
    """Idle time of all ranks.

    Args:
        world: how many.
    """

    def __init__(self, world: int) -> None:
        self._idle_s = [0.0] * world
        self._step_s = 0.0
        self._steps = 0

    @staticmethod
    def to_microseconds(waited_s: float | None) -> int:
        """Return what a rank tells the others of a step: whole microseconds."""
        return UNKNOWN if waited_s is None else round(waited_s * 1e6)

    def add(self, waited_us: Sequence[int], step_s: float) -> None:
        """Count a step, by what each rank ``told``; one in which any did not know is left out, as is the warm-up."""
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
