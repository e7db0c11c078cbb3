"""Messages on their way out, let go of as soon as they have left.

Gloo tells nobody that a message has left but who waits for it. One thread per process waits for them in the order sent,
so that a rank that computes does not hold on to what the others have long received.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

from parallel.comm.device_thread import on_current_device


class Sent:
    """One message.

    Args:
        wait: returns when it has left; raises when the other rank is gone. Holds the tensors.
    """

    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait: Callable[[], object] | None = wait
        self._left = threading.Event()
        self._fault: Exception | None = None

    def await_departure(self) -> None:
        """Called by the thread that waits."""
        assert self._wait is not None
        try:
            self._wait()
        except Exception as fault:
            self._fault = fault
        self._wait = None
        self._left.set()

    def done(self) -> bool:
        return self._left.is_set()

    def wait(self) -> None:
        """Return when the message has left.

        Raises:
            Exception: whatever waiting for it raised.
        """
        self._left.wait()
        if self._fault is not None:
            raise self._fault


class Departures:
    """The thread that waits for messages to leave."""

    def __init__(self) -> None:
        self._messages: queue.SimpleQueue[Sent | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=on_current_device(self._run), name="departures", daemon=True)
        self._thread.start()

    def add(self, wait: Callable[[], object]) -> Sent:
        """A message whose departure ``wait`` waits for."""
        message = Sent(wait)
        self._messages.put(message)
        return message

    def close(self) -> None:
        """End the thread; every message must have left."""
        self._messages.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (message := self._messages.get()) is not None:
            message.await_departure()
            del message  # or its tensors would live until the next one comes
