"""A communicator of ranks on CPUs and GPUs: as the one below it, but for sums, which go one of two ways.

Takes a communicator over which all ranks can send from host memory, and what each of them computes on. Sums are begun
from anywhere, and a thread carries them out in that order beside what the rank computes.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator, Work
from parallel.comm.device_thread import on_current_device
from parallel.comm.kinds import RankKind, are_mixed
from parallel.comm.mixed_sums import DeviceSums, HostSums, Sums
from parallel.comm.objects import in_memory_order

Way = Literal["host", "device"]
WAYS: dict[Way, type[HostSums] | type[DeviceSums]] = {"host": HostSums, "device": DeviceSums}

PART_BYTES = 32 << 20
"""Summed at once, which holds a bucket of gradients; longer tensors in several parts, so that shared memory does not
grow with the model."""


class MixedWork:
    """A sum under way; holds its tensor.

    Args:
        flat: (n,), dense.
        described: the rank and what it does, for errors.
    """

    def __init__(self, flat: Tensor, described: str) -> None:
        self.flat = flat
        self.described = described
        self.ready: Any = None
        if flat.is_cuda:
            self.ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self.ready.record(torch.cuda.current_stream(flat.device))
        self._over = threading.Event()
        self._fault: Exception | None = None

    def end(self, fault: Exception | None) -> None:
        """Called by the thread that sums."""
        self._fault = fault
        self._over.set()

    def wait(self) -> None:
        self._over.wait()
        if self._fault is not None:
            raise self._fault

    def done(self) -> bool:
        return self._over.is_set()


class MixedCommunicator(Communicator):
    """All ranks of ``inner``.

    Args:
        inner: what everything but sums goes over; its groups keep the deadlines of sums, too.
        kinds: of each rank, the same on every rank.
        way: host: the ranks of a machine add in its memory, then machines sum; device: ranks on a CPU hand their
            numbers to one on a GPU, and the GPUs sum.
        device: that this rank computes on.

    Raises:
        ValueError: this way is none for these ranks; says what to do instead.
        CommunicationError: ranks of one machine do not share memory, or one is gone.
    """

    def __init__(
        self, inner: Communicator, kinds: Sequence[RankKind], way: Way, device: torch.device | None = None
    ) -> None:
        assert len(kinds) == inner.world
        self.rank = inner.rank
        self.world = inner.world
        self.local_rank = inner.local_rank
        self.way = way
        self._inner = inner
        self._kinds = tuple(kinds)
        self._device = device or torch.device("cpu")
        self._part_bytes = PART_BYTES
        self._sums: Sums = WAYS[way](inner, kinds, PART_BYTES, self._device.type == "cuda")
        self._stream: torch.cuda.Stream | None = None
        if self._device.type == "cuda":
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._begun: queue.SimpleQueue[MixedWork | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def connect(self, pairs: Collection[tuple[int, int]]) -> None:
        self._inner.connect(pairs)

    def isend(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._inner.isend(tensor, peer, tag)

    def irecv(self, tensor: Tensor, peer: int, tag: int) -> Work:
        return self._inner.irecv(tensor, peer, tag)

    def iall_reduce(self, tensor: Tensor) -> Work:
        flat = in_memory_order(tensor.detach())
        if flat.is_complex():
            flat = torch.view_as_real(flat).flatten()
        form = f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        work = MixedWork(flat, f"rank {self.rank} of {self.world}: all_reduce of {form} by way of the {self.way}")
        if self._thread is None:
            self._thread = threading.Thread(target=on_current_device(self._run), name="mixed sums", daemon=True)
            self._thread.start()
        self._begun.put(work)
        return work

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._inner.all_gather(tensor.cpu()).to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        if not tensor.is_cuda:
            self._inner.broadcast(tensor, source)
            return
        flat = in_memory_order(tensor.detach())
        host = flat.cpu()  # what the ranks on a CPU have
        self._inner.broadcast(host, source)
        flat.copy_(host)

    def barrier(self) -> None:
        self._inner.barrier()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Of ranks of one kind.

        Raises:
            ValueError: some are on a CPU and others on a GPU.
        """
        if are_mixed([self._kinds[rank] for rank in ranks]):
            raise ValueError(
                f"ranks on CPUs and GPUs sum all together, and not as a group of ranks {list(ranks)}: --device mixed "
                "is for --parallel ddp"
            )
        return self._inner.subgroup(ranks)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        if self._thread is not None:
            self._begun.put(None)
            self._thread.join()
        self._sums.close()
        self._inner.close()

    def _run(self) -> None:
        fault: Exception | None = None
        while (work := self._begun.get()) is not None:
            if fault is None:
                try:
                    self._sum(work)
                except CommunicationError as lost:
                    fault = CommunicationError(f"{work.described}: {lost}")
                    fault.__cause__ = lost
                except Exception as other:  # whatever it is, it is for whoever waits
                    fault = other
            work.end(fault)  # after one that failed the ranks no longer meet
            del work

    def _sum(self, work: MixedWork) -> None:
        flat = work.flat
        step = self._part_bytes // flat.element_size()
        with contextlib.ExitStack() as held:
            if flat.is_cuda:
                assert self._stream is not None
                held.enter_context(torch.cuda.stream(self._stream))
                self._stream.wait_event(work.ready)
            for begin in range(0, flat.numel(), step):
                self._sums.add(flat[begin : begin + step])
            if flat.is_cuda:
                assert self._stream is not None
                self._stream.synchronize()
