"""Measures the bytes that autograd keeps for backward.

Forward passes run under ``watching()``; each storage that autograd saves counts once while anything saved from it
lives. Results are unchanged, in-place operations and any number of microbatches in flight included. Parameters and
buffers do not count: they are there anyway.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

from parallel.offload.packing import SavedTensor, saving, storages_of


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

    def watching(self) -> AbstractContextManager[Any]:
        """Return a context that counts what forward passes in it, on this thread, keep for backward."""
        # Looked up each time: a parameter gets another storage when its module is moved.
        return saving(functools.partial(SavedTensor, meter=self), storages_of(self._excluded))

    def reset_peak(self) -> None:
        """Let ``peak_bytes`` start again from what is kept now."""
        with self._lock:
            self.peak_bytes = self.bytes

    def add(self, place: int, size: int) -> None:
        """Count a saved tensor in the storage of ``size`` bytes at ``place``."""
        with self._lock:
            holders = self._holders.get(place, 0)
            self._holders[place] = holders + 1
            if not holders:
                self.bytes += size
                self.peak_bytes = max(self.peak_bytes, self.bytes)

    def remove(self, place: int, size: int) -> None:
        """Count off what ``add`` counted."""
        with self._lock:
            self._holders[place] -= 1
            if not self._holders[place]:
                del self._holders[place]
                self.bytes -= size
