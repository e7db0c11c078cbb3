"""Who lets others first: one thread of a process, or a whole session."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from app.launch.priority import AUTOGROUP, NICENESS, let_others_first
from tests.app.conftest import ROOT


def test_a_thread_lets_others_first_and_they_stay_as_they_are() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    found = []

    def work() -> None:
        let_others_first()
        found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [NICENESS]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before


@pytest.mark.process
@pytest.mark.skipif(not AUTOGROUP.exists(), reason="this kernel divides the processor by processes alone")
def test_a_session_lets_others_first() -> None:
    told = "from app.launch.priority import *; let_other_sessions_first(); print(AUTOGROUP.read_text())"
    done = subprocess.run(
        [sys.executable, "-c", told], cwd=ROOT, start_new_session=True, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip().endswith(f"nice {NICENESS}"), done.stdout + done.stderr
