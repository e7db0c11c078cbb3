"""Seconds by the clock on the wall and of the processor: of a call, of a command, of ways that take turns."""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from benchmarks.results import ROOT


class Took(NamedTuple):
    """Seconds by the clock on the wall, and seconds that the process computed: other processes do not count there."""

    wall: float
    cpu: float


def clocked(call: Callable[..., object], *arguments: object) -> Took:
    """Return the seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call(*arguments)
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def run_app(*words: str, quiet: bool = True, env: Mapping[str, str] | None = None) -> Took:
    """Run ``python -m words`` as a user does; return its seconds, with those of all its processes.

    Args:
        env: variables of the command; None: those of this process.

    Raises:
        CalledProcessError: the command failed.
    """
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    out = subprocess.DEVNULL if quiet else None
    subprocess.run([sys.executable, "-m", *words], cwd=ROOT, env=env, check=True, stdout=out)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return Took(wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def in_turns(
    ways: Mapping[str, Callable[[], object]], rounds: int, before: Callable[[], object] = lambda: None
) -> dict[str, list[Took]]:
    """Return what each way took in each of ``rounds``, after one that is dropped; every other round goes backward.

    Args:
        before: called before each call of a way, such as a barrier.
    """
    names = list(ways)
    took: dict[str, list[Took]] = {name: [] for name in names}
    for number in range(1 + rounds):
        for name in names if number % 2 else names[::-1]:
            before()
            spent = clocked(ways[name])
            if number:
                took[name].append(spent)
    return took
