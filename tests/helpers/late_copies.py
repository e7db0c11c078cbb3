"""Copies that are done as late as a GPU may do them: when somebody waits for them, and in the order of their stream."""

from __future__ import annotations

from collections import deque

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.offload.copies import Copies, Direction, Mark


class LateMark:
    """A copy that is still to be done. It does not keep the device's memory from being freed."""

    def __init__(self, direction: Direction, device: Tensor, host: Tensor) -> None:
        self.direction, self.host = direction, host
        self.done = False
        self._memory = StorageWeakRef(device.untyped_storage())
        self._form = device.storage_offset(), device.shape, device.stride()

    @property
    def device(self) -> Tensor:
        """The tensor on the device."""
        storage = torch.UntypedStorage._new_with_weak_ptr(self._memory.cdata)
        assert storage is not None, "memory of the device was freed before it was copied"
        return torch.empty(0, dtype=self.host.dtype).set_(storage, *self._form)


class LateCopies(Copies):
    """Nothing is where it was copied to before its mark was waited for; memory that awaits a copy holds NaNs."""

    at_once = False

    def __init__(self) -> None:
        super().__init__()
        self._streams: dict[Direction, deque[LateMark]] = {"out": deque(), "back": deque()}

    @property
    def pinned(self) -> bool:
        return False

    def to_host(self, source: Tensor, into: Tensor) -> Mark:
        return self._later("out", source, into)

    def to_device(self, source: Tensor) -> tuple[Tensor, Mark]:
        target = torch.empty_like(source)
        target.view(torch.uint8).fill_(255)
        return target, self._later("back", target, source)

    def wait(self, mark: Mark) -> None:
        while mark is not None and not mark.done:
            first = self._streams[mark.direction].popleft()
            if first.direction == "out":
                first.host.copy_(first.device)
            else:
                first.device.copy_(first.host)
            first.done = True

    def synchronize(self, mark: Mark) -> None:
        self.wait(mark)

    def finish(self) -> None:
        """Do what is left."""
        for stream in self._streams.values():
            while stream:
                self.wait(stream[-1])

    def _later(self, direction: Direction, device: Tensor, host: Tensor) -> LateMark:
        mark = LateMark(direction, device, host)
        self._streams[direction].append(mark)
        return mark
