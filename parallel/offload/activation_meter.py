"""Measures the bytes that autograd keeps for backward.

Forward passes run under ``watching()``; each storage that autograd saves counts once while anything saved from it
lives. Results are unchanged, in-place operations and any number of microbatches in flight included. Parameters and
buffers do not count: they are there anyway.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


class Kept:
    """A tensor that counts for as long as this object lives."""

    def __init__(self, meter: ActivationMeter, tensor: Tensor) -> None:
        self._meter = meter
        # An operation's own output comes with its grad_fn, which would keep itself alive through this object.
        self._tensor = tensor.detach()
        self._version = tensor._version
        storage = tensor.untyped_storage()
        self._place, self._bytes = storage.data_ptr(), storage.nbytes()
        meter._add(self._place, self._bytes)

    def unpack(self) -> Tensor:
        """The tensor, for backward.

        Raises:
            RuntimeError: it was changed in place meanwhile. Autograd does not look where hooks are at work.
        """
        if self._tensor._version != self._version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"{tuple(self._tensor.shape)} {self._tensor.dtype} is at version {self._tensor._version}, "
                f"expected version {self._version}"
            )
        return self._tensor

    def __del__(self) -> None:
        if hasattr(self, "_bytes"):
            self._meter._remove(self._place, self._bytes)


class ActivationMeter:
    """Counts what autograd keeps, for one rank.

    Args:
        modules: their parameters and buffers do not count, nor do those of modules given to ``exclude``.

    Attributes:
        bytes: kept now.
        peak_bytes: the most that was kept at a time since the start or ``reset_peak``.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self._excluded: list[Tensor] = []
        self._holders: dict[int, int] = {}
        # Reentrant: a handle may be collected, and so counted off, while this thread is counting.
        self._lock = threading.RLock()
        for module in modules:
            self.exclude((*module.parameters(), *module.buffers()))

    def exclude(self, tensors: Iterable[Tensor]) -> None:
        """Count nothing that shares the storage of ``tensors``."""
        self._excluded.extend(tensors)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Count what forward passes in this block, on this thread, keep for backward."""
        # Looked up each time: a parameter gets another storage when its module is moved.
        excluded = {tensor.untyped_storage().data_ptr() for tensor in self._excluded}

        def pack(tensor: Tensor) -> Tensor | Kept:
            return tensor if tensor.untyped_storage().data_ptr() in excluded else Kept(self, tensor)

        def unpack(packed: Tensor | Kept) -> Tensor:
            return packed.unpack() if isinstance(packed, Kept) else packed

        with saved_tensors_hooks(pack, unpack):
            yield

    def hold(self, tensor: Tensor) -> Kept:
        """Count a tensor that is kept for backward outside of autograd, until the returned object is dropped."""
        return Kept(self, tensor)

    def reset_peak(self) -> None:
        """Let ``peak_bytes`` start again from what is kept now."""
        with self._lock:
            self.peak_bytes = self.bytes

    def _add(self, place: int, size: int) -> None:
        with self._lock:
            holders = self._holders.get(place, 0)
            self._holders[place] = holders + 1
            if not holders:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)

    def _remove(self, place: int, size: int) -> None:
        with self._lock:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self.bytes -= size
