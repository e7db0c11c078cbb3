"""Where a rank is, in memory that outlives it.

The rank writes step, action and shapes before every action, in under two microseconds; its guardian, another process,
reads them when the rank can no longer answer. The memory is a file that only open descriptors know.
"""

from __future__ import annotations

import mmap
import os
import struct
import time
from typing import NamedTuple

NO_ACTION = -1
"""Position of a rank that is in a step and at none of its actions."""
AT_REST = -2
"""Position of a rank between two steps, where it may take as long as it likes."""

WATCHED, LOST, SPOKEN, CLOSED = range(4)
"""A rank at work; one that lost another and waits to be ended; one that has said why it ends; one that ended well."""

SHAPES_BYTES = 256

_PLACE = struct.Struct(f"=qd?{SHAPES_BYTES}s")
_STEP = struct.Struct("=q")
_PHASE = struct.Struct("=b")
_STEP_AT = _PLACE.size
_PHASE_AT = _STEP_AT + _STEP.size
_SIZE = _PHASE_AT + _PHASE.size


class Place(NamedTuple):
    """What a rank was last heard to do.

    Attributes:
        position: in the rank's list of actions, or NO_ACTION or AT_REST.
        since_s: ``time.monotonic()`` when it began, the same clock in all processes of a machine.
        waiting: it needs other ranks to go on.
        shapes: of the tensors at hand, cut after SHAPES_BYTES bytes.
        step: from 0; -1 before the first.
        phase: WATCHED, LOST, SPOKEN or CLOSED.
    """

    position: int
    since_s: float
    waiting: bool
    shapes: str
    step: int
    phase: int


class ProgressRecord:
    """The shared record of one rank.

    Args:
        descriptor: of the record made by another process; None makes a new one.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            # Of no disk: there, the kernel writing the page back could hold up the rank that changes it. And of no
            # folder: /dev/shm may be small, full or read-only.
            descriptor = os.memfd_create("whereabouts")
            os.ftruncate(descriptor, _SIZE)
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, _SIZE)
            self.at(AT_REST)
            _STEP.pack_into(self._memory, _STEP_AT, -1)
        else:
            self.descriptor = descriptor
            self._memory = mmap.mmap(descriptor, _SIZE)

    def at(self, position: int, waiting: bool = False, shapes: str = "") -> None:
        """The rank turns to the action at ``position``."""
        _PLACE.pack_into(self._memory, 0, position, time.monotonic(), waiting, shapes.encode())

    def step(self, number: int) -> None:
        """The rank begins step ``number``, from 0."""
        _STEP.pack_into(self._memory, _STEP_AT, number)
        self.at(NO_ACTION)

    def turn(self, phase: int) -> None:
        """Tell the guardian what there is still to watch for."""
        _PHASE.pack_into(self._memory, _PHASE_AT, phase)

    def read(self) -> Place:
        position, since_s, waiting, shapes = _PLACE.unpack_from(self._memory, 0)
        (step,), (phase,) = _STEP.unpack_from(self._memory, _STEP_AT), _PHASE.unpack_from(self._memory, _PHASE_AT)
        return Place(position, since_s, waiting, shapes.rstrip(b"\0").decode(errors="ignore"), step, phase)

    def close(self) -> None:
        self._memory.close()
        os.close(self.descriptor)
