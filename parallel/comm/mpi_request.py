"""An operation of MPI under way, and the thread that moves it along while the rank computes.

Takes requests that MPI gave; gives works to wait for. MPI moves data only while somebody calls it, so a thread does
that while operations are under way. This module and ``mpi_comm`` are the only ones that know mpi4py.
"""

from __future__ import annotations

import atexit
import collections
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from parallel.comm.communicator import CommunicationError
from parallel.comm.device_thread import on_current_device

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as fault:  # RuntimeError: mpi4py is there, no MPI library is
    raise CommunicationError(
        f"started by an MPI launcher, but MPI cannot be used from Python ({fault}): run `pip install '.[mpi]'`"
    ) from fault

PAUSE_S = 0.0005
"""Between two looks at what is under way, while the rank computes."""


class MpiProgress:
    """Calls MPI from a thread of its own while operations are under way; one operation tested moves them all."""

    def __init__(self) -> None:
        self._order = threading.Lock()
        self._waiting: collections.deque[MpiWork] = collections.deque()
        """Not handed to MPI yet, in order."""
        self.lock = threading.Lock()
        """One thread at a time may test a request."""
        self._some = threading.Condition()
        self._works: list[MpiWork] = []
        self._stopped = False
        self._thread = threading.Thread(target=on_current_device(self._run), name="MPI progress", daemon=True)
        self._thread.start()
        # Before mpi4py's own farewell to MPI, which was registered earlier: nobody may call MPI after it.
        atexit.register(self.stop)

    def begin(self, work: MpiWork) -> None:
        """Hand ``work`` to MPI once its data, and those of all that came before it, are ready: in most cases now."""
        with self._order:
            self._waiting.append(work)
        self.begin_ready()
        with self._some:
            self._works.append(work)
            self._some.notify()

    def begin_ready(self) -> None:
        """Hand to MPI, in order, what is ready."""
        with self._order:
            while self._waiting and self._waiting[0].begun():
                self._waiting.popleft()

    def stop(self) -> None:
        with self._some:
            self._stopped = True
            self._some.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._some:
                self._some.wait_for(lambda: self._works or self._stopped)
                if self._stopped:
                    return
                works = list(self._works)
            # A failure is the business of whoever waits for the operation.
            over = {id(work) for work in works[:1] if work.tested() is not False}
            if len(works) > 1 and over:
                over |= {id(work) for work in works[1:] if work.tested() is not False}
            with self._some:
                self._works = [work for work in self._works if id(work) not in over]
            time.sleep(PAUSE_S)


class MpiWork:
    """An operation under way; holds its buffers.

    Args:
        timeout_s: how long ``wait`` waits for the other ranks.
        call: hands it to MPI, and gives MPI's request.
        described: rank and operation, for errors.
        arrive: what is left to do with the data once it is here.
        ready: event of the GPU after which MPI may read and write the buffers; None: it may at once.
    """

    def __init__(
        self,
        progress: MpiProgress,
        timeout_s: float,
        call: Callable[[], Any],
        tensors: Sequence[Tensor],
        described: str,
        arrive: Callable[[], object] | None = None,
        ready: Any = None,
    ) -> None:
        self._progress = progress
        self._timeout_s = timeout_s
        self._call = call
        self._ready = ready
        self._request: Any = None
        self._tensors = tensors
        self._described = described
        self._arrive = arrive
        self._over = False
        self._fault: Exception | None = None

    def begun(self) -> bool:
        """Hand it to MPI if its data are ready, and return whether they are. ``MpiProgress`` keeps the order."""
        try:
            if self._ready is not None and not self._ready.query():
                return False
            self._request = self._call()
        except Exception as fault:  # of MPI, or of the GPU: for whoever waits
            self._fault = fault
        return True

    def tested(self) -> bool | None:
        """Whether MPI is done with it; None once it has failed."""
        self._progress.begin_ready()
        with self._progress.lock:
            if self._request is None:
                return None if self._fault else False
            if not self._over and self._fault is None:
                try:
                    self._over = self._request.Test()
                except MPI.Exception as fault:
                    self._fault = fault
            return None if self._fault else self._over

    def wait(self) -> None:
        end = time.monotonic() + self._timeout_s
        pause = 0.0
        while not self.tested():
            if isinstance(self._fault, MPI.Exception):
                raise lost(self._described, str(self._fault)) from self._fault
            if self._fault is not None:
                raise self._fault
            if time.monotonic() > end:
                raise lost(self._described, f"no answer for {self._timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause + 1e-5, PAUSE_S)
        arrive, self._arrive = self._arrive, None
        if arrive:
            arrive()

    def done(self) -> bool:
        return self._arrive is None and self.tested() is True


def lost(described: str, reason: str) -> CommunicationError:
    """The error of an operation that the other ranks left."""
    return CommunicationError(
        f"{described} failed: {reason}; another rank has ended or hangs: its own message says why"
    )
