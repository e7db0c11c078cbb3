"""Host memory for what is moved off a device: buffers that are reused within a budget, and files beyond it.

Page-locking memory takes far longer than a copy, so page-locked buffers are reused. Their sizes are rounded up to a few
steps per power of two, so that a buffer fits many tensors. A file has no name, so that the kernel frees it however the
process ends.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from collections import defaultdict
from math import prod
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from parallel.memory.policy import buffer_bytes
from parallel.offload.copies import Copies
from parallel.offload.live_bytes import not_counted
from parallel.units import bytes_text


class HostMemory:
    """Host memory of one rank. Thread-safe.

    Args:
        copies: of the rank's device; they know what host memory suits it. None: those of a CPU.
        budget: bytes of memory that may be taken; None: no limit.
        folder: of files beyond the budget; None: where the system has temporary ones.

    Attributes:
        bytes, peak_bytes: of memory in use, now and at most.
        taken_bytes: of memory, in use or free for the next use.
        file_bytes, peak_file_bytes: of files, now and at most.
    """

    def __init__(self, copies: Copies | None = None, budget: int | None = None, folder: Path | None = None) -> None:
        self.copies = copies or Copies()
        self.bytes = self.peak_bytes = self.taken_bytes = 0
        self.file_bytes = self.peak_file_bytes = 0
        self._budget, self._folder = budget, folder
        self._free: dict[int, list[Tensor]] = defaultdict(list)
        self._lock = threading.RLock()  # arrays may be freed wherever memory is asked for

    def take(self, size: int) -> Tensor | None:
        """Return a buffer of ``size`` bytes, uint8 (>= size,); None where the budget has no room left."""
        room = buffer_bytes(size)
        with self._lock:
            if self._free[room]:
                buffer = self._free[room].pop()
            elif self._has_room(room):
                buffer = self.copies.empty_on_host(room)
                self.taken_bytes += room
            else:
                return None
            self._use(room)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take ``buffer`` back, once no copy reads or writes it any more."""
        with self._lock:
            self._use(-buffer.numel())
            self._free[buffer.numel()].append(buffer)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype, *, locked: bool = True) -> Tensor:
        """Return a CPU tensor of any values. Its memory is given back with the last tensor that lies in it.

        Args:
            locked: may be page-locked, which takes all of its memory immediately.

        Raises:
            OSError: it does not fit in memory, and the disk has no room for it.
        """
        size = prod(shape) * dtype.itemsize
        buffer = self.take(max(1, size)) if locked and self.copies.pinned else None
        memory: mmap.mmap | np.ndarray[tuple[int, ...], np.dtype[np.uint8]]
        if buffer is None:
            memory = self._mapping(max(1, size))
        else:
            memory = buffer.numpy()
            weakref.finalize(memory, self.give, buffer).atexit = False
        with not_counted():
            return torch.frombuffer(memory, dtype=torch.uint8)[:size].view(dtype).reshape(shape)

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return what ``empty`` gives, of zeros."""
        array = self.empty(shape, dtype)
        return array.zero_() if self.copies.pinned else array  # a new mapping has zeros

    def _mapping(self, size: int) -> mmap.mmap:
        """Return memory that is freed with its last user; a file where the budget has no room."""
        with self._lock:
            in_memory = self._has_room(size)
            mapping = mmap.mmap(-1, size) if in_memory else self._in_file(size)
            self._map(size, in_memory)
        weakref.finalize(mapping, self._map, -size, in_memory).atexit = False
        return mapping

    def _map(self, size: int, in_memory: bool) -> None:
        with self._lock:
            if in_memory:
                self.taken_bytes += size
                self._use(size)
            else:
                self.file_bytes += size
                self.peak_file_bytes = max(self.peak_file_bytes, self.file_bytes)

    def _use(self, size: int) -> None:
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _has_room(self, size: int) -> bool:
        """Return whether the budget has ``size`` bytes left; free unused buffers for that, the largest first."""
        if self._budget is None:
            return True
        for room in sorted(self._free, reverse=True):
            while self._free[room] and self.taken_bytes + size > self._budget:
                self._free[room].pop()
                self.taken_bytes -= room
        return self.taken_bytes + size <= self._budget

    def _in_file(self, size: int) -> mmap.mmap:
        folder = self._folder or Path(tempfile.gettempdir())
        with tempfile.TemporaryFile(dir=folder, prefix="maps-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)  # or a full disk would end the process at a later write
            except OSError as fault:
                raise OSError(
                    fault.errno,
                    f"no place for a file of {bytes_text(size)}, beside {bytes_text(self._budget or 0)} of memory "
                    f"(--offload-host): {fault.strerror or os.strerror(fault.errno or 0)}",
                    str(folder),
                ) from fault
            return mmap.mmap(file.fileno(), size)
