"""The record of a rank's progress, in memory that outlives the rank, and the one report of a failed run.

The rank writes step, action and shapes before every action, in under two microseconds; its watchdog, another process,
reads them when the rank can no longer answer. The memory is a file that only open descriptors know. The first rank that
fails writes the run's fault file; later ones print nothing.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from pathlib import Path
from typing import NamedTuple

NO_ACTION = -1
"""Position of a rank that is in a step and at none of its actions."""
AT_REST = -2
"""Position of a rank between two steps, where it may take as long as it likes."""
_WITH_HOST = -3
"""Position of a device that is not behind the host, or that nobody asks."""

WATCHED, LOST, REPORTED, CLOSED = range(4)
"""A rank at work; one that lost another and waits to be ended; one that has said why it ends; one that ended well."""

SHAPES_BYTES = 256

_ACTION = struct.Struct(f"=qd?{SHAPES_BYTES}s")
_STEP = struct.Struct("=q")
_PHASE = struct.Struct("=b")
_STEP_AT = _ACTION.size
_PHASE_AT = _STEP_AT + _STEP.size
_DEVICE_AT = _PHASE_AT + _PHASE.size
_SIZE = _DEVICE_AT + _ACTION.size


class RankProgress(NamedTuple):
    """The last entry of a rank: what it is doing.

    Attributes:
        position: in the rank's list of actions, or NO_ACTION or AT_REST.
        since_s: ``time.monotonic()`` when it began, the same clock in all processes of a machine.
        waiting: it needs other ranks to go on.
        shapes: of the tensors at hand, cut after SHAPES_BYTES bytes.
        step: from 0; -1 before the first.
        phase: WATCHED, LOST, REPORTED or CLOSED.
        of_device: the first four are of its GPU, which is behind the host.
    """

    position: int
    since_s: float
    waiting: bool
    shapes: str
    step: int
    phase: int
    of_device: bool = False


class ProgressRecord:
    """The record of one rank, shared by two processes.

    Args:
        descriptor: of the record made by another process; None makes a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            # Of no disk: there, the kernel writing the page back could hold up the rank that changes it. And of no
            # folder: /dev/shm may be small, full or read-only.
            descriptor = os.memfd_create("progress_record")
            os.ftruncate(descriptor, _SIZE)
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, _SIZE)
            self.at(AT_REST)
            self.at_device(None)
            _STEP.pack_into(self._memory, _STEP_AT, -1)
        else:
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, _SIZE)

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """Record that the rank turns to the action at ``position``."""
        _ACTION.pack_into(self._memory, 0, position, time.monotonic(), waiting, shapes.encode())

    def at_device(self, place: tuple[int, bool, str] | None) -> None:
        """Record the position, waiting and shapes that the device has come to; None: it is not behind the host."""
        position, waiting, shapes = place or (_WITH_HOST, False, "")
        _ACTION.pack_into(self._memory, _DEVICE_AT, position, time.monotonic(), waiting, shapes.encode())

    def step(self, number: int) -> None:
        """Record that the rank begins step ``number``, from 0."""
        _STEP.pack_into(self._memory, _STEP_AT, number)
        self.at(NO_ACTION)

    def enter(self, phase: int) -> None:
        """Record the rank's ``phase``: what there is still to watch for."""
        _PHASE.pack_into(self._memory, _PHASE_AT, phase)

    def read(self, of_device: bool = False) -> RankProgress:
        """Return what was recorded last, of the host or, where it is behind, ``of_device``."""
        position, since_s, waiting, shapes = _ACTION.unpack_from(self._memory, _DEVICE_AT if of_device else 0)
        if position == _WITH_HOST:
            return self.read()
        (step,), (phase,) = _STEP.unpack_from(self._memory, _STEP_AT), _PHASE.unpack_from(self._memory, _PHASE_AT)
        text = shapes.rstrip(b"\0").decode(errors="ignore")
        return RankProgress(position, since_s, waiting, text, step, phase, of_device)

    def close(self) -> None:
        """Let go of the memory, in this process."""
        self._memory.close()
        os.close(self.descriptor)


TOGETHER_S = 0.4
"""MPICH kills all ranks within milliseconds of the first death; of deaths so close the earliest is the cause."""


def report_first(message: str, file: Path | None, died_s: float | None = None) -> bool:
    """Return True for the first of all ranks to call it; ``message`` is then in ``file``.

    Args:
        file: of the run, the same for all ranks and not there when they start. Without one, everybody is the first.
        died_s: ``time.time()`` when the rank that ``message`` is about was found dead. Of ranks that died almost at
            once the earliest is the first, whoever calls first.
    """
    if file is None:
        return True
    deaths = file.with_suffix(".deaths")
    try:
        if died_s is not None and not _died_first(died_s, deaths):
            return False
        with file.open("x") as new:  # exactly one of several can create it
            new.write(message + "\n")
    except FileExistsError:
        return False
    except OSError:
        return True  # a full or vanished disk must not silence the only message
    finally:
        if file.exists():
            deaths.unlink(missing_ok=True)
    return True


def _died_first(died_s: float, deaths: Path) -> bool:
    """Write the death down and return whether nobody died before: the launcher kills the others after the first."""
    with deaths.open("a") as log:
        log.write(f"{died_s!r}\n")  # short enough to be written whole
    time.sleep(TOGETHER_S)
    try:
        times = [float(line) for line in deaths.read_text().split()]
    except FileNotFoundError:
        return False  # the first has reported already
    return died_s == min(times)
