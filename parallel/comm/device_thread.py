"""Host side of a GPU: work handed to another thread, with the GPU current there, and page-locked memory.

torch's own page-locked memory is rounded up to powers of two and never given back; ``page_lock`` takes memory that the
caller has mapped.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

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


log = logging.getLogger(__name__)


def page_lock(memory: Tensor) -> Callable[[], object] | None:
    """Page-lock the bytes of ``memory`` for the current GPU, until ``memory`` is freed at the latest.

    Returns:
        A function that unlocks them once all work of the GPU is done. None where the system refuses: copies are slower.
    """
    address = memory.data_ptr()
    if not _succeeds("cudaHostRegister", address, memory.nbytes, 0):
        _warn()
        return None
    unlock = weakref.finalize(memory, _unlock, address, torch.cuda.current_device())
    unlock.atexit = False
    return unlock


def _unlock(address: int, device: int) -> None:
    with contextlib.suppress(RuntimeError):  # of a GPU that has failed
        torch.cuda.synchronize(device)
        _succeeds("cudaHostUnregister", address)


def _succeeds(function: str, *arguments: int) -> bool:
    """Call the CUDA runtime; leave no error behind."""
    if not int(getattr(torch.cuda.cudart(), function)(*arguments)):  # type: ignore[no-untyped-call]
        return True
    # The runtime keeps the error for whoever asks next, as torch does after each kernel: so let one fail here.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda").add_(1)
    return False


@functools.cache
def _warn() -> None:
    log.warning(
        "CUDA refuses to page-lock host memory: copies between host and GPU take longer. Allow more locked memory "
        "(ulimit -l), or move less to the host"
    )
