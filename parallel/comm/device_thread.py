"""Work handed to another thread, done on the GPU that is current where it is handed over."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

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


class Task(Future[Any]):
    """A call that another thread makes; a ``Work``."""

    def wait(self) -> None:
        """Return when the call has returned; raise what it raised."""
        self.result()


class OrderedTasks:
    """A thread that makes calls in the order in which they are added."""

    def __init__(self, name: str) -> None:
        self._tasks: queue.SimpleQueue[tuple[Task, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=on_current_device(self._run), name=name, daemon=True)
        self._thread.start()

    def add(self, call: Callable[[], object]) -> Task:
        """Append ``call``; its task also has the result."""
        task = Task()
        self._tasks.put((task, call))
        return task

    def close(self, wait: bool = True) -> None:
        """End the thread, once it has made all calls."""
        self._tasks.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (item := self._tasks.get()) is not None:
            task, call = item
            result, fault = None, None
            try:
                result = call()
            except Exception as raised:
                fault = raised
            del item, call  # and the tensors that it holds, before the task is done
            if fault is None:
                task.set_result(result)
            else:
                task.set_exception(fault)
            del task, result, fault
