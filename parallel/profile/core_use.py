"""The share of this process's cores that other programs take: what is timed meanwhile takes too long.

Processes that this one has started and waited for are its own. Works where Linux says what each core has done; what a
virtual machine's host took counts as others' too.
"""

from __future__ import annotations

import os
import time

import psutil

BUSY = 0.1
"""Share of the cores' time; an idle desktop stays below."""
LOOK_S = 0.5


class CoreUse:
    """The work on the cores since this was made."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._begin = self._read()

    def others(self) -> float:
        """Return the share of the cores' time that others have taken so far, 0 to 1."""
        passed_s, busy_s, own_s = (now - then for now, then in zip(self._read(), self._begin, strict=True))
        return min(1.0, max(0.0, (busy_s - own_s) / (passed_s * len(self._cores))))

    def _read(self) -> tuple[float, float, float]:
        """Return seconds: of the clock, of work on the cores, of this process and what it has waited for."""
        machine = psutil.cpu_times(percpu=True)
        cores = [machine[core] for core in self._cores if core < len(machine)]
        busy_s = sum(core.user + core.nice + core.system + core.irq + core.softirq + core.steal for core in cores)
        own = os.times()
        return time.monotonic(), busy_s, own.user + own.system + own.children_user + own.children_system


def others_now() -> float:
    """Return the share that others take at present; takes half a second."""
    use = CoreUse()
    time.sleep(LOOK_S)
    return use.others()
