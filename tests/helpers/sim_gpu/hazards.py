"""What a simulated GPU finds wrong with a run, by torch's own race detector, and how often the host waited.

``torch.cuda._sanitizer.EventHandler`` keeps for each stream what it is ordered after (vector clocks). Here the host is
a stream, too, as far as page-locked memory is concerned, and freeing memory is a write on the stream that it came from,
ordered after those that ``record_stream`` named.
"""

from __future__ import annotations

import collections
import sys
import types
from collections.abc import Iterable, Mapping
from typing import Any

from torch.cuda._sanitizer import EventHandler

HOST = -1
NO_TRACES: Any = types.SimpleNamespace(
    StackSummary=types.SimpleNamespace(extract=lambda frames, lookup_lines: []), walk_stack=lambda frame: None
)
"""In place of the module that torch's detector takes a stack trace from at each kernel: ``place`` tells enough."""


class Hazards:
    """Those of one process.

    Attributes:
        found: one line for each unordered access, use after free, and call on a device that is not the process's.
        syncs: how often the host waited for a device, by the place in the project that made it.
    """

    def __init__(self) -> None:
        self.found: list[str] = []
        self.syncs: collections.Counter[str] = collections.Counter()
        self._handler = EventHandler()
        self._events = 0

    def access(self, stream: int, name: str, reads: Iterable[int], writes: Iterable[int], pinned: bool = False) -> None:
        """A kernel or copy was launched on ``stream`` that uses the memory of these numbers."""
        written, read = set(writes), set(reads)
        read -= written
        if pinned and stream != HOST:  # what the host has done before comes before it
            self._order(stream, HOST)
        names: dict[int, list[str]] = {number: [] for number in read | written}
        for error in self._handler._handle_kernel_launch(stream, read, written, set(), name, names):
            now, before = error.current_access, error.previous_access  # type: ignore[attr-defined]
            self.found.append(
                f"unordered: {now.operator} on stream {now.stream} {now.type.name.lower()}s what {before.operator} on "
                f"stream {before.stream} {before.type.name.lower()}s, at {place()}"
            )

    def free(self, memory: int, stream: int, recorded: Iterable[int]) -> None:
        """Memory of ``stream`` may be given out again, after what the ``recorded`` streams do now."""
        syncs = self._handler.syncs
        reuse = -2
        syncs.current_sync_states[reuse] = dict(syncs.current_sync_states.get(stream, {}))
        for other in recorded:
            self._order(reuse, other)
        self.access(reuse, "memory freed and given out again", [], [memory])
        del syncs.current_sync_states[reuse]
        self._handler._handle_memory_deallocation(memory)

    def record(self, stream: int) -> int:
        """Return the number of an event recorded on ``stream``."""
        self._events += 1
        self._handler._handle_event_creation(self._events)
        self._handler._handle_event_record(self._events, stream)
        return self._events

    def wait(self, stream: int, event: int) -> None:
        """``stream`` waits for an event."""
        self._handler._handle_event_wait(event, stream)

    def order(self, stream: int, state: Mapping[int, int]) -> None:
        """What ``stream`` does from now on comes after a ``state`` of this process."""
        self._handler.syncs._ensure_stream_exists(stream)
        self._handler.syncs._state_wait_for_other(self._handler.syncs.current_sync_states[stream], dict(state))

    def host_waits(self, what: str, event: int | None = None, stream: int | None = None) -> None:
        """The host waits: for an event, a stream, or (neither) all streams of the process."""
        self.syncs[f"{what} at {place()}"] += 1
        self._handler.syncs._ensure_stream_exists(HOST)
        if event is not None:
            self._handler._handle_event_synchronization(event)
        elif stream is not None:
            self._handler._handle_stream_synchronization(stream)
        else:
            self._handler._handle_device_synchronization()

    def _order(self, stream: int, other: int) -> None:
        syncs = self._handler.syncs
        syncs._ensure_stream_exists(other)
        self.order(stream, syncs.current_sync_states[other])


def place() -> str:
    """Return file, line and function of the project, or of a test, that is being called."""
    frame, outside = sys._getframe(1), None
    while frame is not None:
        name = frame.f_code.co_filename
        if "site-packages" not in name and "sim_gpu" not in name:
            outside = outside or frame
            if any(f"/{room}/" in name for room in ("app", "parallel", "pipelines", "models")):
                break
        frame = frame.f_back  # type: ignore[assignment]
    frame = frame or outside  # type: ignore[assignment]
    return f"{'/'.join(frame.f_code.co_filename.split('/')[-3:])}:{frame.f_lineno} {frame.f_code.co_name}"
