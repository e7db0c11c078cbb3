"""Work in processes that may die: a slide library that aborts, or the kernel that runs out of memory, costs one item.

Takes a picklable function and items; gives each item with its result or with ``ProcessDied``. The processes are started
as ``python -m pipelines.processes`` and not by multiprocessing's spawn, which would import the caller's ``__main__``
(torch and all, in a training run) into every one of them and fails where there is no such file.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

ORPHAN_CHECK_S = 0.5

Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass(frozen=True)
class ProcessDied:
    """What ended a process while it worked on an item: the signal's name or the exit code."""

    cause: str

    def __str__(self) -> str:
        hint = "; the kernel does so when memory runs out" if self.cause == "SIGKILL" else ""
        return f"the process working on it died ({self.cause}{hint})"


class _Worker(Generic[Item, Result]):
    """A process, and the item it works on."""

    def __init__(self, task: Callable[[Item], Result]) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "pipelines.processes", str(theirs.fileno()), str(os.getpid())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)},
            )
        self._send(task)
        self.item: Item

    def start(self, item: Item) -> None:
        self.item = item
        self._send(item)

    def _send(self, value: object) -> None:
        with contextlib.suppress(OSError):  # it is dead already: `finish` will find its end of the connection closed
            self.connection.send(value)

    def finish(self) -> Result | ProcessDied:
        """The result; blocks until it is there or the process is gone."""
        try:
            result: Result = self.connection.recv()
        except (EOFError, OSError):
            code = self._process.wait()
            return ProcessDied(signal.Signals(-code).name if code < 0 else f"exit code {code}")
        return result

    def stop(self) -> None:
        self.connection.close()
        self._process.kill()
        self._process.wait()


def each_in_process(
    task: Callable[[Item], Result], items: Sequence[Item], workers: int
) -> Iterator[tuple[Item, Result | ProcessDied]]:
    """``task`` of every item, in the order of completion; at most ``workers`` at once.

    Args:
        task: importable by its name, or a ``functools.partial`` of such; should return its errors rather than raise.
        items: picklable.
        workers: processes, at least 1.
    """
    waiting = iter(items)
    busy: dict[Connection[Any, Any], _Worker[Item, Result]] = {}
    try:
        for item in _take(waiting, workers):
            worker = _Worker(task)
            busy[worker.connection] = worker
            worker.start(item)
        while busy:
            for ready in wait(list(busy)):
                assert isinstance(ready, Connection)
                worker = busy.pop(ready)
                item, result = worker.item, worker.finish()
                following = _take(waiting, 1)
                if isinstance(result, ProcessDied) or not following:
                    worker.stop()
                if following:
                    worker = _Worker(task) if isinstance(result, ProcessDied) else worker
                    busy[worker.connection] = worker
                    worker.start(following[0])
                yield item, result
    finally:
        for worker in busy.values():
            worker.stop()


def _take(items: Iterator[Item], n: int) -> list[Item]:
    return [item for _, item in zip(range(n), items, strict=False)]


def _end_with_parent(parent: int) -> None:
    """A parent that was killed cannot end its workers: they would go on for minutes with gigabytes."""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    os._exit(1)


def _serve(descriptor: int, parent: int) -> None:
    """The life of a worker: a task, then item after item, until the other end of the connection is gone.

    ``parent`` is told, not asked for: it may have been killed before this process got here.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent ends this process
    threading.Thread(target=_end_with_parent, args=[parent], daemon=True).start()
    with Connection(descriptor) as connection:
        try:
            task = connection.recv()
            while True:
                connection.send(task(connection.recv()))
        except (EOFError, BrokenPipeError):
            return


if __name__ == "__main__":
    _serve(int(sys.argv[1]), int(sys.argv[2]))
