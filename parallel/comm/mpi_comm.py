"""The communicator over MPI, through mpi4py: any MPI with MPI_THREAD_MULTIPLE, tried with MPICH and Open MPI.

Takes the ranks that mpirun or srun started. Tensors on a device go through pinned host memory unless this MPI says that
it takes device memory; MEGATILE_CUDA_AWARE_MPI=0 in the environment says that it does not. Copies to the host run
beside what the device computes, and operations are handed to MPI in order, each once its copy has ended.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.comm.communicator import (
    CommunicationError,
    Communicator,
    Shards,
    Work,
    cannot_shard,
)
from parallel.comm.mpi_request import MPI, MpiProgress, MpiWork
from parallel.comm.objects import in_memory_order, pinned_like
from parallel.comm.replicate import AveragedModule

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
        self.progress = MpiProgress()
        self._device_memory = _takes_device_memory()
        # Of the rank's GPU, which is the current one by now.
        self._leaving = torch.cuda.Stream() if torch.cuda.is_initialized() else None  # type: ignore[no-untyped-call]
        machine = MPI.COMM_WORLD.Split_type(MPI.COMM_TYPE_SHARED)
        self.local_rank = machine.Get_rank()
        machine.Free()
        self._take(MPI.COMM_WORLD.Dup())

    def _take(self, comm: Any) -> None:
        self._comm = comm
        self.rank = comm.Get_rank()
        self.world = comm.Get_size()

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        """MPI connects ranks as they come to talk."""

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        place, ready = self._reachable(in_memory_order(tensor.detach()), filled=True)
        return self._begin(
            f"isend of {_form(tensor)} to rank {peer}, tag {tag}",
            lambda: self._comm.Isend([_memory(place), MPI.BYTE], peer, tag),
            [place],
            ready=ready,
        )

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        flat = in_memory_order(tensor.detach())
        place, ready = self._reachable(flat, filled=False)
        return self._begin(
            f"irecv of {_form(tensor)} from rank {peer}, tag {tag}",
            lambda: self._comm.Irecv([_memory(place), MPI.BYTE], peer, tag),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place, non_blocking=True),
            ready,
        )

    def iall_reduce(self, tensor: Tensor) -> Work:
        flat = in_memory_order(tensor.detach())
        if flat.is_complex():
            flat = torch.view_as_real(flat)
        place, ready = self._reachable(flat if flat.dtype in SUMMED else flat.float(), filled=True)
        return self._begin(
            f"all_reduce of {_form(tensor)}",
            lambda: self._comm.Iallreduce(MPI.IN_PLACE, [_memory(place), SUMMED[place.dtype]]),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place, non_blocking=True),
            ready,
        )

    def all_reduce(self, tensor: Tensor) -> None:
        self.iall_reduce(tensor).wait()

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        flat = in_memory_order(tensor.detach())
        place, ready = self._reachable(flat, filled=True)
        self._begin(
            f"broadcast of {_form(tensor)} from rank {source}",
            lambda: self._comm.Ibcast([_memory(place), MPI.BYTE], source),
            [place, flat],
            None if place is flat else lambda: flat.copy_(place, non_blocking=True),
            ready,
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
        part._device_memory, part._leaving = self._device_memory, self._leaving
        part._take(comm)
        return part

    def replicate(self, module: nn.Module, bucket_bytes: int | None = None) -> nn.Module:
        return AveragedModule(module, self, bucket_bytes) if self.world > 1 else module

    def shard(self, module: nn.Module, units: Sequence[Sequence[nn.Module]], device: torch.device) -> Shards:
        raise cannot_shard("ranks that talk over MPI")

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
        ready: Any = None,
    ) -> MpiWork:
        described = f"rank {self.rank} of {self.world}: {operation}"
        work = MpiWork(self.progress, self.timeout_s, call, tensors, described, arrive, ready)
        self.progress.begin(work)
        return work

    def _reachable(self, tensor: Tensor, filled: bool) -> tuple[Tensor, Any]:
        """``tensor`` itself where MPI can read and write it, else a place in host memory for it; and the event of the
        GPU after which MPI may, None where it may at once."""
        if not tensor.is_cuda:
            return tensor, None
        computing = torch.cuda.current_stream(tensor.device)
        if self._device_memory:
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


def _memory(tensor: Tensor) -> Any:
    return MPI.buffer.fromaddress(tensor.data_ptr(), tensor.numel() * tensor.element_size())


def _form(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"


def _takes_device_memory() -> bool:
    """What Open MPI's and its kin's own query says; an MPI without it is taken not to."""
    if os.environ.get("MEGATILE_CUDA_AWARE_MPI") == "0":
        return False
    try:
        return bool(ctypes.CDLL(None).MPIX_Query_cuda_support())
    except AttributeError:
        return False
