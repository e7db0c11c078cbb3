"""Setting of a part of the GPU benchmark, and rows of its attempts.

Takes a device and seconds; gives sizes to choose from and rows. Whatever goes wrong is a row too: out of memory is a
result.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
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

    def part(self, seconds: float) -> Setting:
        """Return the setting of one of several attempts: ``seconds`` from now, or the time that is left."""
        return Setting(self.device, min(self.until_s, time.perf_counter() + seconds))


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


@contextlib.contextmanager
def seconds_of(setting: Setting) -> Iterator[Callable[[], float]]:
    """Seconds since the beginning of the block, once the device is done."""
    setting.settle()
    began = time.perf_counter()

    def taken() -> float:
        setting.settle()
        return time.perf_counter() - began

    yield taken
