"""When offloaded storages are on the device: ``overlap``'s rules on paper, moment by moment, without what copies take.

Takes ``Journey``s: when a storage is kept, and when the backward pass asks for it; gives the spans of moments over
which it is on the device. No torch here.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from parallel.memory.liveness import LiveRange
from parallel.memory.policy import WINDOW


@dataclass(frozen=True, slots=True, eq=False)
class Journey:
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


def on_device(journeys: Sequence[Journey], ahead: int | None, turn: int) -> Iterator[LiveRange]:
    """Spans of moments, one or two of each journey.

    Args:
        journeys: of one microbatch through one stage.
        ahead: bytes that may wait on the device, before they leave or before they are asked for; None: as
            ``ActivationPolicy.ahead``.
        turn: the first moment of the backward pass; before it everything leaves.
    """
    if ahead is None:
        ahead = WINDOW * max((journey.bytes for journey in journeys), default=0)
    return _Travels(journeys, ahead, turn).spans()


class _Travels:
    """Attributes: ``_since``: on the device since a moment; ``_waiting``: of those, not asked for, oldest first."""

    def __init__(self, journeys: Sequence[Journey], ahead: int, turn: int) -> None:
        self._journeys = sorted(journeys, key=lambda journey: journey.packed)
        self._ahead, self._turn = ahead, turn
        self._since: dict[int, int] = {}
        self._waiting: dict[int, int] = {}
        self._waiting_bytes = 0
        self._packed: list[int] = []

    def spans(self) -> Iterator[LiveRange]:
        packs: dict[int, list[int]] = defaultdict(list)
        asks: dict[int, list[tuple[int, int, bool]]] = defaultdict(list)
        for number, journey in enumerate(self._journeys):
            packs[journey.packed].append(number)
            for first, last in journey.asked:
                asks[first].append((number, last, (first, last) == journey.asked[-1]))
        turned = False
        for now in sorted({*packs, *asks, self._turn}):
            if now >= self._turn and not turned:
                turned = True
                yield from self._narrow(self._turn - 1, 0)
                self._look_ahead(now, len(self._packed))
            for number in packs[now]:
                self._packed.append(number)
                self._since[number] = self._journeys[number].begin
                self._wait(number)
                yield from self._narrow(now, self._ahead)
            for number, last, finally_ in sorted(asks[now], reverse=True):
                size = self._journeys[number].bytes
                self._since.setdefault(number, now)
                self._asked(number)
                if not finally_ and self._waiting_bytes + size <= self._ahead:
                    self._wait(number)
                else:
                    yield LiveRange(self._since.pop(number), last, size)
                self._look_ahead(now, self._packed.index(number))
                if finally_:
                    self._packed.remove(number)

    def _wait(self, number: int) -> None:
        self._waiting[number] = size = self._journeys[number].bytes
        self._waiting_bytes += size

    def _asked(self, number: int) -> None:
        self._waiting_bytes -= self._waiting.pop(number, 0)

    def _narrow(self, now: int, window: int) -> Iterator[LiveRange]:
        while self._waiting_bytes > window:
            oldest = next(iter(self._waiting))
            self._asked(oldest)
            journey = self._journeys[oldest]
            since = self._since.pop(oldest)
            # Not before the pass that keeps it has used it; what was brought back ahead in vain just leaves.
            yield LiveRange(since, max(now, journey.free) if since == journey.begin else now, journey.bytes)

    def _look_ahead(self, now: int, place: int) -> None:
        for number in reversed(self._packed[:place]):
            if number in self._since:
                continue
            if self._waiting_bytes + self._journeys[number].bytes > self._ahead:
                return
            self._since[number] = now
            self._wait(number)
