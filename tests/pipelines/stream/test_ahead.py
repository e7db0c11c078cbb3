"""Parts begun ahead and given in order; no more than asked for, and nothing left behind when given up."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest

from pipelines.stream.ahead import MicrobatchQueue, OnThread


@dataclass
class Begun:
    """A part that notes what is asked of it."""

    part: slice
    dropped: list[slice] = field(default_factory=list)

    def take(self) -> slice:
        return self.part

    def drop(self) -> None:
        self.dropped.append(self.part)


def test_parts_are_begun_as_far_as_asked_and_given_in_order() -> None:
    begun: list[slice] = []

    def begin(part: slice) -> Begun:
        begun.append(part)
        return Begun(part)

    line = MicrobatchQueue([2, 1, 3], begin)
    assert begun == []
    assert line.begin(2) == 2
    assert line.begin(1) == 2
    assert begun == [slice(0, 2), slice(2, 3)]
    assert list(line.made()) == begun
    assert line.give() == slice(0, 2)
    assert line.begin(5) == 2  # no more are left
    assert [line.give(), line.give()] == [slice(2, 3), slice(3, 6)]
    assert line.begin(1) == 0


def test_what_is_under_way_is_dropped_and_the_rest_never_begun() -> None:
    dropped: list[slice] = []
    line = MicrobatchQueue([1, 1, 1], lambda part: Begun(part, dropped))
    line.begin(2)
    line.drop()
    assert dropped == [slice(0, 1), slice(1, 2)]


def test_a_part_on_a_thread_is_waited_for() -> None:
    gate = threading.Event()
    with ThreadPoolExecutor(1) as thread:
        running = OnThread(thread.submit(lambda: gate.wait(20) and 7))
        queued: Future[int] = thread.submit(lambda: 8)
        OnThread(queued).drop()
        assert queued.cancelled()
        threading.Timer(0.05, gate.set).start()
        running.drop()  # it has begun: it cannot be called off
        assert gate.is_set()
        assert running.take() == running.take() == 7


def test_a_fault_on_a_thread_is_raised_where_the_part_is_taken() -> None:
    def fail() -> int:
        raise OSError("disk gone")

    with ThreadPoolExecutor(1) as thread:
        pending = OnThread(thread.submit(fail))
        pending.drop()
        with pytest.raises(OSError, match="disk gone"):
            pending.take()
