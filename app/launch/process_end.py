"""How a process ends that cannot end by itself: one that hangs while it holds Python's lock, or lost its launcher."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

from parallel.comm.launch import PRIVATE_STORE, STARTED_BY_US

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


CHECK_S = 0.5
SAVE_S = 60.0
"""Time for the step under way and a checkpoint; then the rank is killed."""


def stop_with_launcher() -> None:
    """Watch, on a thread, the process that forked this rank, which ends with the launcher; does nothing in a process
    that ``--ranks`` did not start."""
    server = int(os.environ.get(STARTED_BY_US, 0))
    is_child = os.getppid() == server
    if server and (is_child or not psutil.pid_exists(server)):
        threading.Thread(target=_stop_after, args=[server], name="launcher watch", daemon=True).start()


def _stop_after(parent: int) -> None:
    """Stop this process once its parent is not ``parent`` any more."""
    while os.getppid() == parent:
        time.sleep(CHECK_S)
    shutil.rmtree(Path(os.environ[PRIVATE_STORE]).parent, ignore_errors=True)
    os.write(2, b"warning: the process that started the ranks is gone: finishing the step, saving, then ending\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)
