"""Memory of simulated GPUs and page-locked memory of the host: which storage belongs to what.

A tensor on a simulated GPU is an ordinary CPU tensor over a *shell*, a storage that nobody computes on; the numbers are
in a second storage, the *truth*, which kernels use when they run. So the project can free a tensor, whose shell ends,
while kernels that were launched earlier still use its truth. A shell holds NaNs: whatever reads a device's memory
without a copy reads them.
"""

from __future__ import annotations

import collections
import ctypes
import itertools
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

POISON = 0xFF
"""Every byte of memory without a value: NaN in all floating types, -1 in integers."""


@dataclass
class Memory:
    """One allocation.

    Attributes:
        device: of the GPU; None of page-locked memory.
        owner: the process that allocated it.
        stream: on which it was allocated.
        recorded: streams that ``record_stream`` named.
        truth: what holds the numbers.
    """

    number: int
    device: int | None
    owner: Any
    stream: Any
    truth: torch.UntypedStorage
    recorded: set[Any] = field(default_factory=set)


class Memories:
    """All of them.

    Attributes:
        freed: what has ended and is not yet given out again.
        used: bytes now, by device; ``peak`` of that.
        limit: bytes of a device.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used: collections.Counter[int] = collections.Counter()
        self.peak: collections.Counter[int] = collections.Counter()
        self.freed: collections.deque[Memory] = collections.deque()
        self._shells: dict[int, Memory] = {}
        self._truths: dict[int, tuple[weakref.ref[Any], Memory]] = {}
        self._registered: dict[int, tuple[int, Memory]] = {}
        self._numbers = itertools.count(1)

    def of(self, tensor: Tensor) -> Memory | None:
        """Return the memory of a tensor; None on the host, where it is not page-locked."""
        if tensor.layout is not torch.strided:
            return None
        memory = self._shells.get(_storage(tensor)._cdata)
        if memory is not None or not self._registered or tensor.is_meta or isinstance(tensor, FakeTensor):
            return memory
        return self._within(tensor.data_ptr())

    def register(self, address: int, bytes_: int, owner: Any) -> None:
        """Page-lock memory of the host."""
        storage = torch.UntypedStorage(0)
        self._registered[address] = bytes_, Memory(next(self._numbers), None, owner, None, storage)

    def unregister(self, address: int) -> bool:
        """Undo it; return whether it was locked."""
        return self._registered.pop(address, None) is not None

    @property
    def locked(self) -> dict[int, int]:
        """Bytes that are registered, by address."""
        return {address: size for address, (size, _) in self._registered.items()}

    def _within(self, address: int) -> Memory | None:
        for start, (size, memory) in self._registered.items():
            if start <= address < start + size:
                return memory
        return None

    def pin(self, tensor: Tensor, owner: Any) -> Tensor:
        """Let the host memory of ``tensor`` be page-locked."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._shells:
            self._add(storage, Memory(next(self._numbers), None, owner, None, storage))
        return tensor

    def allocate(
        self, bytes_: int, device: int, owner: Any, stream: Any, truth: torch.UntypedStorage | None
    ) -> torch.UntypedStorage:
        """Return a new shell over ``truth``, or over new memory.

        Raises:
            OutOfMemoryError: as torch's.
        """
        if self.used[device] + bytes_ > self.limit:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory. Tried to allocate {bytes_} bytes on GPU {device} of {self.limit}"
            )
        if truth is None:
            truth = torch.UntypedStorage(bytes_)
            poison(truth)
        shell = torch.UntypedStorage(bytes_)
        poison(shell)
        memory = Memory(next(self._numbers), device, owner, stream, truth)
        self.used[device] += bytes_
        self.peak[device] = max(self.peak[device], self.used[device])
        self._add(shell, memory)
        self._truths[truth._cdata] = weakref.ref(shell), memory
        return shell

    def shell_of(self, truth: torch.UntypedStorage) -> torch.UntypedStorage | None:
        """Return the shell over ``truth``, where it lives."""
        known = self._truths.get(truth._cdata)
        return known[0]() if known else None

    def _add(self, storage: torch.UntypedStorage, memory: Memory) -> None:
        self._shells[storage._cdata] = memory
        weakref.finalize(storage, self._end, storage._cdata, storage.nbytes(), memory).atexit = False

    def _end(self, shell: int, bytes_: int, memory: Memory) -> None:
        del self._shells[shell]
        if memory.device is not None:
            self.used[memory.device] -= bytes_
            self._truths.pop(memory.truth._cdata, None)
            self.freed.append(memory)


def true(tensor: Tensor, memory: Memory) -> Tensor:
    """Return the tensor that holds the numbers of one on a device; page-locked memory holds its own."""
    if memory.device is None:
        return tensor.detach()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()
    inner = torch.empty(0, dtype=tensor.dtype).set_(memory.truth, *place)
    if tensor.is_conj():
        inner = inner.conj()
    return torch._neg_view(inner) if tensor.is_neg() else inner


def poison(storage: torch.UntypedStorage) -> None:
    """Fill with NaN."""
    if storage.nbytes():
        ctypes.memset(storage.data_ptr(), POISON, storage.nbytes())


def _storage(tensor: Tensor) -> Any:
    return torch._C.TensorBase.untyped_storage(tensor)
