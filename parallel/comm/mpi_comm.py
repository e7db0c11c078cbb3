"""The communicator over MPI, through mpi4py: any MPI with MPI_THREAD_MULTIPLE, tried with MPICH and Open MPI.

Takes the ranks that mpirun or srun started. MPI moves data only while somebody calls it, so a thread does that while
operations are under way and the rank computes. Tensors on a device go through pinned host memory unless this MPI says
that it takes device memory. This is the only module that imports mpi4py.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comm.averaged import AveragedModule
from parallel.comm.communicator import (
    CommunicationError,
    Communicator,
    Pipeline,
    PipelinePart,
    Shards,
    Work,
    cannot_pipeline,
    cannot_shard,
)
from parallel.comm.objects import in_memory_order

try:
    from mpi4py import MPI
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


class Progress:
    """Calls MPI from a thread of its own while operations are under way; one operation tested moves them all."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        """One thread at a time may test a request."""
        self._some = threading.Condition()
        self._works: list[MpiWork] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="MPI progress", daemon=True)
        self._thread.start()
        # Before mpi4py's own farewell to MPI, which was registered earlier: nobody may call MPI after it.
        atexit.register(self.stop)

    def watch(self, work: MpiWork) -> None:
        with self._some:
            self._works.append(work)
            self._some.notify()

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
        arrive: what is left to do with the data once it is here.
    """

    def __init__(
        self, owner: MpiCommunicator, request: Any, tensors: Sequence[Tensor], described: str, arrive: Any = None
    ) -> None:
        self._owner = owner
        self._request = request
        self._tensors = tensors
        self._described = described
        self._arrive: Callable[[], object] | None = arrive
        self._over = False
        self._fault: MPI.Exception | None = None

    def tested(self) -> bool | None:
        """Whether MPI is done with it; None once it has failed."""
        with self._owner.progress.lock:
            if not self._over and self._fault is None:
                try:
                    self._over = self._request.Test()
                except MPI.Exception as fault:
                    self._fault = fault
            return None if self._fault else self._over

    def wait(self) -> None:
        end = time.monotonic() + self._owner.timeout_s
        pause = 0.0
        while not self.tested():
            if self._fault is not None:
                raise _lost(self._described, str(self._fault)) from self._fault
            if time.monotonic() > end:
                raise _lost(self._described, f"no answer for {self._owner.timeout_s:g} s")
            time.sleep(pause)
            pause = min(pause + 1e-5, PAUSE_S)
        arrive, self._arrive = self._arrive, None
        if arrive:
            arrive()

    def done(self) -> bool:
        return self._arrive is None and self.tested() is True


class MpiCommunicator:
    """All ranks that the MPI launcher started.

    Args:
        timeout_s: how long an operation waits for the other ranks before it fails.
        started: ranks that the launcher says it has started; None when nobody knows.

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
        self.progress = Progress()
        self._device_memory = _takes_device_memory()
        machine = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = machine.Get_rank()
        machine.Free()
        self._take(MPI.COMM_WORLD.Dup())

    def _take(self, comm: Any) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.world = comm.Get_size()

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        flat = self._reachable(in_memory_order(tensor.detach()), filled=True)
        return self._begin(
            f"isend of {_form(tensor)} to rank {peer}, tag {tag}",
            lambda: self._comm.Isend([_memory(flat), MPI.BYTE], peer, tag),
            [flat],
        )

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        flat = in_memory_order(tensor.detach())
        place = self._reachable(flat, filled=False)
        return self._begin(
            f"irecv of {_form(tensor)} from rank {peer}, tag {tag}",
            lambda: self._comm.Irecv([_memory(place), MPI.BYTE], peer, tag),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place),
        )

    def iall_reduce(self, tensor: Tensor) -> Work:
        flat = in_memory_order(tensor.detach())
        place = self._reachable(flat if flat.dtype in SUMMED else flat.float(), filled=True)
        return self._begin(
            f"all_reduce of {_form(tensor)}",
            lambda: self._comm.Iallreduce(MPI.IN_PLACE, [_memory(place), SUMMED[place.dtype]]),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place),
        )

    def all_reduce(self, tensor: Tensor) -> None:
        self.iall_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        flat = in_memory_order(tensor.detach())
        place = self._reachable(flat, filled=True)
        self._begin(
            f"broadcast of {_form(tensor)} from rank {source}",
            lambda: self._comm.Ibcast([_memory(place), MPI.BYTE], source),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place),
        ).wait()

    def barrier(self) -> None:
        self._begin("barrier", self._comm.Ibarrier, []).wait()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        # In the order given, which Split by keys would do in two steps.
        chosen = self._comm.Get_group().Incl(list(ranks))
        comm = self._comm.Create(chosen)
        if comm == MPI.COMM_NULL:
            return None
        part = object.__new__(MpiCommunicator)
        part.timeout_s, part.progress, part.local_rank = self.timeout_s, self.progress, self.local_rank
        part._device_memory = self._device_memory
        part._take(comm)
        return part

    def replicate(self, module: nn.Module, bucket_bytes: int | None = None) -> nn.Module:
        return AveragedModule(module, self, bucket_bytes) if self.world > 1 else module

    def shard(self, module: nn.Module, units: Sequence[Sequence[nn.Module]], device: torch.device) -> Shards:
        raise cannot_shard("ranks that talk over MPI")

    def pipeline(self, schedule: str, part: PipelinePart, m: int, device: torch.device) -> Pipeline:
        raise cannot_pipeline("ranks that talk over MPI")

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
        operation: str,
        call: Callable[[], Any],
        tensors: Sequence[Tensor],
        arrive: Callable[[], object] | None = None,
    ) -> MpiWork:
        described = f"rank {self.rank} of {self.world}: {operation}"
        with _named(described):
            work = MpiWork(self, call(), tensors, described, arrive)
        self.progress.watch(work)
        return work

    def _reachable(self, tensor: Tensor, filled: bool) -> Tensor:
        """``tensor`` itself where MPI can read and write it, else a place in host memory for it."""
        if not tensor.is_cuda:
            return tensor
        if self._device_memory:
            torch.cuda.current_stream(tensor.device).synchronize()  # MPI knows nothing of streams
            return tensor
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor) if filled else host


@contextlib.contextmanager
def _named(described: str) -> Iterator[None]:
    try:
        yield
    except MPI.Exception as fault:
        raise _lost(described, str(fault)) from fault


def _lost(described: str, reason: str) -> CommunicationError:
    return CommunicationError(
        f"{described} failed: {reason}; another rank has ended or hangs: its own message says why"
    )


def _memory(tensor: Tensor) -> Any:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _takes_device_memory() -> bool:
    """What Open MPI's and its kin's own query says; an MPI without it is taken not to."""
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:
        return False
