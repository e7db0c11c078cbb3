"""Moments at which offloaded storages are on the device: the rules of ``overlap``, without the time of copies.

Takes ``OffloadInterval``s: when a storage is kept, and when the backward pass asks for it; gives the spans of moments
over which it is on the device. No torch here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.memory.liveness import LiveRange
from parallel.memory.policy import WINDOW


@dataclass(frozen=True, slots=True, eq=False)
class OffloadInterval:
    """One storage.

    Attributes:
        begin, free: first and last moment at which the pass that keeps it needs it anyway.
        packed: when it is kept.
        asked: first and last moment of each time the backward pass uses it, in ascending order. Between them it stays
            on the device if the window allows that; after the last it is let go of.
    """

    bytes: int
    begin: int
    free: int
    packed: int
    asked: tuple[tuple[int, int], ...]


def on_device(intervals: Sequence[OffloadInterval], ahead: int | None, backward_start: int) -> Iterator[LiveRange]:
    """Spans of moments, one or two of each interval.

    Args:
        intervals: of one microbatch through one stage.
        ahead: bytes that may wait on the device, before they leave or before they are asked for; None: as
            ``ActivationPolicy.ahead``.
        backward_start: the first moment of the backward pass; before it everything leaves.
    """
    if ahead is None:
        ahead = WINDOW * max((interval.bytes for interval in intervals), default=0)
    return _OffloadSimulation(intervals, ahead, backward_start).spans()


class _OffloadSimulation:
    """``_since``: moment each resident storage arrived; ``_waiting``: resident storages not needed, oldest first."""

    def __init__(self, intervals: Sequence[OffloadInterval], ahead: int, backward_start: int) -> None:
        self._intervals = sorted(intervals, key=lambda interval: interval.packed)
        self._ahead, self._backward_start = ahead, backward_start
        self._since: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._waiting_bytes = 0
        self._packed: list[int] = []

    def spans(self) -> Iterator[LiveRange]:
        packs: dict[int, list[int]] = defaultdict(list)
        asks: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        for number, interval in enumerate(self._intervals):
            packs[interval.packed].append(number)
            for first, last in interval.asked:
                asks[first].append((number, last, (first, last) == interval.asked[-1]))
        turned = False
        for now in sorted({*packs, *asks, self._backward_start}):
            if now >= self._backward_start and not turned:
                turned = True
                yield from self._evict_to(self._backward_start - 1, 0)
                self._look_ahead(now, len(self._packed))
            for number in packs[now]:
                self._packed.append(number)
                self._since[number] = self._intervals[number].begin
                self._wait(number)
                yield from self._evict_to(now, self._ahead)
            for number, last, finally_ in sorted(asks[now], reverse=True):
                size = self._intervals[number].bytes
                self._since.setdefault(number, now)
                self._leave_window(number)
                if not finally_ and self._waiting_bytes + size <= self._ahead:
                    self._wait(number)
                else:
                    yield LiveRange(self._since.pop(number), last, size)
                self._look_ahead(now, self._packed.index(number))
                if finally_:
                    self._packed.remove(number)

    def _wait(self, number: int) -> None:
        self._waiting[number] = size = self._intervals[number].bytes
        self._waiting_bytes += size

    def _leave_window(self, number: int) -> None:
        self._waiting_bytes -= self._waiting.pop(number, 0)

    def _evict_to(self, now: int, window: int) -> Iterator[LiveRange]:
        while self._waiting_bytes > window:
            oldest = next(iter(self._waiting))
            self._leave_window(oldest)
            interval = self._intervals[oldest]
            since = self._since.pop(oldest)
            # Not before the pass that keeps it has used it; what was brought back ahead in vain just leaves.
            yield LiveRange(since, max(now, interval.free) if since == interval.begin else now, interval.bytes)

    def _look_ahead(self, now: int, place: int) -> None:
        for number in reversed(self._packed[:place]):
            if number in self._since:
                continue
            if self._waiting_bytes + self._intervals[number].bytes > self._ahead:
                return
            self._since[number] = now
            self._wait(number)
