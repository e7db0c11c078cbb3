"""Work handed to another thread, done on the GPU that is current where it is handed over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


def on_current_device(call: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Return ``call`` for another thread, with the GPU of this thread as its current one.

    A thread begins on GPU 0: on any other rank, a CUDA call there would open a context on a GPU that is not the rank's.
    """
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return call
    device = torch.cuda.current_device()

    def call_on_device(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        torch.cuda.set_device(device)
        return call(*args, **kwargs)

    return call_on_device


class Task:
    """A call that another thread makes; a ``Work``."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call: Callable[[], object] | None = call
        self._over = threading.Event()
        self._fault: Exception | None = None

    def run(self) -> None:
        """Called by the other thread."""
        assert self._call is not None
        try:
            self._call()
        except Exception as fault:
            self._fault = fault
        self._call = None  # and with it the tensors that it holds
        self._over.set()

    def done(self) -> bool:
        return self._over.is_set()

    def wait(self) -> None:
        """Return when the call has returned.

        Raises:
            Exception: what the call raised.
        """
        self._over.wait()
        if self._fault is not None:
            raise self._fault


class OrderedTasks:
    """A thread that makes calls in the order in which they are added."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=on_current_device(self._run), name=name, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> Task:
        """Have the thread make ``call``."""
        task = Task(call)
        self._tasks.put(task)
        return task

    def close(self) -> None:
        """End the thread, once it has made all calls."""
        self._tasks.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task.run()
            del task  # or its tensors would live until the next one comes
