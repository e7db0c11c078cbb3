"""The communicator over MPI, through mpi4py: any MPI with MPI_THREAD_MULTIPLE, tried with MPICH and Open MPI.

Tensors on a device go through pinned host memory unless this MPI says that it takes device memory;
MEGATILE_CUDA_AWARE_MPI=0 in the environment says that it does not. Sums always go through the host, as Open MPI's end
with a segmentation fault (open-mpi/ompi issue 9845). Copies to the host run while the device computes, and operations
are handed to MPI in order, each once its copy has ended.
"""

from __future__ import annotations

import atexit
import collections
import copy
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from parallel.comm.communicator import RECEIVE, SEND, CommunicationError, Communicator, Operation, Work
from parallel.comm.device_thread import on_current_device
from parallel.comm.objects import in_memory_order, pinned_like

try:
    from mpi4py import MPI as MPI
except (ImportError, RuntimeError) as fault:  # RuntimeError: mpi4py is there, no MPI library is
    raise CommunicationError(
        f"started by an MPI launcher, but MPI cannot be used from Python ({fault}): run `pip install '.[mpi]'`"
    ) from fault

SUMMED = {
    torch.uint8: MPI.UINT8_T,
    torch.int32: MPI.INT32_T,
    torch.int64: MPI.INT64_T,
    torch.float32: MPI.FLOAT,
    torch.float64: MPI.DOUBLE,
}
"""Types that MPI adds; the short floats are added as float32."""

PRINTED_S = 1.0
"""Between the last words of a rank and the end of all: launchers pass on what ranks print, but not after an abort."""
PAUSE_S = 0.0005
"""Between two looks at what is under way, while the rank computes."""


class MpiCommunicator(Communicator):
    """All ranks that the MPI launcher started.

    Args:
        timeout_s: how long an operation waits for the other ranks before it fails.
        started: ranks that the launcher says it has started; None: unknown.

    Raises:
        CommunicationError: this MPI may not be called from several threads, or knows of other ranks than the launcher.
    """

    def __init__(self, timeout_s: float, started: int | None = None) -> None:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise CommunicationError("this MPI was built without MPI_THREAD_MULTIPLE: `pip install mpich` has one")
        if started not in (None, MPI.COMM_WORLD.Get_size()):
            raise CommunicationError(
                f"{started} ranks were started, and MPI knows of {MPI.COMM_WORLD.Get_size()}: the launcher belongs to "
                f"another MPI than mpi4py's, {MPI.Get_library_version().splitlines()[0]}. Start with the mpirun beside "
                f"{sys.executable}, or under Slurm with srun --mpi=pmi2 for MPICH and --mpi=pmix for Open MPI"
            )
        self.timeout_s = timeout_s
        self.progress = MpiProgress()
        self._device_memory = _takes_device_memory()
        # Of the rank's GPU, which is the current one by now.
        self._leaving = torch.cuda.Stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        self._take(MPI.COMM_WORLD.Dup())

    def _take(self, comm: Any) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.world = comm.Get_size()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._begin(SEND, tensor, lambda p: self._comm.Isend(_bytes(p), peer, tag), peer, tag, written=False)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._begin(RECEIVE, tensor, lambda p: self._comm.Irecv(_bytes(p), peer, tag), peer, tag, read=False)

    def iall_reduce(self, tensor: Tensor) -> Work:
        return self._begin(
            "all_reduce of {} {}",
            tensor,
            lambda place: self._comm.Iallreduce(MPI.IN_PLACE, [_memory(place), SUMMED[place.dtype]]),
            summed=True,
        )

    def ireduce_scatter(self, rows: Tensor) -> Work:
        def call(place: Tensor) -> Any:
            return self._comm.Ireduce_scatter_block(MPI.IN_PLACE, [_memory(place), SUMMED[place.dtype]])

        flat = rows.detach().view(self.world, -1)
        work = self._begin("reduce_scatter of {} {}", rows, call, summed=True)
        arrived = work.arrive

        def arrive() -> None:
            if arrived:
                arrived()
            if self.rank:
                flat[self.rank].copy_(flat[0])  # where MPI puts the sum

        work.arrive = arrive
        return work

    def all_gather(self, tensor: Tensor) -> Tensor:
        table = tensor.detach().new_empty((self.world, *tensor.shape))
        table[self.rank] = tensor.detach()
        self._begin("all_gather into {} {}", table, lambda p: self._comm.Iallgather(MPI.IN_PLACE, _bytes(p))).wait()
        return table

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        text = "broadcast of {} {} from rank {}"
        self._begin(text, tensor, lambda place: self._comm.Ibcast(_bytes(place), source), source).wait()

    def barrier(self) -> None:
        self._begin("barrier", torch.empty(0), lambda _: self._comm.Ibarrier()).wait()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        # In the order given, which Split by keys would do in two steps.
        comm = self._comm.Create(self._comm.Get_group().Incl(list(ranks)))
        if comm == MPI.COMM_NULL:
            return None
        part = copy.copy(self)
        part._take(comm)
        return part

    def abort(self) -> None:
        """Ends all ranks and this process, once what they printed has had time to leave."""
        sys.stdout.flush()
        sys.stderr.flush()
        time.sleep(PRINTED_S)
        MPI.COMM_WORLD.Abort(1)

    def close(self) -> None:
        self.barrier()  # a rank that is still talking must not find the others gone

    def _begin(
        self,
        text: str,
        tensor: Tensor,
        call: Callable[[Tensor], Any],
        *values: int,
        read: bool = True,
        written: bool = True,
        summed: bool = False,
    ) -> MpiWork:
        """Begin ``call``, which is given ``tensor``, or what stands for it in host memory or a type that MPI sums."""
        operation = Operation(self.rank, self.world, text, (tensor.shape, tensor.dtype, *values))
        flat = in_memory_order(tensor.detach())
        if summed and flat.is_complex():
            flat = torch.view_as_real(flat)
        known = flat.float() if summed and flat.dtype not in SUMMED else flat
        place, ready = self._reachable(known, filled=read, direct=self._device_memory and not summed)
        arrive = None if place is flat or not written else lambda: flat.copy_(place, non_blocking=True)
        work = MpiWork(self.progress, self.timeout_s, lambda: call(place), (place, flat), operation, arrive, ready)
        self.progress.begin(work)
        return work

    def _reachable(self, tensor: Tensor, filled: bool, direct: bool) -> tuple[Tensor, Any]:
        """Return a place that MPI reaches for ``tensor``, and the event of the GPU after which it may, if any."""
        if not tensor.is_cuda:
            return tensor, None
        computing = torch.cuda.current_stream(tensor.device)
        if direct:
            return tensor, computing.record_event()  # MPI knows nothing of streams
        host = pinned_like(tensor)
        if not filled:
            return host, None
        assert self._leaving is not None
        self._leaving.wait_stream(computing)
        with torch.cuda.stream(self._leaving):
            host.copy_(tensor, non_blocking=True)
        tensor.record_stream(self._leaving)
        return host, self._leaving.record_event()


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
        # Before mpi4py's own farewell to MPI, which was registered earlier: no thread may call MPI after it.
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


@dataclass(eq=False)
class MpiWork:
    """An operation under way; holds its buffers. ``call`` hands it to MPI and returns MPI's request, once the event
    ``ready`` of the GPU has come; ``arrive`` is what is left to do with the data once it is here."""

    progress: MpiProgress
    timeout_s: float
    call: Callable[[], Any]
    tensors: Sequence[Tensor]
    operation: Operation
    arrive: Callable[[], object] | None
    ready: Any
    request: Any = None
    over: bool = False
    fault: Exception | None = None

    def begun(self) -> bool:
        """Hand it to MPI if its data are ready, and return whether they are. ``MpiProgress`` keeps the order."""
        try:
            if self.ready is not None and not self.ready.query():
                return False
            self.request = self.call()
        except Exception as fault:  # of MPI, or of the GPU: for whoever waits
            self.fault = fault
        return True

    def tested(self) -> bool | None:
        """Return whether MPI is done with it; None once it has failed."""
        self.progress.begin_ready()
        with self.progress.lock:
            if self.request is None:
                return None if self.fault else False
            if not self.over and self.fault is None:
                try:
                    self.over = self.request.Test()
                except MPI.Exception as fault:
                    self.fault = fault
            return None if self.fault else self.over

    def wait(self) -> None:
        end = time.monotonic() + self.timeout_s
        pause = 0.0
        while not self.tested():
            if isinstance(self.fault, MPI.Exception):
                raise self.operation.lost(str(self.fault)) from self.fault
            if self.fault is not None:
                raise self.fault
            if time.monotonic() > end:
                raise self.operation.lost(f"no answer for {self.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause + 1e-5, PAUSE_S)
        arrive, self.arrive = self.arrive, None
        if arrive:
            arrive()

    def done(self) -> bool:
        return self.arrive is None and self.tested() is True


def _memory(tensor: Tensor) -> Any:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _bytes(tensor: Tensor) -> Any:
    return [_memory(tensor), MPI.BYTE]


def _takes_device_memory() -> bool:
    """Ask Open MPI and its relatives; an MPI without this query is taken not to."""
    if os.environ.get("MEGATILE_CUDA_AWARE_MPI") == "0":
        return False
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:
        return False
