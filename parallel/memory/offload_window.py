"""Moments at which offloaded storages are on the device: the rules of ``overlap``, without the time of copies.

Takes the storages of one microbatch that move, by their uses in each segment; gives the spans of moments over which
each is on the device, and bytes on the host. A storage that is recomputed is another than the one made at first.
After the forward pass everything leaves; on a GPU what is being copied is counted by the window. No torch here.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from parallel.memory.liveness import LiveRange
from parallel.memory.policy import WINDOW, buffer_bytes


@dataclass(frozen=True)
class HostBytes:
    """Bytes of a stage on the host for one microbatch of the traced size.

    Attributes:
        kept: between its forward and its backward pass.
        inputs: when the whole stage is to be recomputed.
        again: besides, at most, in a backward pass in which segments are recomputed.
    """

    kept: int
    inputs: int
    again: int


class Use(NamedTuple):
    """A storage in one segment, by moments of the forward pass.

    Attributes:
        begin, last: when it is first and last needed while the segment runs forward.
        saved: when layers of the segment keep it, in ascending order.
        enters: it is there before the segment.
        segment: number of the segment if that is recomputed, else None.
    """

    begin: int
    last: int
    saved: Sequence[int]
    enters: bool
    segment: int | None


class OffloadInterval(NamedTuple):
    """One storage.

    Attributes:
        begin, free: first and last moment at which the pass that keeps it needs it anyway.
        packed: when it is kept.
        asked: first and last moment of each time the backward pass uses it, in ascending order. Between them it stays
            on the device if the window allows that; after the last it is freed.
    """

    bytes: int
    begin: int
    free: int
    packed: int
    asked: tuple[tuple[int, int], ...]


class OffloadedStorages:
    """Storages that one stage moves to the host.

    Args:
        recompute_at, backward_at: forward moment of a layer -> moments of its recomputation and its backward pass.
    """

    def __init__(self, recompute_at: Sequence[int], backward_at: Sequence[int]) -> None:
        self._again, self._back = recompute_at, backward_at
        self._spans: list[LiveRange] = []
        self._intervals: list[OffloadInterval] = []
        self._kept = self._inputs = 0
        self._host_again: Counter[int | None] = Counter()

    def add(self, size: int, begin: int, last: int, uses: Sequence[Use], *, entered: bool) -> None:
        """Count a storage that the forward pass needs from ``begin`` to ``last``; ``entered``: it enters the stage."""
        self._inputs += buffer_bytes(size) * entered
        kept = [place for use in uses if use.segment is None for place in use.saved]
        entering = [use for use in uses if use.segment is not None and use.enters]
        recomputed = [use for use in uses if use.segment is not None and not use.enters]
        asked = [(self._back[place],) * 2 for place in kept]
        latest = max([now for now, _ in asked] + [self._again[use.begin] for use in entering], default=-1)
        for use in entering:
            begin_again = self._again[use.begin]
            if begin_again == latest:  # nothing else holds it by then: the segment keeps it anew
                asked.append((begin_again, begin_again))
                recomputed.insert(0, use)
            else:
                asked.append((begin_again, self._again[use.last]))
                asked += [(self._back[place],) * 2 for place in use.saved]
        if asked:
            packed = min([*kept, *(use.begin for use in entering)])
            self._kept += self._leave(size, begin, last, packed, asked)
        else:
            self._spans.append(LiveRange(begin, last, size))
        for use in recomputed:
            begin = self._again[use.begin] + use.enters  # what enters has just been brought
            free = self._again[use.last]
            if use.saved:
                asked = [(self._back[place],) * 2 for place in use.saved]
                self._host_again[use.segment] += self._leave(size, begin, free, self._again[use.saved[0]], asked)
            else:
                self._spans.append(LiveRange(begin, free, size))

    def _leave(self, size: int, begin: int, free: int, packed: int, asked: Iterable[tuple[int, int]]) -> int:
        """To the host at moment ``packed``, and back. Gives its bytes there."""
        self._intervals.append(OffloadInterval(size, begin, free, packed, tuple(sorted({*asked}))))
        return buffer_bytes(size)

    @property
    def host(self) -> HostBytes:
        """Return the bytes on the host."""
        return HostBytes(self._kept, self._inputs, max(self._host_again.values(), default=0))

    def spans(self, ahead: int | None, backward_start: int) -> list[LiveRange]:
        """Return the spans on the device, one or two of each storage.

        Args:
            ahead: as ``ActivationPolicy.ahead``.
            backward_start: the first moment of the backward pass; before it everything leaves.
        """
        if ahead is None:
            ahead = WINDOW * max((interval.bytes for interval in self._intervals), default=0)
        return [*self._spans, *_OffloadSimulation(self._intervals, ahead, backward_start).spans()]


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
        for now in sorted({*packs, *asks, self._backward_start}):
            if now == self._backward_start:
                yield from self._evict_to(now - 1, 0)
                self._look_ahead(now, len(self._packed))
            for number in packs[now]:
                begin = self._intervals[number].begin
                self._packed.append(number)
                self._since[number] = begin
                self._wait(number)
                # A layer saves its inputs before it computes, its output afterwards.
                yield from self._evict_to(now - (begin < now), self._ahead)
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
