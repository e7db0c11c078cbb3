"""Clock of a rank's device: the host's on a CPU, timing events on a GPU.

A host queues the kernels of a GPU ahead of their execution, so the host's clock tells when they were queued. A timing
event tells when the GPU came to it, and recording one does not wait for the GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Mark = Any
"""A moment: seconds of ``time.perf_counter`` on a CPU, a ``torch.cuda.Event`` on a GPU."""


class DeviceClock:
    """Moments in the work of one device.

    Attributes:
        mark: returns the moment in which the device has done what the current stream was asked for so far.
        on_gpu: moments are events, which can be waited for.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.on_gpu = device, device.type == "cuda"
        self.mark: Callable[[], Mark] = self._event if self.on_gpu else time.perf_counter

    def _event(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def host_seconds(self, marks: Sequence[Mark]) -> list[float]:
        """Return ``marks`` in seconds of ``time.perf_counter``; waits for a GPU.

        The clocks of a GPU and its host may drift apart by some microseconds for each second since the marks.
        """
        if not self.on_gpu or not marks:
            return list(marks)
        now = self.mark()
        (since_first_s,) = self.durations([(marks[0], now)])
        first_s = time.perf_counter() - since_first_s
        return [first_s + seconds for seconds in self.durations([(marks[0], mark) for mark in marks])]

    def durations(self, pairs: Sequence[tuple[Mark, Mark]]) -> list[float]:
        """Return the seconds between the marks of each pair; waits for a GPU to come to the last mark."""
        if not self.on_gpu or not pairs:
            return [end - start for start, end in pairs]
        pairs[-1][1].synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in pairs]
