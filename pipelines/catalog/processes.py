"""Work in processes that may die: a slide library that aborts, or the kernel that runs out of memory, costs one item.

Takes a picklable function and items; gives each item with its result or ``WorkerCrashed``. The processes are started as
``python -m pipelines.catalog.processes``. The spawn of multiprocessing would import the caller's ``__main__`` (torch
and all, in a training run) into every one of them, and fails where there is no such file.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

ORPHAN_CHECK_S = 0.5

NO_MEMORY = 77
"""Exit code of a process whose task was refused memory."""

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Limits:
    """Most that one item may take: seconds from its start to its result, and private memory of its process."""

    seconds: float
    memory_bytes: int

    def __str__(self) -> str:
        return f"{self.seconds:g} s and {self.memory_bytes / (1 << 30):.3g} GiB of memory"


@dataclass(frozen=True)
class WorkerCrashed:
    """End of a process while it worked on an item: the signal's name or the exit code."""

    cause: str
    limits: Limits | None = None

    def __str__(self) -> str:
        hint = "; the kernel does so when memory runs out" if self.cause == "SIGKILL" else ""
        allowed = f"; it may take {self.limits}" if self.limits else ""
        return f"the process working on it died ({self.cause}{hint}){allowed}"


class WorkerTimeout(WorkerCrashed):
    """The process was ended because its time was over."""

    def __str__(self) -> str:
        return f"it was given up after {self.cause}, the time that one may take"


class _Worker(Generic[Item, Result]):
    """A process, and the item it works on."""

    def __init__(self, task: Callable[[Item], Result], limits: Limits | None) -> None:
        self._limits = limits
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pipelines.catalog.processes"),
                    *map(str, (theirs.fileno(), os.getpid(), limits.memory_bytes if limits else 0)),
                ],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                process_group=0,  # what is sent to the group is for the parent
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
        self._send(task)
        self.item: Item
        self.deadline_s = float("inf")

    def start(self, item: Item) -> None:
        self.item = item
        self._send(item)
        if self._limits:
            self.deadline_s = time.monotonic() + self._limits.seconds

    def _send(self, value: object) -> None:
        with contextlib.suppress(OSError):  # it is dead already: `finish` will find its end of the connection closed
            self.connection.send(value)

    def finish(self) -> Result | WorkerCrashed:
        """Return the result; blocks until it is there or the process is gone."""
        try:
            result: Result = self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            cause = signal.Signals(-code).name if code < 0 else f"exit code {code}"
            return WorkerCrashed("out of memory" if code == NO_MEMORY else cause, self._limits)
        return result

    def give_up(self) -> WorkerTimeout:
        """End the process, whose time is over."""
        assert self._limits, "without limits there is no deadline"
        self.stop()
        return WorkerTimeout(f"{self._limits.seconds:g} s", self._limits)

    def stop(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def map_isolated(
    task: Callable[[Item], Result], items: Sequence[Item], workers: int, limits: Limits | None = None
) -> Iterator[tuple[Item, Result | WorkerCrashed]]:
    """``task`` of every item, in the order of completion; at most ``workers`` at the same time.

    Args:
        task: importable by its name, or a ``functools.partial`` of such; should return its errors rather than raise.
        items: picklable.
        workers: processes, at least 1.
        limits: of every item; a process that exceeds them is ended, and another takes the next item.
    """
    waiting = iter(items)
    busy: dict[Connection[Any, Any], _Worker[Item, Result]] = {}
    try:
        for item in islice(waiting, workers):
            worker = _Worker(task, limits)
            busy[worker.connection] = worker
            worker.start(item)
        while busy:
            first_s = min(worker.deadline_s for worker in busy.values())
            wait_s = None if first_s == float("inf") else max(0.0, first_s - time.monotonic())
            ready = wait(list(busy), wait_s)
            late = [c for c, worker in busy.items() if c not in ready and worker.deadline_s <= time.monotonic()]
            for connection in (*ready, *late):
                assert isinstance(connection, Connection)
                worker = busy.pop(connection)
                item, result = worker.item, worker.finish() if connection in ready else worker.give_up()
                following = list(islice(waiting, 1))
                if isinstance(result, WorkerCrashed) or not following:
                    worker.stop()
                if following:
                    worker = _Worker(task, limits) if isinstance(result, WorkerCrashed) else worker
                    busy[worker.connection] = worker
                    worker.start(following[0])
                yield item, result
    finally:
        for worker in busy.values():
            worker.stop()


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot end its workers: they would go on for minutes with gigabytes."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


def _serve(descriptor: int, parent: int, memory_bytes: int) -> None:
    """Run a task on item after item until the connection ends; ``memory_bytes``: limit of private memory, or 0."""
    if memory_bytes:
        # Not the address space: that counts files mapped into memory, and what allocators reserve without using it.
        allowed = resource.getrlimit(resource.RLIMIT_DATA)[1]
        limit = memory_bytes if allowed == resource.RLIM_INFINITY else min(memory_bytes, allowed)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, allowed))
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)  # it asks the run to end, which then ends this process
    threading.Thread(target=_end_with_parent, args=[parent], daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            task = connection.recv()
            while True:
                connection.send(task(connection.recv()))
        except (EOFError, BrokenPipeError):
            return
        except MemoryError:
            os._exit(NO_MEMORY)


if __name__ == "__main__":
    _serve(*map(int, sys.argv[1:]))
