"""Activations on the host between their forward and their backward pass; copies overlap computation.

Storages wait on the device as long as all that wait are within a window; the oldest leave for the host first. In the
backward pass the last come back first, each before it is needed, again within the window. A storage that several layers
save travels once each way.
"""

from __future__ import annotations

import threading

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.memory.policy import WINDOW
from parallel.offload.copies import Copies, Mark
from parallel.offload.host_memory import HostMemory
from parallel.offload.packing import ActivationMeter, Packed, SavedTensor, bytes_view, form_of, view_like

PART = 2
"""A tensor that covers less than this part of its storage (1/PART) is left: the rest is somebody else's."""


class SavedStorage:
    """One saved storage, by its ``place`` in the microbatch, and the number of packed tensors that lie in it. Its bytes
    are in ``saved`` on the device, in ``host``, or both; ``mark`` is of a copy under way."""

    __slots__ = ("bytes", "host", "mark", "place", "references", "saved", "version")

    def __init__(self, tensor: Tensor, place: int, meter: ActivationMeter | None) -> None:
        self.place, self.bytes, self.version = place, tensor.untyped_storage().nbytes(), tensor._version
        self.saved: SavedTensor | None = SavedTensor(tensor, meter)
        self.host: Tensor | None = None
        self.mark: Mark = None
        self.references = 0


class MicrobatchSaves:
    """Storages saved by one microbatch's forward pass through one stage, in order."""

    def __init__(self, offload: OverlapOffload) -> None:
        self.storages: list[SavedStorage] = []
        self.offload = offload
        self._at: dict[int, tuple[StorageWeakRef, SavedStorage]] = {}

    def pack(self, tensor: Tensor) -> Packed:
        return self.offload.pack(self, tensor)

    def find(self, tensor: Tensor) -> SavedStorage | None:
        """Return the storage of ``tensor``, if it was saved before with the same values."""
        memory, storage = self._at.get(tensor.untyped_storage().data_ptr(), (None, None))
        # Freed memory is given out again: the same place may be another storage.
        if memory is None or storage is None or not storage.references or memory.expired():  # type: ignore[no-untyped-call]
            return None
        return storage if storage.version == tensor._version else None

    def register(self, tensor: Tensor, storage: SavedStorage) -> None:
        memory = tensor.untyped_storage()
        self._at[memory.data_ptr()] = (StorageWeakRef(memory), storage)  # type: ignore[no-untyped-call]


class OffloadedTensor:
    """A saved tensor whose storage may be on the host."""

    def __init__(self, saves: MicrobatchSaves, storage: SavedStorage, tensor: Tensor) -> None:
        self._saves, self._storage, self._form = saves, storage, form_of(tensor)
        storage.references += 1

    def unpack(self) -> Tensor:
        return view_like(self._saves.offload.bring(self._saves, self._storage), self._form)

    def __del__(self) -> None:
        if hasattr(self, "_form"):
            self._saves.offload.drop(self._storage)


class OverlapOffload:
    """The activations of one rank.

    Args:
        copies: of its device.
        pool: room on the host; what it has none for stays on the device.
        ahead: bytes of the window; None: ``WINDOW`` times the largest storage so far.
        smallest: bytes of a storage that is worth moving.
        meter: counts what lies on the device.
    """

    def __init__(
        self,
        copies: Copies,
        pool: HostMemory,
        *,
        ahead: int | None = 0,
        smallest: int = 0,
        meter: ActivationMeter | None = None,
    ) -> None:
        self.copies, self.pool = copies, pool
        self._ahead, self._largest, self._smallest = ahead, 0, smallest
        # Copies that overlap a GPU's work need a storage to copy, whatever the window.
        self._under_way = 1 if copies.pinned and ahead != 0 else 0
        self._meter = meter
        self._waiting: dict[SavedStorage, None] = {}  # oldest first
        self._waiting_bytes = 0
        self._leaving: dict[SavedStorage, None] = {}
        self._leaving_bytes = 0
        # Reentrant: a packed tensor may be collected, and so dropped, while this thread is at work here.
        self._lock = threading.RLock()

    @property
    def window(self) -> int:
        """Return the bytes of the window."""
        return WINDOW * self._largest if self._ahead is None else self._ahead

    def pack(self, saves: MicrobatchSaves, tensor: Tensor) -> Packed:
        """Return ``tensor`` packed: moved to the host sooner or later, unless it is too small."""
        with self._lock:
            storage = saves.find(tensor)
            if storage is not None:
                return OffloadedTensor(saves, storage, tensor)
            size = tensor.untyped_storage().nbytes()
            if size < max(1, self._smallest) or PART * tensor.numel() * tensor.element_size() < size:
                return SavedTensor(tensor, self._meter)
            storage = SavedStorage(tensor, len(saves.storages), self._meter)
            saves.storages.append(storage)
            saves.register(tensor, storage)
            packed = OffloadedTensor(saves, storage, tensor)
            self._largest = max(self._largest, size)
            self._wait(storage)
            # Copies take time beside a GPU's work: they begin when half of the window is full.
            window = self.window // 2 if self.copies.pinned else self.window
            while self._waiting_bytes > window:
                self._send(next(iter(self._waiting)))
            self._free_copied(self.window, self._under_way)
            return packed

    def bring(self, saves: MicrobatchSaves, storage: SavedStorage) -> Tensor:
        """Return a tensor in ``storage``, on the device for what is computed from now on; those before it follow."""
        with self._lock:
            self._cancel_offload(storage)
            if storage.saved is None:
                self._fetch(saves, storage)
            assert storage.saved is not None
            tensor = storage.saved.unpack()
            self.copies.wait(storage.mark)
            storage.mark = None
            self._leave_window(storage)
            if storage.references > 1:  # others need it too
                if storage.host is None or self._waiting_bytes + storage.bytes <= self.window:
                    self._wait(storage)
                else:
                    storage.saved = None
            self._look_ahead(saves, storage.place)
            return tensor

    def flush(self, saves: MicrobatchSaves) -> None:
        """Move everything of ``saves`` that is still on the device to the host."""
        with self._lock:
            for storage in saves.storages:
                if storage in self._waiting:
                    self._send(storage)
            self._free_copied(0)

    def prefetch(self, saves: MicrobatchSaves) -> None:
        """Begin to bring back what the backward pass of ``saves`` asks for first, within the window."""
        with self._lock:
            self._look_ahead(saves, len(saves.storages))

    def drop(self, storage: SavedStorage) -> None:
        """Count off a packed tensor of ``storage``; free the storage with the last one."""
        with self._lock:
            storage.references -= 1
            if storage.references:
                return
            self._leave_window(storage)
            if storage.host is not None:
                self.copies.wait(storage.mark)  # what it reads or writes is free for others from here on
                self.pool.give(storage.host)
                storage.host = None
            self._cancel_offload(storage)
            storage.saved = None

    def _wait(self, storage: SavedStorage) -> None:
        self._waiting[storage] = None
        self._waiting_bytes += storage.bytes

    def _leave_window(self, storage: SavedStorage) -> None:
        if storage in self._waiting:
            del self._waiting[storage]
            self._waiting_bytes -= storage.bytes

    def _send(self, storage: SavedStorage) -> None:
        """Begin to move ``storage`` out of the window to the host, unless there is no room or it is there."""
        self._leave_window(storage)
        assert storage.saved is not None
        tensor = storage.saved.unpack()
        if storage.host is None:
            storage.host = self.pool.take(storage.bytes)
            if storage.host is None:
                return
            storage.mark = self.copies.to_host(bytes_view(tensor), storage.host[: storage.bytes])
        if storage.mark is None:
            storage.saved = None
        else:
            self._leaving[storage] = None
            self._leaving_bytes += storage.bytes

    def _free_copied(self, window: int, under_way: int = 0) -> None:
        """Free the oldest that left until ``window`` bytes are on the device, or ``under_way`` storages."""
        while len(self._leaving) > under_way and self._leaving_bytes + self._waiting_bytes > window:
            storage = next(iter(self._leaving))
            self.copies.wait(storage.mark)
            self._cancel_offload(storage)
            storage.mark = storage.saved = None

    def _cancel_offload(self, storage: SavedStorage) -> None:
        if storage in self._leaving:
            del self._leaving[storage]
            self._leaving_bytes -= storage.bytes

    def _fetch(self, saves: MicrobatchSaves, storage: SavedStorage) -> None:
        assert storage.host is not None
        device, storage.mark = self.copies.to_device(storage.host[: storage.bytes])
        storage.saved = SavedTensor(device, self._meter)
        saves.register(device, storage)

    def _look_ahead(self, saves: MicrobatchSaves, place: int) -> None:
        """Bring back what was saved before ``place``, the last first, as far as the window allows, or one storage."""
        while saves.storages and not saves.storages[-1].references:
            saves.storages.pop()
        for number in range(min(place, len(saves.storages)) - 1, -1, -1):
            storage = saves.storages[number]
            if not storage.references or storage.saved is not None:
                continue
            if self._waiting_bytes + storage.bytes > self.window and len(self._waiting) >= self._under_way:
                return
            self._fetch(saves, storage)
            self._wait(storage)
