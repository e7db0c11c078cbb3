"""Two ways of summing gradients over ranks on CPUs and GPUs: in the memory of the host, or on the GPUs.

After Choi 2019, Leveraging Heterogeneity and Data-Parallelism. Both take a dense flat tensor of every rank, at most
``part_bytes`` long, and leave the sum in it, with the same bits on every rank. Ranks of one machine meet in a
``SharedSegment``; they and the machines talk over groups of the communicator below, whose deadlines hold.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from parallel.comm.communicator import Communicator
from parallel.comm.kinds import RankKind, by_node
from parallel.comm.local import LocalCommunicator
from parallel.comm.shared_segment import SharedSegment


class Sums(Protocol):
    """A way of summing."""

    def add(self, flat: Tensor) -> None:
        """Sum ``flat`` (n,) over all ranks, in place; every rank calls it with as many numbers.

        Raises:
            CommunicationError: another rank is gone or did not answer in time.
        """
        ...

    def close(self) -> None: ...


class HostSums:
    """In host memory: each rank of a machine adds its slice over all of them, in order of rank; those that own the same
    slice on their machines sum between these.

    The order of additions is fixed, and so are the bits.

    Args:
        inner: all ranks.
        kinds: of each.
        part_bytes: of the longest tensor.
        pinned: this rank computes on a GPU.
    """

    def __init__(self, inner: Communicator, kinds: Sequence[RankKind], part_bytes: int, pinned: bool) -> None:
        nodes = by_node(kinds)
        self._slices = min(map(len, nodes))  # as many on each machine, or those of one would have nobody to sum with
        self._ranks, self._node = _own(inner, nodes)
        self._at = self._ranks.index(inner.rank)
        owners = [[ranks[k] for ranks in nodes] for k in range(self._slices)]
        _, self._owners = _own(inner, owners)
        self._part_bytes = part_bytes
        self._segment = SharedSegment(self._node, (len(self._ranks) + 1) * part_bytes, pinned=pinned)

    def add(self, flat: Tensor) -> None:
        parts = [self._segment.part(k, self._part_bytes, flat) for k in range(len(self._ranks) + 1)]
        total = parts.pop()
        parts[self._at].copy_(flat)
        _await(flat)
        self._node.barrier()
        if self._at < self._slices:
            begin, end = (flat.numel() * k // self._slices for k in (self._at, self._at + 1))
            own = total[begin:end]
            own.copy_(parts[0][begin:end])
            for part in parts[1:]:
                own.add_(part[begin:end])
            if own.numel():
                self._owners.all_reduce(own)
        self._node.barrier()
        flat.copy_(total)
        _await(flat)

    def close(self) -> None:
        self._segment.close()


class DeviceSums:
    """On the GPUs: each rank on a CPU has a proxy, a rank on a GPU of its machine, which adds the CPU's numbers to its
    own; the GPU ranks sum among themselves; the proxy writes the sum back.

    NCCL takes no two ranks on one GPU, which is why a CPU rank cannot take part by itself.

    Args:
        inner: all ranks.
        kinds: of each.
        part_bytes: of the longest tensor.
        pinned: this rank computes on a GPU.

    Raises:
        ValueError: a machine has ranks on its CPU and none on a GPU.
    """

    def __init__(self, inner: Communicator, kinds: Sequence[RankKind], part_bytes: int, pinned: bool) -> None:
        crews = _crews(kinds)
        self._ranks, self._crew = _own(inner, crews)
        _, self._devices = _own(inner, [[crew[0] for crew in crews]])
        self._at = self._ranks.index(inner.rank)
        self._part_bytes = part_bytes
        self._segment = SharedSegment(self._crew, len(self._ranks) * part_bytes, pinned=pinned)

    def add(self, flat: Tensor) -> None:
        # Part 0 is the proxy's, and takes the sum: its own numbers stay where they are.
        parts = [self._segment.part(k, self._part_bytes, flat) for k in range(len(self._ranks))]
        if self._at:
            parts[self._at].copy_(flat)
            self._crew.barrier()
            self._crew.barrier()
            flat.copy_(parts[0])
            return
        alone = len(self._ranks) == 1
        if not alone:
            self._crew.barrier()
            for part in parts[1:]:
                flat.add_(part.to(flat.device, non_blocking=True))
        self._devices.all_reduce(flat)
        if not alone:
            parts[0].copy_(flat)
            _await(flat)
            self._crew.barrier()

    def close(self) -> None:
        self._segment.close()


def _crews(kinds: Sequence[RankKind]) -> list[list[int]]:
    """Each GPU rank, followed by the CPU ranks whose proxy it is: dealt out in order, machine by machine.

    >>> _crews([RankKind("a", "cuda", "0"), RankKind("a", "cuda", "1"), *[RankKind("a", "cpu")] * 3])
    [[0, 2, 4], [1, 3]]
    """
    crews = []
    for ranks in by_node(kinds):
        devices = [rank for rank in ranks if kinds[rank].kind != "cpu"]
        others = [rank for rank in ranks if kinds[rank].kind == "cpu"]
        if not devices:
            raise ValueError(
                f"gradients are summed on GPUs, and the machine of ranks {others} has no rank on one: give it a GPU "
                "rank, or sum on the host (--developer mixed-sums=host)"
            )
        crews += [[device, *others[k :: len(devices)]] for k, device in enumerate(devices)]
    return crews


def _own(inner: Communicator, teams: Iterable[Sequence[int]]) -> tuple[list[int], Communicator]:
    """The one of ``teams`` that this rank is in, and its communicator; this rank alone where it is in none."""
    found: tuple[list[int], Communicator] = [inner.rank], LocalCommunicator()
    for ranks in teams:
        if len(ranks) > 1:
            made = inner.subgroup(ranks)
            if made is not None:
                found = list(ranks), made
    return found


def _await(flat: Tensor) -> None:
    """Copies from and to a GPU are done."""
    if flat.is_cuda:
        torch.cuda.current_stream(flat.device).synchronize()
