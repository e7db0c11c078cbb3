"""Copies between a device and the host that overlap what the device computes.

On a GPU each direction has a stream of its own, and a mark (an event) says when a copy is done. A CPU is its own host:
there copies are real ones and done immediately, so that everything built on them runs and is tested without a GPU.
"""

from __future__ import annotations

import functools
import mmap
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.comm.device_thread import page_lock
from parallel.offload.live_bytes import not_counted

Mark = Any
"""When a copy is done: a ``torch.cuda.Event``, or None where it is done already."""
Direction = Literal["out", "back"]
"""Out to the host, back to the device."""


class Copies:
    """Copies of one device; this one of a CPU, where they are done when the call that asks returns.

    Attributes:
        pinned: copies overlap what the device computes, and host memory should be page-locked for them.
    """

    pinned = False

    @staticmethod
    def for_device(device: torch.device) -> Copies:
        """Return the copies of ``device``."""
        return CudaCopies(device) if device.type == "cuda" else Copies()

    def empty_on_host(self, size: int) -> Tensor:
        """Return ``size`` bytes of host memory, page-locked for a GPU until they are freed: uint8 (size,)."""
        with not_counted():
            return torch.empty(size, dtype=torch.uint8)

    def empty_like_on_host(self, tensor: Tensor) -> Tensor:
        """Return a CPU tensor of the form of ``tensor``, page-locked for a GPU."""
        with not_counted():
            return torch.empty_like(tensor, device="cpu", pin_memory=self.pinned)

    def to_host(self, source: Tensor, into: Tensor) -> Mark:
        """Begin to copy ``source``, as it is once all work asked for so far is done, into host memory.

        ``source`` has to be held, and left as it is, until the mark.
        """
        into.copy_(source)
        return None

    def to_device(self, source: Tensor) -> tuple[Tensor, Mark]:
        """Begin to copy host memory into a new tensor on the device, which may be used and freed after the mark.

        The copy reads ``source`` as it is once all copies that were waited for are done.
        """
        return torch.empty_like(source).copy_(source), None

    def wait(self, mark: Mark) -> None:
        """Let what the device computes from now on wait for the copy."""

    def synchronize(self, mark: Mark) -> None:
        """Return once the copy is done."""


class CudaCopies(Copies):
    """Copies of a GPU, each direction on a stream that all copies of this process share."""

    pinned = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = copy_streams(device)

    def empty_on_host(self, size: int) -> Tensor:
        with not_counted(), torch.cuda.device(self._device):
            memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
            page_lock(memory)
            return memory

    def to_host(self, source: Tensor, into: Tensor) -> Mark:
        return self._copied("out", source, into)

    def to_device(self, source: Tensor) -> tuple[Tensor, Mark]:
        # Of the computing stream's memory: the copy waits for whatever that memory was used for before.
        target = torch.empty_like(source, device=self._device, pin_memory=False)
        return target, self._copied("back", source, target)

    def wait(self, mark: Mark) -> None:
        if mark is not None:
            torch.cuda.current_stream(self._device).wait_event(mark)

    def synchronize(self, mark: Mark) -> None:
        if mark is not None:
            mark.synchronize()

    def _copied(self, direction: Direction, source: Tensor, target: Tensor) -> Mark:
        stream = self._streams[direction]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        end = torch.cuda.Event()  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            end.record()
        return end


def read_later(tensor: Tensor) -> Callable[[], Tensor]:
    """Begin to copy ``tensor`` to the host; return what waits for the copy and gives it."""
    values = tensor.to("cpu", non_blocking=True)
    done = torch.cuda.current_stream(tensor.device).record_event() if tensor.is_cuda else None

    def wait() -> Tensor:
        if done is not None:
            done.synchronize()
        return values

    return wait


@functools.cache
def copy_streams(device: torch.device) -> Mapping[Direction, Any]:
    """Return the streams of ``device`` for copies in this process.

    torch hands out 32 streams, round robin, to NCCL as well: beyond them a copy would wait for a receive.
    """
    return {direction: torch.cuda.Stream(device) for direction in ("out", "back")}  # type: ignore[no-untyped-call]
