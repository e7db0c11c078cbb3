"""A time limit for calls that hold Python's lock and may never come back, such as the start of MPI.

Takes a message and a limit; a process beside this one waits, and when the time is up it says the message and ends this
process, upon which whatever launched it ends the others. ``app/launch/watchdog`` does it once there are ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator

BESIDE = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, f"error: {sys.argv[3]}\\n".encode())
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""
"""Waits for its input to end, as it does when the call has come back, or this process has ended."""


@contextlib.contextmanager
def last_word(message: str, limit_s: float) -> Iterator[None]:
    """Within, this process has ``limit_s`` seconds to live."""
    command = [sys.executable, "-I", "-S", "-c", BESIDE, str(limit_s), str(os.getpid()), message]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as beside:
        assert beside.stdin is not None
        try:
            yield
        finally:
            beside.stdin.close()
