"""A communicator of ranks on CPUs and GPUs, which sums gradients in one of two ways.

After Choi 2019, Leveraging Heterogeneity and Data-Parallelism. ``host``: the ranks of a machine add up in its memory,
each one slice of all their numbers, and those of the same slice sum between machines. ``device``: each rank on a CPU
has a proxy, a rank on a GPU of its machine, which adds the CPU's numbers to its own; the proxies sum over NCCL, which
takes no two ranks on one GPU.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from collections.abc import Collection, Iterable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from parallel.comm.communicator import CommunicationError, Communicator, Operation, Work, agree
from parallel.comm.device_thread import OrderedTasks, page_lock
from parallel.comm.kinds import RankKind, are_mixed, by_node
from parallel.comm.objects import broadcast_object, in_memory_order
from parallel.comm.thread_comm import LocalCommunicator

Way = Literal["host", "device"]

PART_BYTES = 32 << 20
"""Summed in one operation, which holds a bucket of gradients. Longer tensors are summed in parts, so that shared memory
does not grow with the model."""
HEADER = mmap.PAGESIZE
"""Bytes that identify a segment: in another container a process may have the number of the one that made it."""


class MixedCommunicator(Communicator):
    """All ranks of ``inner``.

    Args:
        inner: carries all but sums, and the sums between machines or GPUs; its deadlines hold.
        kinds: of each rank, the same on every rank.
        device: that this rank computes on.

    Raises:
        ValueError: with ``device``, a machine has ranks on its CPU and none on a GPU.
        CommunicationError: ranks of one machine do not share memory, or one is gone.
    """

    def __init__(
        self, inner: Communicator, kinds: Sequence[RankKind], way: Way, device: torch.device | None = None
    ) -> None:
        assert len(kinds) == inner.world
        self.rank, self.world = inner.rank, inner.world
        self.way = way
        self._inner = inner
        self._kinds = tuple(kinds)
        on_gpu = device is not None and device.type == "cuda"
        self._sums = SharedSums(inner, self._kinds, way, on_gpu)
        self._stream: Any = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._tasks = OrderedTasks("mixed sums")
        self._fault: Exception | None = None

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
        values = (tensor.shape, tensor.dtype, self.way)
        operation = Operation(self.rank, self.world, "all_reduce of {} {} by way of the {}", values)
        ready = torch.cuda.current_stream(flat.device).record_event() if flat.is_cuda else None
        return self._tasks.add(lambda: self._sum(flat, ready, operation))

    def all_gather(self, tensor: Tensor) -> Tensor:
        return self._inner.all_gather(tensor.cpu()).to(tensor.device)

    def broadcast(self, tensor: Tensor, source: int = 0) -> None:
        host = in_memory_order(tensor.detach()).cpu()  # what the ranks on a CPU have
        self._inner.broadcast(host, source)
        in_memory_order(tensor.detach()).copy_(host)

    def barrier(self) -> None:
        self._inner.barrier()

    def subgroup(self, ranks: Sequence[int]) -> Communicator | None:
        """Return the communicator of ``ranks``; a ValueError where some are on a CPU and others on a GPU."""
        if are_mixed([self._kinds[rank] for rank in ranks]):
            raise ValueError(
                f"ranks on CPUs and GPUs sum all together, and not as a group of ranks {list(ranks)}: --device mixed "
                "is for --parallel ddp"
            )
        return self._inner.subgroup(ranks)

    def abort(self) -> None:
        self._inner.abort()

    def close(self) -> None:
        self._tasks.close()
        self._sums.close()
        self._inner.close()

    def _sum(self, flat: Tensor, ready: Any, operation: Operation) -> None:
        if self._fault is not None:  # after a sum that failed the ranks no longer meet
            raise self._fault
        step = PART_BYTES // flat.element_size()
        try:
            with torch.cuda.stream(self._stream) if ready else contextlib.nullcontext():
                if ready:
                    self._stream.wait_event(ready)
                for begin in range(0, flat.numel(), step):
                    self._sums.add(flat[begin : begin + step])
                _await(flat)
        except CommunicationError as lost:
            self._fault = CommunicationError(f"{operation}: {lost}")
            raise self._fault from lost
        except Exception as fault:
            self._fault = fault
            raise


class SharedSums:
    """Sums of at most ``PART_BYTES`` over all ranks, with the same bits on every rank: numbers are added in the order
    of ranks, and the ranks of a crew meet in shared memory."""

    def __init__(self, inner: Communicator, kinds: Sequence[RankKind], way: Way, pinned: bool) -> None:
        crews = by_node(kinds) if way == "host" else crews_of(kinds)
        self._ranks, self._crew = _own(inner, crews)
        # As many slices on each machine, or those of one would have nobody to sum with.
        self._slices = min(map(len, crews)) if way == "host" else 1
        _, self._owners = _own(inner, [[crew[k] for crew in crews] for k in range(self._slices)])
        self._at, self._proxies = self._ranks.index(inner.rank), int(way == "device")
        # The sum, and the numbers of each rank of the crew; those of a proxy stay on its GPU.
        self._parts = 1 + len(self._ranks) - self._proxies
        self._segment = SharedSegment(self._crew, self._parts * PART_BYTES, pinned=pinned)

    def add(self, flat: Tensor) -> None:
        """Sum ``flat`` (n,) over all ranks, in place; every rank calls it with the same number of elements."""
        total, *parts = [self._segment.part(k, flat) for k in range(self._parts)]
        is_proxy = self._proxies > self._at
        if not is_proxy:
            parts[self._at - self._proxies].copy_(flat)
            _await(flat)
        self._crew.barrier()
        if self._at < self._slices:
            begin, end = (flat.numel() * k // self._slices for k in (self._at, self._at + 1))
            own = flat if is_proxy else total[begin:end].copy_(parts[0][begin:end])
            for part in parts if is_proxy else parts[1:]:
                own.add_(part[begin:end].to(own.device, non_blocking=True))
            if own.numel():
                self._owners.all_reduce(own)
            if is_proxy and parts:
                total.copy_(flat)
                _await(flat)
        self._crew.barrier()
        if not is_proxy:
            flat.copy_(total)
            _await(flat)

    def close(self) -> None:
        self._segment.close()


def crews_of(kinds: Sequence[RankKind]) -> list[list[int]]:
    """Return each GPU rank, followed by the CPU ranks whose proxy it is: dealt out in order, machine by machine.

    >>> crews_of([RankKind("a", "cuda", "0"), RankKind("a", "cuda", "1"), *[RankKind("a", "cpu")] * 3])
    [[0, 2, 4], [1, 3]]
    """
    crews = []
    for ranks in by_node(kinds):
        devices = [rank for rank in ranks if kinds[rank].kind != "cpu"]
        others = [rank for rank in ranks if kinds[rank].kind == "cpu"]
        if not devices:
            raise ValueError(
                f"gradients are summed on GPUs, and the machine of ranks {others} has no rank on one: give it a GPU "
                "rank, or sum on the host (--mixed-sums=host)"
            )
        crews += [[device, *others[k :: len(devices)]] for k, device in enumerate(devices)]
    return crews


def _own(inner: Communicator, teams: Iterable[Sequence[int]]) -> tuple[list[int], Communicator]:
    """Return the team that this rank is in, and its communicator; this rank alone where it is in none."""
    own: tuple[list[int], Communicator] = [inner.rank], LocalCommunicator()
    for ranks in teams:
        if len(ranks) > 1 and (group := inner.subgroup(ranks)) is not None:
            own = list(ranks), group
    return own


def _await(flat: Tensor) -> None:
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()


class SharedSegment:
    """``size`` bytes, zeros at first, that all ranks of ``communicator`` share; every one of them calls it. They lie in
    a file without a name, so that neither a full /dev/shm nor a rank that dies matters.

    Args:
        communicator: ranks of one machine.
        pinned: page-lock the memory in this process, where the system allows it, so that a GPU copies it directly.

    Raises:
        CommunicationError: the ranks do not share memory, or another one is gone.
    """

    def __init__(self, communicator: Communicator, size: int, *, pinned: bool = False) -> None:
        is_maker, token = communicator.rank == 0, secrets.token_hex()
        file = os.memfd_create("megatile-sums") if is_maker else -1
        if is_maker:
            os.ftruncate(file, HEADER + size)
            os.pwrite(file, token.encode(), 0)
        process, number, token = broadcast_object(communicator, (os.getpid(), file, token))
        memory, reason = None, f"process {process} is another one there"
        try:
            if not is_maker:
                file = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR)
            memory = mmap.mmap(file, HEADER + size)
        except (OSError, ValueError) as fault:
            reason = str(fault)
        known = memory is not None and memory[: len(token)] == token.encode()
        missed = agree(communicator, not known)  # after which the maker need not keep its file open
        if file >= 0:
            os.close(file)
        if missed or memory is None:
            raise CommunicationError(
                "ranks that say they are on one machine do not share its memory"
                + ("" if known else f" (rank {communicator.rank} of them: {reason})")
                + ": start all of a machine's ranks as one user and in one container"
            )
        self._bytes = torch.frombuffer(memory, dtype=torch.uint8)[HEADER:]
        self._unlock = page_lock(self._bytes) if pinned else None

    def part(self, number: int, like: Tensor) -> Tensor:
        """Return a tensor of the size and dtype of ``like`` at the beginning of part ``number``, of ``PART_BYTES``."""
        begin = number * PART_BYTES
        return self._bytes[begin : begin + like.nbytes].view(like.dtype)

    def close(self) -> None:
        """Unlock the memory, once no copy is under way."""
        if self._unlock is not None:
            self._unlock()
