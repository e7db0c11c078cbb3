"""Signals that ask a run to stop: the step in hand is finished and saved first."""

from __future__ import annotations

import signal
from types import FrameType

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


class Interrupt:
    """The request to stop a run, remembered.

    A second Ctrl-C ends the process at once, as a user who presses it twice expects.
    """

    def __init__(self) -> None:
        self.requested = False

    def listen(self) -> None:
        """Take over the signals of ``STOPPING``; from the main thread only."""
        for number in STOPPING:
            signal.signal(number, self._request)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.requested = True
