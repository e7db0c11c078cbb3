"""A call that may never come back, given a time limit: it runs on a thread that is left behind if it does not."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def in_time(call: Callable[[], Result], limit_s: float) -> Result:
    """What ``call()`` gives, or raises; only for calls that let go of Python's lock while they wait.

    Raises:
        TimeoutError: it did not come back within ``limit_s``. It goes on, in a thread that dies with the process.
    """
    given: list[Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            given.append(call())
        except BaseException as fault:  # whatever it is, it is for whoever waits
            raised.append(fault)

    thread = threading.Thread(target=run, name="in time", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not given:
        raise TimeoutError(f"no answer for {limit_s:.0f} s")
    return given[0]
