"""Streams of a simulated GPU: what was launched on them, in which order it may run, and when a run can go no further.

Work runs as soon as the order allows, or, in late mode, only when somebody waits for it. A ``Meeting`` is work of
several streams that runs at one time, as a message of NCCL does. Threads of ranks that all wait for what none of them
will launch are a ``Hang``, found at once.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import torch
from torch.utils._python_dispatch import _disable_current_modes


class Hang(BaseException):
    """No rank can go on. Not an ``Exception``: no handler of the project may take it for a fault of its own."""


class Work:
    """One kernel, copy, event or share in a meeting.

    Args:
        run: performs it; None of a share in a meeting.
        after: work that comes first, beside what was launched earlier on the same stream.
    """

    __slots__ = ("after", "done", "meeting", "name", "run", "stream")

    def __init__(self, stream: Stream, name: str, run: Callable[[], object] | None, after: Iterable[Work]) -> None:
        self.stream, self.name, self.run = stream, name, run
        self.after = [work for work in after if not work.done]
        self.meeting: Meeting | None = None
        self.done = False


class Stream:
    """The order of work on one device; ``pending`` is what has not run."""

    def __init__(self, number: int, device: int) -> None:
        self.number, self.device = number, device
        self.pending: collections.deque[Work] = collections.deque()

    @property
    def last(self) -> list[Work]:
        """What work has to wait for that comes after all of this stream: nothing, or its last."""
        return [self.pending[-1]] if self.pending else []


@dataclass
class Meeting:
    """Work that ``size`` streams do together, by ``run``, once all have come to it."""

    size: int
    run: Callable[[], object]
    shares: list[Work] = field(default_factory=list)

    def join(self, work: Work) -> None:
        """Have ``work`` take part."""
        work.meeting = self
        self.shares.append(work)


class Timeline:
    """All streams.

    Args:
        late: None runs work as soon as it may; a number runs it as late as it may (0), or advances streams at random
            with this seed in between.
    """

    def __init__(self, late: int | None = None) -> None:
        self.late = late
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.ranks: set[threading.Thread] = set()
        self._version = 0
        self._waiting: dict[threading.Thread, tuple[int, str]] = {}
        self._hang: str | None = None
        self._random = random.Random(late)
        self._streams: list[Stream] = []
        self._soon: list[Work] = []

    def stream(self, device: int) -> Stream:
        """Return a new stream."""
        with self.lock:
            self._streams.append(Stream(len(self._streams), device))
            return self._streams[-1]

    def streams_of(self, device: int) -> list[Stream]:
        """Return all streams of a device."""
        return [stream for stream in self._streams if stream.device == device]

    def launch(
        self,
        stream: Stream,
        name: str,
        run: Callable[[], object] | None = None,
        after: Iterable[Work] = (),
        meeting: Meeting | None = None,
    ) -> Work:
        """Add work to ``stream``."""
        with self.lock:
            work = Work(stream, name, run or (None if meeting else _nothing), after)
            if meeting:
                meeting.join(work)
            stream.pending.append(work)
            self.note()
            if self.late is None:
                for each in self._streams:
                    self._advance(each)
            elif self.late and self._random.random() < 0.2:
                self._advance(self._random.choice(self._streams))
            return work

    def soon(self, name: str, run: Callable[[], object], after: Iterable[Work]) -> None:
        """Run something as early as may be, in late mode too: when all of ``after`` is done."""
        with self.lock:
            self._soon.append(Work(Stream(-1, -1), name, run, after))
            self._run_soon()

    def note(self) -> None:
        """Tell those who wait that something has changed."""
        with self.lock:
            self._version += 1
            self.changed.notify_all()

    def force(self, works: Iterable[Work], what: str) -> None:
        """Return once ``works`` have run; ``what`` names who waits, for a hang."""
        wanted = list(works)
        self.block(lambda: not [work for work in wanted if not self._try(work, set())], what)

    def block(self, until: Callable[[], bool], what: str) -> None:
        """Return once ``until`` holds. It is asked again whenever something has changed.

        Raises:
            Hang: every rank waits.
        """
        me = threading.current_thread()
        with self.changed:
            while not until():
                self._waiting[me] = self._version, what
                if self._hang is None and me in self.ranks and self._all_wait():
                    self._hang = "; ".join(
                        sorted(told for thread, (_, told) in self._waiting.items() if thread in self.ranks)
                    )
                    self.changed.notify_all()
                if self._hang is not None:
                    raise Hang(f"no rank can go on: {self._hang}")
                self.changed.wait(30)
            self._waiting.pop(me, None)

    def leave(self) -> None:
        """The thread of a rank ends: the others may be waiting for it in vain."""
        with self.lock:
            self.ranks.discard(threading.current_thread())
            self._waiting.pop(threading.current_thread(), None)
            self.note()

    def idle(self, stream: Stream) -> bool:
        """Return whether work launched now on ``stream`` may run at once."""
        return self.late is None and not stream.pending

    def _all_wait(self) -> bool:
        return all(self._waiting.get(thread, (-1, ""))[0] == self._version for thread in self.ranks)

    def _advance(self, stream: Stream) -> None:
        while stream.pending and self._try(stream.pending[0], set()):
            pass

    def _try(self, work: Work, path: set[Work]) -> bool:
        """Run ``work`` and all that comes before it, as far as that is possible; return whether it is done."""
        if work.done:
            return True
        if work in path or not self._reach(work, path | {work}):
            return False
        if work.done:  # ran in a meeting on the way
            return True
        shares = [work]
        if work.meeting:
            shares = work.meeting.shares
            if len(shares) < work.meeting.size:
                return False
            if not all(self._reach(share, path | set(shares)) for share in shares if share is not work):
                return False
        run = work.meeting.run if work.meeting else work.run
        assert run is not None
        if not work.done:
            with torch.inference_mode(), _disable_current_modes():
                run()
            for share in shares:
                assert share.stream.pending[0] is share
                share.stream.pending.popleft()
                share.done = True
            self._version += 1
            self.changed.notify_all()
            self._run_soon()
        return True

    def _reach(self, work: Work, path: set[Work]) -> bool:
        """Have done what comes before ``work``."""
        while work.stream.pending and work.stream.pending[0] is not work and not work.done:
            if not self._try(work.stream.pending[0], path):
                return False
        return all(self._try(other, path) for other in work.after)

    def _run_soon(self) -> None:
        for work in [work for work in self._soon if all(other.done for other in work.after)]:
            assert work.run is not None
            self._soon.remove(work)
            work.run()


def _nothing() -> None:
    """What an event does."""
