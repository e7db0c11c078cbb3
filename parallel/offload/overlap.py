"""Activations on the host between their forward and their backward pass; copies overlap computation.

What autograd saves of a forward pass becomes a ``SavedStorage`` per storage. Storages wait on the device as long as all
that wait are within a window; the oldest leave for the host first. In the backward pass the last come back first, each
before it is needed, again within the window. A storage that several layers save travels once each way.

Takes part through the hooks of ``saved_tensors``, whatever the schedule and the number of microbatches in flight.
"""

from __future__ import annotations

import threading

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.memory.policy import WINDOW
from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.copies import Copies, Mark
from parallel.offload.host_memory import HostMemory
from parallel.offload.packing import Packed, SavedTensor, bytes_view, form_of, view_like

PART = 2
"""A tensor that covers less than this part of its storage (1/PART) is left: the rest is somebody else's."""


class SavedStorage:
    """One saved storage.

    Attributes:
        place: number in its microbatch.
        device: its bytes on the device, None while they are on the host alone.
        host: buffer on the host that holds or awaits them.
        mark: of the copy under way, if any.
        references: packed tensors that lie in it.
        waiting: counted in the window: not needed yet.
    """

    __slots__ = ("_saved", "_version", "bytes", "device", "host", "mark", "place", "references", "waiting")

    def __init__(self, tensor: Tensor, place: int, meter: ActivationMeter | None) -> None:
        self.place = place
        self.bytes = tensor.untyped_storage().nbytes()
        self.device: Tensor | None = bytes_view(tensor)
        self.host: Tensor | None = None
        self.mark: Mark = None
        self.references = 0
        self.waiting = False
        self._saved: SavedTensor | None = SavedTensor(tensor, meter)
        self._version = tensor._version

    def same(self, tensor: Tensor) -> bool:
        """Return whether ``tensor``, which lies in this storage, has the values that were saved."""
        return tensor._version == self._version

    def check(self) -> None:
        """Refuse what was changed in place after it was saved and before it was copied."""
        if self._saved is not None:
            self._saved.unpack()

    def arrive(self, device: Tensor, mark: Mark, meter: ActivationMeter | None) -> None:
        self.device, self.mark = device, mark
        self._saved = SavedTensor(device, meter)

    def leave(self) -> None:
        """Forget what lies on the device."""
        self.device = self._saved = None


class MicrobatchSaves:
    """Storages saved by one microbatch's forward pass through one stage, in order."""

    def __init__(self, offload: OverlapOffload) -> None:
        self.storages: list[SavedStorage] = []
        self.at: dict[int, tuple[StorageWeakRef, SavedStorage]] = {}
        self._offload = offload

    def pack(self, tensor: Tensor) -> Packed:
        return self._offload.pack(self, tensor)

    def find(self, tensor: Tensor) -> SavedStorage | None:
        """Return the storage of ``tensor``, if it was saved before with the same values."""
        memory, storage = self.at.get(tensor.untyped_storage().data_ptr(), (None, None))
        # Freed memory is given out again: the same place may be another storage.
        if memory is None or storage is None or not storage.references or memory.expired():  # type: ignore[no-untyped-call]
            return None
        return storage if storage.same(tensor) else None

    def register(self, tensor: Tensor, storage: SavedStorage) -> None:
        memory = tensor.untyped_storage()
        self.at[memory.data_ptr()] = (StorageWeakRef(memory), storage)  # type: ignore[no-untyped-call]


class OffloadedTensor:
    """A saved tensor whose storage may be on the host."""

    def __init__(self, saves: MicrobatchSaves, storage: SavedStorage, tensor: Tensor, offload: OverlapOffload) -> None:
        self._saves, self._storage, self._offload = saves, storage, offload
        self._form = form_of(tensor)
        storage.references += 1

    def unpack(self) -> Tensor:
        return view_like(self._offload.bring(self._saves, self._storage), self._form)

    def __del__(self) -> None:
        if hasattr(self, "_form"):
            self._offload.drop(self._storage)


class OverlapOffload:
    """The activations of one rank.

    Args:
        copies: of its device.
        pool: room on the host; what it has none for stays on the device.
        ahead: bytes of the window: of storages on the device that no backward pass has asked for; None: ``WINDOW``
            times the largest storage so far.
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
        self._under_way = 0 if copies.at_once or ahead == 0 else 1
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

    def begin(self) -> MicrobatchSaves:
        """Return the packer for one microbatch of one stage."""
        return MicrobatchSaves(self)

    def pack(self, saves: MicrobatchSaves, tensor: Tensor) -> Packed:
        """Return ``tensor`` packed: moved to the host sooner or later, unless it is too small."""
        with self._lock:
            storage = saves.find(tensor)
            if storage is None:
                size = tensor.untyped_storage().nbytes()
                if size < max(1, self._smallest) or PART * tensor.numel() * tensor.element_size() < size:
                    return SavedTensor(tensor, self._meter)
                storage = SavedStorage(tensor, len(saves.storages), self._meter)
                saves.storages.append(storage)
                saves.register(tensor, storage)
                packed = OffloadedTensor(saves, storage, tensor, self)
                self._largest = max(self._largest, size)
                self._wait(storage)
                # Copies take time beside a GPU's work: they begin when half of the window is full.
                self._evict_to(self.window if self.copies.at_once else self.window // 2)
                return packed
            return OffloadedTensor(saves, storage, tensor, self)

    def bring(self, saves: MicrobatchSaves, storage: SavedStorage) -> Tensor:
        """Return the bytes of ``storage``, on the device for what is computed from now on; those before it follow."""
        with self._lock:
            if storage.device is None or storage in self._leaving:
                self._cancel_offload(storage)
                self._fetch(saves, storage)
            storage.check()
            self.copies.wait(storage.mark)
            storage.mark = None
            self._leave_window(storage)
            device = storage.device
            assert device is not None
            if storage.references > 1:
                self._keep_for_reuse(storage)
            self._look_ahead(saves, storage.place)
            return device

    def flush(self, saves: MicrobatchSaves) -> None:
        """Move everything of ``saves`` that is still on the device to the host."""
        with self._lock:
            for storage in saves.storages:
                if storage.waiting and storage.device is not None:
                    self._leave_window(storage)
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
            storage.leave()

    def _wait(self, storage: SavedStorage) -> None:
        storage.waiting = True
        self._waiting[storage] = None
        self._waiting_bytes += storage.bytes

    def _leave_window(self, storage: SavedStorage) -> None:
        """Take ``storage`` out of the window."""
        if storage.waiting:
            storage.waiting = False
            del self._waiting[storage]
            self._waiting_bytes -= storage.bytes

    def _keep_for_reuse(self, storage: SavedStorage) -> None:
        """Keep ``storage``, which others need too, on the device if the window allows that."""
        if storage.host is None or self._waiting_bytes + storage.bytes <= self.window:
            self._wait(storage)
        else:
            storage.leave()

    def _evict_to(self, window: int) -> None:
        """Send the oldest away until what waits is within ``window``."""
        while self._waiting_bytes > window:
            oldest = next(iter(self._waiting))
            self._leave_window(oldest)
            self._send(oldest)
        self._free_copied(self.window, self._under_way)

    def _send(self, storage: SavedStorage) -> None:
        """Begin to move ``storage`` to the host, unless there is no room or it is there."""
        assert storage.device is not None
        storage.check()
        if storage.host is None:
            storage.host = self.pool.take(storage.bytes)
            if storage.host is None:
                return
            storage.mark = self.copies.to_host(storage.device, storage.host[: storage.bytes])
        if storage.mark is None:
            storage.leave()
        else:
            self._leaving[storage] = None
            self._leaving_bytes += storage.bytes

    def _free_copied(self, window: int, under_way: int = 0) -> None:
        """Free what has left, the oldest first, until no more than ``window`` bytes are on the device, or
        ``under_way`` storages."""
        while len(self._leaving) > under_way and self._leaving_bytes + self._waiting_bytes > window:
            storage = next(iter(self._leaving))
            self.copies.wait(storage.mark)
            self._cancel_offload(storage)
            storage.mark = None
            storage.leave()

    def _cancel_offload(self, storage: SavedStorage) -> None:
        """Take ``storage`` out of those that leave."""
        if storage in self._leaving:
            del self._leaving[storage]
            self._leaving_bytes -= storage.bytes

    def _fetch(self, saves: MicrobatchSaves, storage: SavedStorage) -> None:
        """Begin to bring ``storage`` back, unless it has not left."""
        if storage.device is not None:
            return
        assert storage.host is not None
        device, mark = self.copies.to_device(storage.host[: storage.bytes])
        storage.arrive(device, mark, self._meter)
        saves.register(device, storage)

    def _look_ahead(self, saves: MicrobatchSaves, place: int) -> None:
        """Bring back what was saved before ``place``, the last first, as far as the window allows, or one storage."""
        while saves.storages and not saves.storages[-1].references:
            saves.storages.pop()
        for number in range(min(place, len(saves.storages)) - 1, -1, -1):
            storage = saves.storages[number]
            if not storage.references or storage.device is not None:
                continue
            if self._waiting_bytes + storage.bytes > self.window and len(self._waiting) >= self._under_way:
                return
            self._fetch(saves, storage)
            self._wait(storage)
