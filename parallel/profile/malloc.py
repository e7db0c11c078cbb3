"""The C library's heap: whether memory that a tensor frees stays with the process.

By default glibc returns blocks of 32 MiB and more, and a long free end of the heap, to the kernel. The kernel zeroes
them page by page when they are allocated again: layers that only move bytes wait for it several times longer than for
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
