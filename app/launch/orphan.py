"""Ranks of ``--ranks`` whose launcher was killed: they stop as on SIGTERM, and leave nothing in the temporary folder.

A launcher that ends in order ends its ranks. One that is killed cannot: they would train on to their end, while the
user starts the run again.
"""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import psutil

from parallel.comm.launch import PRIVATE_STORE, STARTED_BY_US

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
