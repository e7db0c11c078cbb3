"""When each rank did what in a step: simulated before a run, measured in it, and drawn the same way.

Takes the spans of the actions; gives the step time and how much of it the ranks computed. Seconds count from any fixed
moment, the same for all ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from parallel.schedule.action import COMPUTE, Action


@dataclass(frozen=True, slots=True)
class Span:
    """An action and when it was under way: a message while it travels, a REDUCE while gradients are summed."""

    action: Action
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True, slots=True)
class Timeline:
    """One step of all ranks.

    Attributes:
        spans: rank -> what it did, by start; compute actions do not overlap each other, everything else may.
        peak_bytes: rank -> most bytes of activations at any time; None where nobody counted.
    """

    spans: Mapping[int, tuple[Span, ...]]
    peak_bytes: Mapping[int, int] | None = None

    @property
    def start_s(self) -> float:
        """When the first action of any rank began."""
        return min((span.start_s for spans in self.spans.values() for span in spans), default=0.0)

    @property
    def makespan_s(self) -> float:
        """From the start of the first action to the end of the last, over all ranks; messages and sums count."""
        ends = (span.end_s for spans in self.spans.values() for span in spans)
        return max(ends, default=0.0) - self.start_s

    def busy_s(self, rank: int) -> float:
        """How long ``rank`` computed."""
        return sum(span.duration_s for span in self.compute(rank))

    def compute(self, rank: int) -> tuple[Span, ...]:
        """The compute actions of ``rank``."""
        return tuple(span for span in self.spans[rank] if span.action.kind in COMPUTE)

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they do not compute, 0 to 1; 0 for a step without actions."""
        whole = len(self.spans) * self.makespan_s
        return 1 - sum(map(self.busy_s, self.spans)) / whole if whole else 0.0
