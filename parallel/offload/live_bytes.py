"""Counts the bytes of tensors that live at a time, operation by operation: what a device would have to hold.

Storages count, so that views and changes in place add nothing. Every operation that goes through torch's dispatcher is
seen: on a CPU that is all of a training step. What an operation allocates only while it runs, as work space of a
convolution, is not.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Self

import torch
from torch import Tensor
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
        self._known: dict[int, tuple[weakref.ref[torch.UntypedStorage], int | None]] = {}
        """By address: a weak reference to a storage, and its largest size so far; None if it is left out."""
        self._freed: deque[int] = deque()
        """Addresses of storages that were freed, on whatever thread, and are known yet."""
        self._at_most = 0
        """Bytes of the known storages at their largest."""
        self._resizes = False
        """Storages are resized, as those of gathered parameters, which no operation shows: their sizes are looked at
        anew wherever they could make a peak."""
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
        with self._changed:
            self._forget_freed()
            if not self._resizes:
                return self._at_most
            total = 0
            for key, (reference, largest) in list(self._known.items()):
                storage = reference()
                if storage is not None and largest is not None:
                    total += self._enlarge(key, storage, largest)
            return total

    def add(self, tensors: Iterable[Tensor]) -> None:
        """Count the storages of ``tensors``, too: parameters, or whatever else is there already."""
        there = list(tensors)  # outside of the lock: what still makes one of them on another thread takes it
        with self._changed:
            self._forget_freed()
            for part in _tensors(there):
                self._count(part.untyped_storage(), counts=True)
            self._notice()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        value = func(*args, **(kwargs or {}))
        storages = [part.untyped_storage() for part in _tensors(value)]
        leave_out = getattr(_THREAD, "leaving_out", False)
        given: set[int] | None = None
        with self._changed:
            self._resizes |= func.namespace == "fsdp"  # gathers parameters
            self._forget_freed()
            for storage in storages:
                known = self._known.get(storage._cdata)
                if known is None:
                    # Views and results in place have memory that is given, perhaps by who does not count.
                    given = given or {part.untyped_storage()._cdata for part in _tensors((args, kwargs))}
                    if storage._cdata not in given:
                        self._count(storage, counts=not leave_out)
                elif known[1] is not None and storage.nbytes() != known[1]:
                    self._resizes = True
                    self._enlarge(storage._cdata, storage, known[1])
            self._notice()
        return value

    def _count(self, storage: torch.UntypedStorage, *, counts: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        there = self._without_data or storage.device.type != "meta"  # as of a model that is traced
        size = storage.nbytes() if counts and there else None
        self._known[key] = weakref.ref(storage, lambda _: self._freed.append(key)), size
        self._at_most += size or 0

    def _enlarge(self, key: int, storage: torch.UntypedStorage, largest: int) -> int:
        """Return the size of a known storage; it may be larger than ever before."""
        size = storage.nbytes()
        if size > largest:
            self._known[key] = self._known[key][0], size
            self._at_most += size - largest
        return size

    def _forget_freed(self) -> None:
        """Before any address is looked up: memory that was freed may have been given to another storage."""
        while self._freed:
            self._at_most -= self._known.pop(self._freed.popleft())[1] or 0

    def _notice(self) -> None:
        if self._at_most <= self.peak_bytes:
            return
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
