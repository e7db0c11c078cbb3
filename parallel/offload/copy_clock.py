"""How long copies between a device and the host take: read from the clock on a CPU, from events on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Direction = Literal["out", "back"]
"""Out to the host, back to the device."""


@dataclass(frozen=True, slots=True)
class CopyTime:
    """One copy."""

    direction: Direction
    bytes: int
    seconds: float

    @property
    def bandwidth(self) -> float:
        """Bytes per second."""
        return self.bytes / self.seconds if self.seconds else 0.0


class CopyClock:
    """Notes copies while it is ``on``."""

    def __init__(self) -> None:
        self.on = False
        self._times: list[CopyTime] = []
        self._events: list[tuple[Direction, int, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def timing(self, direction: Direction, tensor: Tensor, *, gpu: bool) -> Iterator[None]:
        """Around a copy of ``tensor``, which is begun on the current stream of a GPU or done at once."""
        if not self.on:
            yield
            return
        size = tensor.numel() * tensor.element_size()
        if gpu:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            yield
            end.record()
            self._events.append((direction, size, begin, end))
        else:
            began = time.perf_counter()
            yield
            self._times.append(CopyTime(direction, size, time.perf_counter() - began))

    @property
    def times(self) -> list[CopyTime]:
        """Return the times of all copies since it was on, or since this list was cleared; waits for those under way."""
        for direction, size, begin, end in self._events:
            end.synchronize()
            self._times.append(CopyTime(direction, size, begin.elapsed_time(end) / 1000))
        self._events.clear()
        return self._times
