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

from app.settings.launcher import STARTED_BY_US
from parallel.comm.torch_rendezvous import PRIVATE_STORE

CHECK_S = 0.5
SAVE_S = 60.0
"""Time for the step under way and a checkpoint; then the rank is killed."""


def stop_with_launcher() -> None:
    """Watch, on a thread, the process that started this rank; does nothing in a process that ``--ranks`` did not
    start."""
    launcher = int(os.environ.get(STARTED_BY_US, 0))
    is_child = os.getppid() == launcher
    if launcher and (is_child or not psutil.pid_exists(launcher)):
        threading.Thread(target=_stop_after, args=[launcher], name="launcher watch", daemon=True).start()


def _stop_after(launcher: int) -> None:
    """Stop this process once its parent is not ``launcher`` any more."""
    while os.getppid() == launcher:
        time.sleep(CHECK_S)
    shutil.rmtree(Path(os.environ[PRIVATE_STORE]).parent, ignore_errors=True)
    os.write(2, b"warning: the process that started the ranks is gone: finishing the step, saving, then ending\n")
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SAVE_S)
    os.kill(os.getpid(), signal.SIGKILL)
