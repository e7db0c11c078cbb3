"""Progress of a rank's GPU through the actions that the rank has queued, for the rank's watchdog.

The host runs ahead of a GPU: it waits at the end of a step for an action that hangs in the middle. An event is recorded
at every entry of the record; a thread looks four times a second which of them the GPU has come to.
"""

from __future__ import annotations

import threading
from collections import deque
from typing import Any

import torch

from app.launch.progress_record import NO_ACTION, ProgressRecord

POLL_S = 0.25

Place = tuple[int, bool, str]
"""Position, waiting and shapes, as ``ProgressRecord.at`` takes them."""


class DeviceProgress:
    """Records the progress of ``device`` beside that of the host.

    Args:
        device: a GPU.
    """

    def __init__(self, record: ProgressRecord, device: torch.device) -> None:
        self._record, self._device = record, device
        self._queued: deque[tuple[Any, Place]] = deque()
        self._reached: Place = (NO_ACTION, False, "")
        self._written: Place | None = None
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="device progress", daemon=True)

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """Record that the host turns to the action at ``position``, and later that the GPU does."""
        self._record.at(position, waiting, shapes)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        self._queued.append((event, (position, waiting, shapes)))

    def look(self) -> None:
        """Record the last entry that the GPU has come to, if the host is ahead of it."""
        while self._queued and self._queued[0][0].query():
            self._reached = self._queued.popleft()[1]
        place = self._reached if self._queued else None
        if place != self._written:
            self._record.at_device(place)
            self._written = place

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the thread, which may not have been started."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        torch.cuda.set_device(self._device)
        while not self._ended.wait(POLL_S):
            try:
                self.look()
            except RuntimeError:
                return  # the GPU has failed: the rank meets the same error, and the last place stays recorded
