"""Activations on the host between their forward and their backward pass, copied beside what is computed.

What autograd saves of a forward pass becomes an ``Entry`` per storage. Entries wait on the device as long as all that
wait are within a window; the oldest leave for the host first. In the backward pass the last come back first, each
before it is needed, again within the window. A storage that several layers save travels once each way.

Takes part through the hooks of ``saved_tensors``, whatever the schedule and the number of microbatches in flight.
"""

from __future__ import annotations

import threading
from collections import deque

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from parallel.memory.policy import WINDOW
from parallel.offload.activation_meter import ActivationMeter
from parallel.offload.copies import Copies
from parallel.offload.entry import Entry
from parallel.offload.host_memory import HostMemory
from parallel.offload.packing import Holding, Packed, form_of, view_like

PART = 2
"""A tensor that covers less than this part of its storage (1/PART) is left: the rest is somebody else's."""


class Flight:
    """What one microbatch's forward pass through one stage has saved, in order; a ``Packer``."""

    def __init__(self, offload: OverlapOffload) -> None:
        self.entries: list[Entry] = []
        self.at: dict[int, tuple[StorageWeakRef, Entry]] = {}
        self._offload = offload

    def pack(self, tensor: Tensor) -> Packed:
        return self._offload.pack(self, tensor)

    def find(self, tensor: Tensor) -> Entry | None:
        """The entry of the tensor's storage, saved before with the same values."""
        entry = self.at.get(tensor.untyped_storage().data_ptr())
        # Freed memory is given out again: the same place may be another storage.
        if entry is None or not entry[1].references or entry[0].expired():  # type: ignore[no-untyped-call]
            return None
        return entry[1] if entry[1].same(tensor) else None

    def register(self, tensor: Tensor, entry: Entry) -> None:
        storage = tensor.untyped_storage()
        self.at[storage.data_ptr()] = (StorageWeakRef(storage), entry)  # type: ignore[no-untyped-call]


class Away:
    """A saved tensor whose storage may be on the host."""

    def __init__(self, flight: Flight, entry: Entry, tensor: Tensor, offload: OverlapOffload) -> None:
        self._flight, self._entry, self._offload = flight, entry, offload
        self._form = form_of(tensor)
        entry.references += 1

    def unpack(self) -> Tensor:
        return view_like(self._offload.bring(self._flight, self._entry), self._form)

    def __del__(self) -> None:
        if hasattr(self, "_form"):
            self._offload.drop(self._entry)


class OverlapOffload:
    """The activations of one rank.

    Args:
        copies: of its device.
        pool: room on the host; what it has none for stays on the device.
        ahead: bytes of the window: of entries on the device that no backward pass has asked for; None: ``WINDOW``
            times the largest entry so far.
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
        # Copies that overlap a GPU's work need an entry to copy, whatever the window.
        self._under_way = 0 if copies.at_once or ahead == 0 else 1
        self._meter = meter
        self._holding = Holding(meter)
        self._waiting: deque[Entry] = deque()
        self._waiting_bytes = 0
        self._leaving: deque[Entry] = deque()
        self._leaving_bytes = 0
        # Reentrant: a packed tensor may be collected, and so dropped, while this thread is at work here.
        self._lock = threading.RLock()

    @property
    def window(self) -> int:
        """Return the bytes of the window."""
        return WINDOW * self._largest if self._ahead is None else self._ahead

    def flight(self) -> Flight:
        """Return the packer for one microbatch of one stage."""
        return Flight(self)

    def pack(self, flight: Flight, tensor: Tensor) -> Packed:
        """Put ``tensor`` away."""
        with self._lock:
            entry = flight.find(tensor)
            if entry is None:
                size = tensor.untyped_storage().nbytes()
                if size < max(1, self._smallest) or PART * tensor.numel() * tensor.element_size() < size:
                    return self._holding.pack(tensor)
                entry = Entry(tensor, len(flight.entries), self._meter)
                flight.entries.append(entry)
                flight.register(tensor, entry)
                packed = Away(flight, entry, tensor, self)
                self._largest = max(self._largest, size)
                self._wait(entry)
                # Copies take time beside a GPU's work: they begin when half of the window is full.
                self._narrow(self.window if self.copies.at_once else self.window // 2)
                return packed
            return Away(flight, entry, tensor, self)

    def bring(self, flight: Flight, entry: Entry) -> Tensor:
        """The bytes of ``entry``, on the device for what is computed from now on; those before it follow."""
        with self._lock:
            if entry.device is None or entry in self._leaving:
                self._stay(entry)
                self._fetch(flight, entry)
            entry.check()
            self.copies.wait(entry.mark)
            entry.mark = None
            self._asked(entry)
            device = entry.device
            assert device is not None
            if entry.references > 1:
                self._retain(entry)
            self._look_ahead(flight, entry.place)
            return device

    def flush(self, flight: Flight) -> None:
        """Move everything of ``flight`` that is still on the device to the host."""
        with self._lock:
            for entry in flight.entries:
                if entry.waiting and entry.device is not None:
                    self._asked(entry)
                    self._send(entry)
            self._let_go(0)

    def prefetch(self, flight: Flight) -> None:
        """Begin to bring back what the backward pass of ``flight`` asks for first, within the window."""
        with self._lock:
            self._look_ahead(flight, len(flight.entries))

    def drop(self, entry: Entry) -> None:
        """A packed tensor of ``entry`` is gone."""
        with self._lock:
            entry.references -= 1
            if entry.references:
                return
            self._asked(entry)
            if entry.host is not None:
                self.copies.wait(entry.mark)  # what it reads or writes is free for others from here on
                self.pool.give(entry.host)
                entry.host = None
            self._stay(entry)
            entry.leave()

    def _wait(self, entry: Entry) -> None:
        entry.waiting = True
        self._waiting.append(entry)
        self._waiting_bytes += entry.bytes

    def _asked(self, entry: Entry) -> None:
        """``entry`` is not in the window any more."""
        if entry.waiting:
            entry.waiting = False
            self._waiting.remove(entry)
            self._waiting_bytes -= entry.bytes

    def _retain(self, entry: Entry) -> None:
        """Others will ask for ``entry``, too: it waits for them on the device if the window allows that."""
        if entry.host is None or self._waiting_bytes + entry.bytes <= self.window:
            self._wait(entry)
        else:
            entry.leave()

    def _narrow(self, window: int) -> None:
        """Send the oldest away until what waits is within ``window``."""
        while self._waiting_bytes > window:
            oldest = self._waiting[0]
            self._asked(oldest)
            self._send(oldest)
        self._let_go(self.window, self._under_way)

    def _send(self, entry: Entry) -> None:
        """Begin to move ``entry`` to the host, unless there is no room or it is there."""
        assert entry.device is not None
        entry.check()
        if entry.host is None:
            entry.host = self.pool.take(entry.bytes)
            if entry.host is None:
                return
            entry.mark = self.copies.to_host(entry.device, entry.host[: entry.bytes])
        if entry.mark is None:
            entry.leave()
        else:
            self._leaving.append(entry)
            self._leaving_bytes += entry.bytes

    def _let_go(self, window: int, under_way: int = 0) -> None:
        """Free what has left, the oldest first, until no more than ``window`` bytes are on the device, or
        ``under_way`` entries."""
        while len(self._leaving) > under_way and self._leaving_bytes + self._waiting_bytes > window:
            entry = self._leaving[0]
            self.copies.wait(entry.mark)
            self._stay(entry)
            entry.mark = None
            entry.leave()

    def _stay(self, entry: Entry) -> None:
        """``entry`` is not among those that leave."""
        if entry in self._leaving:
            self._leaving.remove(entry)
            self._leaving_bytes -= entry.bytes

    def _fetch(self, flight: Flight, entry: Entry) -> None:
        """Begin to bring ``entry`` back, unless it has not left."""
        if entry.device is not None:
            return
        assert entry.host is not None
        device, mark = self.copies.to_device(entry.host[: entry.bytes])
        entry.arrive(device, mark, self._meter)
        flight.register(device, entry)

    def _look_ahead(self, flight: Flight, place: int) -> None:
        """Bring back what was saved before ``place``, the last first, as far as the window allows, or one entry."""
        while flight.entries and not flight.entries[-1].references:
            flight.entries.pop()
        for entry in reversed(flight.entries[:place]):
            if not entry.references or entry.device is not None:
                continue
            if self._waiting_bytes + entry.bytes > self.window and len(self._waiting) >= self._under_way:
                return
            self._fetch(flight, entry)
            self._wait(entry)
