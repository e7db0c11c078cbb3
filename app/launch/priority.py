"""Work that takes only what others leave of the processor: threads and processes beside the computation.

Takes nothing; lowers the priority of who calls. Whoever computes with several threads waits for the slowest of them, so
a core that is taken away for a moment costs all of them that moment. Imports nothing but the standard library.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

NICENESS = 15
AUTOGROUP = Path("/proc/self/autogroup")


def let_others_first() -> None:
    """Lower the priority of the calling thread alone, for good."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def let_other_sessions_first() -> None:
    """Lower the priority of the calling process, in a session of its own: between sessions Linux divides the processor
    by what it has of each as a whole, and by the niceness of processes only within one (sched(7), autogroup)."""
    let_others_first()
    with contextlib.suppress(OSError):  # a kernel without it
        AUTOGROUP.write_text(str(NICENESS))
