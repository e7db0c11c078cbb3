"""Counts the memory of tensors that live at a time, operation by operation: forward and backward, on the CPU."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches this thread, the backward passes of CPU tensors included.

    Args:
        known: tensors that do not count.

    Attributes:
        peak: bytes that lived at most while one operation ran, its results included.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._known = [_memory(tensor) for tensor in known]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        self._live = {key: one for key, one in self._live.items() if not one[0].expired()}
        known = {memory.cdata for memory in self._known}
        for leaf in tree_leaves((args, value)):
            if isinstance(leaf, Tensor) and (memory := _memory(leaf)).cdata not in known:
                self._live[memory.cdata] = memory, leaf.untyped_storage().nbytes()
        self.peak = max(self.peak, sum(size for _, size in self._live.values()))
        return value


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
