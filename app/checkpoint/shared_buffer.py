"""Host memory that another process can read by a file descriptor: an unnamed file in memory.

Takes a size; gives tensors that lie in it, kept and reused. It is in no folder and gone with the last process that has
it, however that process ends. Page-locked where a GPU copies into it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Callable

import torch
from torch import Tensor

from parallel.comm.page_lock import page_lock

ALIGNMENT = 64
"""Bytes, as torch aligns its own storages."""


class SharedBuffer:
    """A buffer that grows when asked for more, and never shrinks.

    Args:
        pinned: page-lock it, where the system allows that.

    Raises:
        OSError: the system has no such memory.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self.descriptor = os.memfd_create("checkpoint")
        self._pinned = pinned
        self._all: Tensor | None = None
        self._unlock: Callable[[], object] | None = None

    @property
    def size(self) -> int:
        """Return the bytes that have been reserved."""
        return 0 if self._all is None else self._all.numel()

    @property
    def addresses(self) -> range:
        """Return the addresses in this process."""
        start = 0 if self._all is None else self._all.data_ptr()
        return range(start, start + self.size)

    def reserve(self, size: int) -> None:
        """Have room for ``size`` bytes. What was in it may be lost, and tensors from before lie elsewhere.

        Raises:
            OSError: there is no such room, or no file may be as large.
        """
        if size <= self.size:
            return
        self._release()
        os.ftruncate(self.descriptor, size)
        self._all = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        if self._pinned:
            self._unlock = page_lock(self._all)
            self._pinned = self._unlock is not None

    def part(self, offset: int, size: int) -> Tensor:
        """Return uint8 (size,), at ``offset`` of what has been reserved; a storage of its own."""
        assert self._all is not None
        assert 0 <= offset < offset + size <= self.size, (offset, size, self.size)
        return torch.frombuffer(self._all.numpy()[offset : offset + size], dtype=torch.uint8)

    def write_behind(self, data: bytes | bytearray) -> int:
        """Put ``data`` behind what has been reserved, in place of what was there; return its offset.

        Raises:
            OSError: as of ``reserve``.
        """
        written = 0
        while written < len(data):
            written += os.pwrite(self.descriptor, memoryview(data)[written:], self.size + written)
        return self.size

    def close(self) -> None:
        """Let go of it. Tensors that lie in it stay valid."""
        self._release()
        with contextlib.suppress(OSError):
            os.close(self.descriptor)

    def _release(self) -> None:
        if self._unlock is not None:
            self._unlock()
        self._all = self._unlock = None
