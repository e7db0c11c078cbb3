"""Setting of a part of the GPU benchmark, and rows of its attempts.

Takes a device and seconds; gives sizes to choose from and rows. Whatever goes wrong is a row too: out of memory is a
result.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

Row = dict[str, Any]
Value = TypeVar("Value")
MIB, GIB = 2**20, 2**30


@dataclass(frozen=True)
class Setting:
    """Device and time of one part.

    Attributes:
        device: what is measured.
        until_s: ``time.perf_counter`` by which to end.
    """

    device: torch.device
    until_s: float

    @property
    def full(self) -> bool:
        """Sizes for a GPU; else tiny ones, which only show that the part runs."""
        return self.device.type == "cuda"

    def of(self, full: Value, tiny: Value) -> Value:
        return full if self.full else tiny

    @property
    def left_s(self) -> float:
        return self.until_s - time.perf_counter()

    def settle(self) -> None:
        """Wait for what the device has been given to do."""
        if self.full:
            torch.cuda.synchronize(self.device)

    def seconds_of(self, call: Callable[[], object]) -> float:
        """Return the seconds until the device has done what ``call`` asks of it."""
        self.settle()
        began = time.perf_counter()
        call()
        self.settle()
        return time.perf_counter() - began

    def shared(self, items: Sequence[Value], shares: float = 1.0) -> Iterator[tuple[Setting, Value]]:
        """Yield each of ``items`` with a setting of its own: so many equal shares of the time that is left then."""
        for number, item in enumerate(items):
            share_s = shares * self.left_s / (len(items) - number)
            yield Setting(self.device, min(self.until_s, time.perf_counter() + share_s)), item


def attempt(what: Row, run: Callable[[], Row]) -> Row:
    """``what`` and what ``run`` gave, or the fault that it ended with."""
    try:
        return {**what, **run()}
    except Exception as fault:  # whatever happens on a device that nobody has tried is what was to be found out
        return {**what, "fault": fault_line(fault)}
    finally:
        forget()


def fault_line(fault: BaseException) -> str:
    """Return a fault as one line."""
    if isinstance(fault, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(fault).__name__}: {(str(fault).splitlines() or [''])[0][:200]}"


def forget() -> None:
    """Free what nobody holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def shown(value: float | None, unit: float, digits: int = 0) -> str:
    """Return ``value`` in ``unit`` as text; a dash if there is none."""
    return "-" if value is None else f"{value / unit:.{digits}f}"
