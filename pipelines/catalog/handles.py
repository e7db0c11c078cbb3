"""Open slides, kept between reads: a bounded number of them, the least recently used closed first.

Takes slide specs, lends open slides to any number of threads. A lent slide is never closed, so more than ``capacity``
are open when more are lent at once. Handles do not survive fork or pickle: in another process the pool starts empty.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from pipelines.slides.slide import Slide, SlideError

CHECK_EVERY_S = 2.0
"""A slide is compared with the one that was indexed when it is opened, also after a read that failed. While it is open
it is compared at most so often: a stat for each tile is slow on network file systems. A replaced file is noticed so
late."""


class OpensSlide(Protocol):
    """What the pool needs of a slide spec."""

    @property
    def slide_id(self) -> str: ...
    def check_unchanged(self) -> None:
        """Raise ``SlideError`` when the file is another than it was."""
        ...

    def open(self) -> Slide: ...


class _Handle:
    """One slide of the pool; its lock is held while it is opened, so that two threads do not open it twice."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.slide: Slide | None = None
        self.leases = 0
        self.discarded = False
        self.checked_s = 0.0


_POOLS: weakref.WeakSet[SlidePool] = weakref.WeakSet()


class SlidePool:
    """Lends open slides by id.

    Args:
        specs: the slides; ``spec.open()`` is called in the thread that first leases one.
        capacity: slides kept open when none is lent, at least 1.

    Raises:
        ValueError: ``capacity`` below 1, or two specs with one id.
    """

    def __init__(self, specs: Sequence[OpensSlide], capacity: int) -> None:
        if capacity < 1:
            raise ValueError(f"a pool keeps at least 1 slide open; got capacity {capacity}")
        self._specs = {spec.slide_id: spec for spec in specs}
        if len(self._specs) < len(specs):
            raise ValueError(f"slide ids of a pool must differ; got {sorted(spec.slide_id for spec in specs)}")
        self.capacity = capacity
        self._inherited: list[_Handle] = []
        self._start_empty()
        _POOLS.add(self)

    def _start_empty(self) -> None:
        self._lock = threading.Lock()
        self._handles: OrderedDict[str, _Handle] = OrderedDict()  # the least recently used first
        self._closed = False

    @contextmanager
    def lease(self, slide_id: str) -> Iterator[Slide]:
        """Lend the open slide, shared with other threads, not closed while the ``with`` block runs.

        Raises:
            KeyError: no spec has this id.
            SlideError: the slide cannot be opened (it is tried again on the next lease), is no longer the one that was
                indexed, or the pool is closed.
        """
        spec = self._specs[slide_id]
        with self._lock:
            if self._closed:
                raise SlideError(f"slide {slide_id!r} was asked of a closed pool")
            handle = self._handles.setdefault(slide_id, _Handle())
            self._handles.move_to_end(slide_id)
            handle.leases += 1
            unused = self._take_unused(handle)
        try:
            for slide in unused:  # before another is opened
                slide.close()
            with handle.lock:
                now_s = time.monotonic()
                if handle.slide is None or now_s - handle.checked_s >= CHECK_EVERY_S:
                    spec.check_unchanged()
                    handle.checked_s = now_s
                if handle.slide is None:
                    handle.slide = spec.open()
            yield handle.slide
        finally:
            with self._lock:
                handle.leases -= 1
                self._drop_unopened(slide_id, handle)
                unused = self._take_unused(handle)
            for slide in unused:
                slide.close()

    def discard(self, slide_id: str) -> None:
        """Forget an open slide, because a read of it failed: the next lease opens it anew.

        Threads that have it keep it; the last of them closes it. Without effect when the slide is not open.
        """
        with self._lock:
            handle = self._handles.pop(slide_id, None)
            if handle is None:
                return
            handle.discarded = True
            unused = self._take_unused(handle)
        for slide in unused:
            slide.close()

    def _drop_unopened(self, slide_id: str, handle: _Handle) -> None:
        if handle.slide is None and handle.leases == 0 and self._handles.get(slide_id) is handle:
            del self._handles[slide_id]

    def _take_unused(self, handle: _Handle) -> list[Slide]:
        """Slides to close now: ``handle``'s when it was discarded and nobody has it, and what exceeds the capacity."""
        unused: list[Slide] = []
        if handle.discarded and handle.leases == 0 and handle.slide is not None:
            unused.append(handle.slide)
            handle.slide = None
        for slide_id in [i for i, h in self._handles.items() if h.leases == 0]:
            if len(self._handles) <= self.capacity:
                break
            slide = self._handles.pop(slide_id).slide
            if slide is not None:
                unused.append(slide)
        return unused

    @property
    def open_ids(self) -> tuple[str, ...]:
        """Ids of the slides that are open or being opened, the least recently used first."""
        with self._lock:
            return tuple(self._handles)

    def close(self) -> None:
        """Close every slide; one that is lent is closed when it comes back. Later leases are refused."""
        with self._lock:
            self._closed = True
            handles = list(self._handles.values())
            self._handles.clear()
            unused: list[Slide] = []
            for handle in handles:
                handle.discarded = True
                unused += self._take_unused(handle)
        for slide in unused:
            slide.close()

    def __getstate__(self) -> dict[str, Any]:
        return {"specs": list(self._specs.values()), "capacity": self.capacity}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["specs"], state["capacity"])  # type: ignore[misc]  # an empty pool, as when it was made

    def _after_fork(self) -> None:
        """In the child: start empty. The parent's handles are kept unused, since closing them takes locks that the
        parent's threads may have held at the moment of the fork."""
        self._inherited += self._handles.values()
        self._start_empty()


def _empty_all() -> None:
    for pool in list(_POOLS):
        pool._after_fork()


os.register_at_fork(after_in_child=_empty_all)
