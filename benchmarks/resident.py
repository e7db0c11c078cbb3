"""Memory of this process, as the kernel counts it (Linux, Documentation/filesystems/proc.rst)."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

from parallel.profile.cache import M_MMAP_MAX, M_TRIM_THRESHOLD

M_MMAP_THRESHOLD = -3
"""Of malloc.h; see mallopt(3)."""


def resident(key: str) -> int:
    """Return bytes of this process: "VmRSS" now, "VmHWM" at most since ``settle``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(f"{key}:")).split()[1])


def settle() -> None:
    """Give freed memory back, which the allocator would keep, and let the highest point start anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def keep_nothing_freed() -> None:
    """Let the C library give back what tensors give back: the opposite of ``keep_freed_memory``."""
    mallopt = ctypes.CDLL(None).mallopt
    for option, value in ((M_MMAP_MAX, 65536), (M_MMAP_THRESHOLD, 64 << 10), (M_TRIM_THRESHOLD, 128 << 10)):
        mallopt(option, value)
