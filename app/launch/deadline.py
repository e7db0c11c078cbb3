"""A time limit for what may never return and holds Python's lock meanwhile, as the start of MPI does.

A process beside this one ends it when the time is up, upon which the launcher ends the other ranks. ``watchdog`` does
that once there are ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

TIMER = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, f"error: {sys.argv[3]}\\n".encode())
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""
"""Waits for the end of its input, which comes when the block is left or this process has ended."""


@contextlib.contextmanager
def kill_after(message: str, limit_s: float) -> Iterator[None]:
    """Give this process ``limit_s`` seconds to live within the block; past them, print ``message`` and kill it."""
    command = [sys.executable, "-I", "-S", "-c", TIMER, str(limit_s), str(os.getpid()), message]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as timer:
        assert timer.stdin is not None
        try:
            yield
        finally:
            timer.stdin.close()
