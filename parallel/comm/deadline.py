"""Time limits for calls that may never come back: what joins ranks, and the start of MPI.

A call that lets go of Python's lock while it waits runs on a thread that is left behind; for one that does not, a
process beside this one says a message when the time is up and ends this process, upon which whatever launched it ends
the others. ``app/launch/watchdog`` does that once there are ranks.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

Result = TypeVar("Result")

BESIDE = """
import os, select, signal, sys
if not select.select([0], [], [], float(sys.argv[1]))[0]:
    os.write(2, f"error: {sys.argv[3]}\\n".encode())
    os.kill(int(sys.argv[2]), signal.SIGKILL)
"""
"""Waits for its input to end, as it does when the call has come back, or this process has ended."""


def call_with_timeout(call: Callable[[], Result], limit_s: float) -> Result:
    """Return what ``call()`` gives, or raise what it raises; for calls that let go of Python's lock while they wait.

    Raises:
        TimeoutError: it did not come back within ``limit_s``. It goes on, in a thread that dies with the process.
    """
    given: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as fault:  # whatever it is, it is for whoever waits
            raised.append(fault)

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not given:
        raise TimeoutError(f"no answer for {limit_s:.0f} s")
    return given[0]


@contextlib.contextmanager
def kill_after(message: str, limit_s: float) -> Iterator[None]:
    """Give this process ``limit_s`` seconds to live within the block; past them, say ``message`` and kill it."""
    command = [sys.executable, "-I", "-S", "-c", BESIDE, str(limit_s), str(os.getpid()), message]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as beside:
        assert beside.stdin is not None
        try:
            yield
        finally:
            beside.stdin.close()
