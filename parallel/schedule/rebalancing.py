"""When shares of a running job change: from what microbatches took, steady under noise.

Takes one table of seconds a window of steps; gives counts, or nothing. All ranks are given the same tables and so
decide alike. After LB-BSP (Chen et al. 2018): adapt at the boundaries of steps, to speeds as they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.schedule.best_shares import best_counts, step_seconds

WINDOW = 20
"""Steps between two looks."""

GAIN = 0.05
"""Part of a step that other shares have to save, by two windows in a row."""


class Rebalancing:
    """Counts of microbatches that follow measured speeds.

    Args:
        counts: in force.

    Attributes:
        counts: in force now.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._before: tuple[float, ...] | None = None

    def look(self, seconds: Sequence[float]) -> bool:
        """Take the seconds that a microbatch took each group in the window that ends now; True where ``counts`` change.

        They do where the best ones for this window save ``GAIN`` of a step in it, and would have in the one before.
        """
        before, self._before = self._before, tuple(seconds)
        best = best_counts(sum(self.counts), seconds)
        if before is None or not (self._saves(best, seconds) and self._saves(best, before)):
            return False
        self.counts, self._before = best, None
        return True

    def _saves(self, counts: Sequence[int], seconds: Sequence[float]) -> bool:
        return step_seconds(counts, seconds) < (1 - GAIN) * step_seconds(self.counts, seconds)
