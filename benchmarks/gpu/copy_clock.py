"""Measure the copies to and from the host that an engine makes.

Takes the ``Copies`` of an engine, and replaces its methods by timed ones; gives direction, bytes and seconds of each
copy. On a GPU, events on the stream of the copies time them, without the wait for kernels that compute their values.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from parallel.offload.copies import Copies, CudaCopies, Direction


class CopyTime(NamedTuple):
    """One copy."""

    direction: Direction
    bytes: int
    seconds: float


class CopyClock:
    """Records the time of copies while it is ``on``.

    Args:
        copies: of an engine; None if it makes none.
    """

    def __init__(self, copies: Copies | None) -> None:
        self.on = False
        self._times: list[CopyTime] = []
        self._events: list[tuple[Direction, int, torch.cuda.Event, torch.cuda.Event]] = []
        if isinstance(copies, CudaCopies):
            copies._copied = functools.partial(self._on_gpu, copies, copies._copied)  # type: ignore[method-assign]
        elif copies is not None:
            for direction, name in (("out", "to_host"), ("back", "to_device")):
                setattr(copies, name, functools.partial(self._on_cpu, direction, getattr(copies, name)))

    def _on_gpu(
        self, copies: CudaCopies, copy: Callable[..., Any], direction: Direction, source: Tensor, target: Tensor
    ) -> Any:
        if not self.on:
            return copy(direction, source, target)
        stream = copies._streams[direction]
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        stream.wait_stream(torch.cuda.current_stream(copies._device))  # first, so that the wait is not timed
        begin.record(stream)
        mark = copy(direction, source, target)
        end.record(stream)
        self._events.append((direction, source.nbytes, begin, end))
        return mark

    def _on_cpu(self, direction: Direction, copy: Callable[..., Any], *tensors: Tensor) -> Any:
        began_s = time.perf_counter()
        result = copy(*tensors)
        if self.on:
            self._times.append(CopyTime(direction, tensors[0].nbytes, time.perf_counter() - began_s))
        return result

    @property
    def times(self) -> list[CopyTime]:
        """Return the times of all copies since this list was cleared; waits for those under way."""
        for direction, size, begin, end in self._events:
            end.synchronize()
            self._times.append(CopyTime(direction, size, begin.elapsed_time(end) / 1000))
        self._events.clear()
        return self._times
