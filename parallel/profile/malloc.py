"""The C library's heap: whether memory that a tensor gives back stays with the process.

By default glibc hands blocks of 32 MiB and more, and a long free end of the heap, back to the kernel, which gives them
out again page by page and zeroed. Layers that only move bytes then wait for the kernel several times longer than for
memory. See mallopt(3).
"""

from __future__ import annotations

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4
"""Of malloc.h."""


def keep_freed_memory() -> bool:
    """Let this process keep what it frees for its next allocations; return whether the C library can (glibc)."""
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(M_MMAP_MAX, 0)) and bool(mallopt(M_TRIM_THRESHOLD, -1))
