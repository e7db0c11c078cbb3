"""Broadcast values that the first rank has found.

Takes a value on the first rank; returns it on all. Ranks that look for themselves may find different things: a file
that one of them cannot read, or that a file server shows it late, would leave it with other slides, classes or weights
than the others, in silence. The bytes are read back without calling anything but the classes of this project and of
numpy.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch

from parallel.comm.communicator import CommunicationError, Communicator
from parallel.comm.objects import broadcast_object

ROOMS = ("app.", "pipelines.", "parallel.")
"""Packages whose classes may be sent."""
OTHERS = {
    *(("pathlib", "PosixPath"), ("pathlib._local", "PosixPath")),  # the second: Python 3.13
    *(("numpy", "dtype"), ("numpy", "ndarray")),
    *(("numpy._core.numeric", "_frombuffer"), ("numpy._core.multiarray", "scalar")),
    ("numpy._core.multiarray", "_reconstruct"),
}
PENDING_S = 1.0
"""The first rank tells the others this often that it is still at work: waiting for one message has a time limit."""

Value = TypeVar("Value")


def share(communicator: Communicator, find: Callable[[], Value]) -> Value:
    """Return the value of ``find`` on the first rank, however long it takes; the others do not call it.

    Raises:
        Exception: on the first rank, as ``find`` raised it; the others then wait until the first ends the run.
    """
    if communicator.world == 1:
        return find()
    if communicator.rank == 0:
        with _keep_others_waiting(communicator):
            found = find()
        broadcast_object(communicator, torch.frombuffer(bytearray(pickle.dumps(found, 5)), dtype=torch.uint8))
        return found
    while (data := broadcast_object(communicator, None)) is None:
        pass
    received: Value = _Unpickler(io.BytesIO(data.numpy().data)).load()
    return received


@contextlib.contextmanager
def _keep_others_waiting(communicator: Communicator) -> Iterator[None]:
    """Send the other ranks None every ``PENDING_S`` seconds inside this block, from a thread of its own."""
    found = threading.Event()

    def send() -> None:
        with contextlib.suppress(CommunicationError):  # whatever is sent next fails, too
            while not found.wait(PENDING_S):
                broadcast_object(communicator, None)

    thread = threading.Thread(target=send, name="share", daemon=True)
    thread.start()
    try:
        yield
    finally:
        found.set()
        thread.join()


def take(path: Path) -> Any:
    """Return what the process that started the ranks left in ``path``, and remove it; None where it is gone."""
    try:
        with path.open("rb") as file:
            found = _Unpickler(file).load()
    except FileNotFoundError:
        return None
    path.unlink()
    return found


class _Unpickler(pickle.Unpickler):
    """Reads only what ``share`` and a start of ranks send."""

    def find_class(self, module: str, name: str) -> Any:
        if module.startswith(ROOMS) or (module, name) in OTHERS:
            found = super().find_class(module, name)
            if isinstance(found, type) or (module, name) in OTHERS:
                return found
        raise pickle.UnpicklingError(f"{module}.{name} is not among what ranks send each other")
