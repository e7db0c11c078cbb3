"""Counts the bytes of tensors that live at a time, operation by operation: what a device would have to hold.

Storages count, so that views and changes in place add nothing. Every operation that goes through torch's dispatcher is
seen: on a CPU that is all of a training step. What an operation allocates only while it runs, as work space of a
convolution, is not.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

_THREAD = threading.local()


@contextmanager
def not_counted() -> Iterator[None]:
    """Return a context whose allocations on this thread never count: they are not in device memory."""
    before = getattr(_THREAD, "leaving_out", False)
    _THREAD.leaving_out = True
    try:
        yield
    finally:
        _THREAD.leaving_out = before


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts storages that are made in its block, on this thread and within ``on_other_thread``, until they are freed.

    Args:
        limit: an operation after which more bytes are live raises ``torch.OutOfMemoryError``, as one that cannot get
            its memory does on a GPU; None: counts only.
        without_data: count tensors on the meta device, too.

    Attributes:
        peak_bytes: the most while one operation ran, its results included.
    """

    def __init__(self, limit: int | None = None, *, without_data: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.limit = limit
        self._without_data = without_data
        self.peak_bytes = 0
        # By address, which a weak reference keeps from being given to another storage; with its largest size so far, or
        # None if it is left out.
        self._known: dict[int, tuple[StorageWeakRef, int | None]] = {}
        self._at_most = 0
        """Bound of the bytes that are live: those of the last exact sum at their largest, and all that are new.
        Storages may shrink and grow again, as those of gathered parameters. One that outgrows all its sizes so far is
        counted with the next exact sum."""
        self._changed = threading.Condition(threading.RLock())
        self._open = False
        self._other_threads = 0

    def __enter__(self) -> Self:
        with self._changed:
            super().__enter__()  # type: ignore[no-untyped-call]
            self._open = True
        return self

    def __exit__(self, *exception: object) -> None:
        """Wait for the other threads first: torch notes for all threads together whether any has a mode."""
        with self._changed:
            self._open = False
            self._changed.wait_for(lambda: not self._other_threads)
            super().__exit__(*exception)  # type: ignore[no-untyped-call]

    @contextmanager
    def on_other_thread(self) -> Iterator[None]:
        """Count on the thread that enters this as on that of the block; nothing once the block has ended."""
        with self._changed:
            counting = self._open
            if counting:
                self._other_threads += 1
                super().__enter__()  # type: ignore[no-untyped-call]
        try:
            yield
        finally:
            if counting:
                with self._changed:
                    super().__exit__(None, None, None)  # type: ignore[no-untyped-call]
                    self._other_threads -= 1
                    self._changed.notify_all()

    @property
    def bytes(self) -> int:
        """Return the bytes that are live now."""
        total = 0
        with self._changed:
            self._at_most = 0
            for key, (memory, largest) in list(self._known.items()):
                storage: torch.UntypedStorage | None = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)
                if storage is None:
                    del self._known[key]
                elif largest is not None:
                    size = storage.nbytes()  # anew: it may have been resized, as those of gathered parameters are
                    total += size
                    self._at_most += max(size, largest)
                    if size > largest:
                        self._known[key] = memory, size
        return total

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, too: parameters, or whatever else is there already."""
        there = list(tensors)  # outside of the lock: what still makes one of them on another thread takes it
        with self._changed:
            for part in _tensors(there):
                self._count(part, counts=True)
            self._notice()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        # Views and results in place, half of all, have the memory of what is known already.
        unknown = [part for part in _tensors(value) if _memory(part).cdata not in self._known]
        if unknown:
            given = {_memory(part).cdata for part in _tensors((args, kwargs))}
            leave_out = getattr(_THREAD, "leaving_out", False)
            with self._changed:
                for part in unknown:
                    if _memory(part).cdata not in given:
                        self._count(part, counts=not leave_out)
                self._notice()
        return value

    def _count(self, tensor: Tensor, *, counts: bool) -> None:
        memory = _memory(tensor)
        there = self._without_data or tensor.untyped_storage().device.type != "meta"  # as of a model that is traced
        size = tensor.untyped_storage().nbytes() if counts and there else None
        self._known[memory.cdata] = memory, size
        self._at_most += size or 0

    def _notice(self) -> None:
        if self._at_most <= self.peak_bytes:
            return  # an exact sum takes a look at every storage
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        if self.limit is not None and self.peak_bytes > self.limit:
            raise torch.OutOfMemoryError(f"tensors take {self.peak_bytes} bytes of {self.limit}")


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield all tensors in ``value``; of a wrapper, as a sharded tensor, those inside it."""
    for leaf in tree_leaves(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _tensors([getattr(leaf, name) for name in names])
        elif isinstance(leaf, Tensor):
            yield leaf


def _memory(tensor: Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
