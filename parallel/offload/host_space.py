"""Arrays of the host: in memory as far as a budget goes, and in files that nobody else sees beyond it.

Each array has a mapping of its own, which goes with the last tensor that lies in it. A file has no name from the moment
it is made, so that the kernel frees it however the process ends, and all its blocks are there before anything is
written: a disk that fills up would otherwise end the process at whatever line writes next.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
import weakref
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from parallel.offload.live_bytes import not_counted
from parallel.units import bytes_text


class HostSpace:
    """Makes arrays. Thread-safe.

    Args:
        memory_bytes: of all arrays in memory together; None: as many as are asked for.
        folder: where files are; None: where the system has temporary ones.

    Attributes:
        peak_memory_bytes, peak_file_bytes: the most that arrays took at a time, each.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None) -> None:
        self._memory_bytes, self._folder = memory_bytes, folder
        self._taken = {"memory": 0, "file": 0}
        self._lock = threading.RLock()  # arrays may be freed wherever memory is asked for
        self.peak_memory_bytes = self.peak_file_bytes = 0

    def zeros(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return a new tensor on the CPU, which no device is counted for.

        Raises:
            OSError: it does not fit in memory, and the disk has no place for it.
        """
        size = max(1, prod(shape) * dtype.itemsize)
        with self._lock:
            fits = self._memory_bytes is None or self._taken["memory"] + size <= self._memory_bytes
            kind = "memory" if fits else "file"
            mapping = mmap.mmap(-1, size) if fits else self._in_file(size)
            self._taken[kind] += size
            self.peak_memory_bytes = max(self.peak_memory_bytes, self._taken["memory"])
            self.peak_file_bytes = max(self.peak_file_bytes, self._taken["file"])
        weakref.finalize(mapping, self._free, kind, size).atexit = False
        with not_counted():
            numbers = torch.frombuffer(mapping, dtype=torch.uint8)[: prod(shape) * dtype.itemsize]
            return numbers.view(dtype).reshape(shape)

    def _in_file(self, size: int) -> mmap.mmap:
        folder = self._folder or Path(tempfile.gettempdir())
        with tempfile.TemporaryFile(dir=folder, prefix="maps-") as file:
            try:
                os.posix_fallocate(file.fileno(), 0, size)
            except OSError as fault:
                why = (
                    f"no place for a file of {bytes_text(size)}, beside {bytes_text(self._memory_bytes or 0)} of memory"
                )
                told = f"{why} (--developer offload-host): {fault.strerror or os.strerror(fault.errno or 0)}"
                raise OSError(fault.errno, told, str(folder)) from fault
            return mmap.mmap(file.fileno(), size)

    def _free(self, kind: str, size: int) -> None:
        with self._lock:
            self._taken[kind] -= size
