"""What the quick lane may not do: start processes of its own, or take long. A test that does either says so by a mark.

Every start of a process raises an event of Python's, whoever asks for it; ``multiprocessing`` has ways around them and
is watched itself. The helpers that commands start beside themselves, which load no torch, are no reason for a mark.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

NEEDS = {
    "process": "starts Python processes or ranks, or forks",
    "slurm": "starts a Slurm on this machine",
    "browser": "starts Chromium",
    "bench": "runs a benchmark, or parts of it",
    "readme": "runs what the README tells its readers to type",
    "long": "needs nothing but more than LIMIT_S seconds",
}
"""Mark -> why the quick lane leaves the test out."""

MARKS = ", ".join(NEEDS)

LIMIT_S = 5.0
"""Processor time of an unmarked test's call, in its process and in the helpers that it has waited for."""

WAITING = 4.0
"""Times the limit: what the call may last by the clock, which tells who sleeps, while nobody else is busy."""

BUSY = 3.0
"""Times the limit of processor time while others keep the machine busy: what shares a core takes longer on it, too."""

SLOWER = 2.0
"""Times all limits anywhere: a machine half as fast as the one that marks were set on runs the lane, too."""

PATIENCE = 4.0
"""Times all limits where the machine is known to be slow or busy, or the lane to be the whole one."""

HELPERS = (
    ("-m", "pipelines.catalog.processes"),
    ("-c", "import openslide; print(openslide.__library_version__)"),
    ("-c", "from mpi4py import MPI; print(MPI.Get_library_version())"),
)
"""First words to Python of the processes that any command starts beside itself."""

PROGRAMS = ("git", "make", "nvidia-smi")
EVENTS = ("os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen")


class Watch:
    """Fails what an unmarked test does as a marked one may."""

    def __init__(self, patience: float) -> None:
        self._limit_s = patience * LIMIT_S
        self._unmarked = False
        self._started: list[str] = []

    def install(self) -> None:
        """For the rest of this process: Python forgets no audit hook."""
        sys.addaudithook(self._audit)
        start: Callable[[BaseProcess], None] = BaseProcess.start

        def watched(process: BaseProcess) -> None:
            self._refuse("multiprocessing")
            start(process)

        BaseProcess.start = watched  # type: ignore[method-assign]

    def begin(self, item: pytest.Item) -> None:
        self._unmarked = not marks_of(item)
        self._started.clear()

    def end(self) -> None:
        """What follows ends fixtures, which many tests may have shared."""
        self._unmarked = False

    def call(self) -> Generator[None, object, object]:
        """Around the test's own call. What it may not do is told where it does it, and here where that was caught."""
        spent_s, begun_s = processor_s(), time.monotonic()
        result = yield
        if not self._unmarked:
            return result
        if self._started:
            pytest.fail(f"starts a process ({self._started[0]}) and has none of the marks {MARKS}", pytrace=False)
        spent_s, lasted_s = processor_s() - spent_s, time.monotonic() - begun_s
        calm = is_calm()
        limit_s = self._limit_s if calm else BUSY * self._limit_s
        if spent_s > limit_s or (lasted_s > WAITING * limit_s and calm):
            pytest.fail(
                f"took {spent_s:.1f} s of processor time in {lasted_s:.1f} s; a test without a mark may take "
                f"{limit_s:g} and {WAITING * limit_s:g}: make it cheaper, or mark it `long`",
                pytrace=False,
            )
        return result

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._unmarked or event not in EVENTS:
            return
        command = arguments[1] if event in ("subprocess.Popen", "os.posix_spawn") else ()
        if not is_helper([os.fsdecode(word) for word in ([command] if isinstance(command, str | bytes) else command)]):
            self._refuse(f"{event} {command}".strip())

    def _refuse(self, what: str) -> None:
        if self._unmarked:
            self._started.append(what)
            pytest.fail(f"this test starts a process ({what}): mark it with what it needs, of {MARKS}")


def marks_of(item: pytest.Item) -> list[str]:
    """Why the quick lane leaves ``item`` out; nothing if it does not."""
    return [name for name in NEEDS if item.get_closest_marker(name)]


def long_where(values: Iterable[Any], *long: Any) -> list[Any]:
    """Return ``values`` to parametrize a test with, tuples for several names; those that are ``long`` are marked so."""
    rows = [(value, value if isinstance(value, tuple) else (value,)) for value in values]
    return [pytest.param(*row, marks=pytest.mark.long) if value in long else value for value, row in rows]


def is_helper(command: Sequence[str]) -> bool:
    """Whether ``command`` is one of those that any test may start."""
    return tuple(command[1:3]) in HELPERS or (len(command) > 0 and Path(command[0]).name in PROGRAMS)


def is_calm() -> bool:
    """Whether the cores have not much more to do than two workers give them."""
    return os.getloadavg()[0] <= 1.5 * max(2, os.cpu_count() or 1)


def processor_s() -> float:
    """Seconds that this process and the children it has waited for have computed."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
