"""Rows from one to another, along one axis of a map. Columns are rows of the other axis."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """Rows [start, stop) of a map; they may leave it, where an operation pads."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Rows; 0 of what is empty."""
        return max(0, self.stop - self.start)

    def hull(self, other: Span | None) -> Span:
        """Return the smallest span that holds both; this one where there is no other, or an empty one."""
        if other is None or other.stop <= other.start:
            return self
        start, stop = self
        if start <= other.start and stop >= other.stop:
            return self
        return other if stop <= start else Span(min(start, other.start), max(stop, other.stop))

    def within(self, side: int) -> Span:
        """Return the rows that a map of ``side`` rows has; where it has none of them, an empty span inside the map."""
        start = min(max(self.start, 0), side)
        return Span(start, max(start, min(self.stop, side)))

    def touching(self, side: int) -> Span:
        """Return the rows that a map of ``side`` rows has, or the one nearest to them: never an empty span."""
        start = min(max(self.start, 0), side - 1)
        return Span(start, max(start + 1, min(self.stop, side)))

    def holds(self, other: Span) -> bool:
        return not other.size or (self.start <= other.start and other.stop <= self.stop)
