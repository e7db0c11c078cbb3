"""The bytes of a checkpoint's file as parts of memory that another process can read, without a second copy of them.

Takes a state whose tensors lie in a shared buffer; gives offsets and lengths that, one after the other, are the file
that ``save_checkpoint`` would write. ``torch.save`` does the writing: where it writes from the buffer, the place is
noted instead; headers, names and check sums, some hundred kilobytes, are put behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from app.checkpoint.atomic_file import Span
from app.checkpoint.file import write_state
from app.checkpoint.shared_buffer import SharedBuffer


def image_of(state: dict[str, Any], buffer: SharedBuffer) -> list[Span]:
    """Parts of ``buffer`` that make the file of ``state``.

    Raises:
        OSError: there is no room for them.
    """
    sink = _PlacesSink(buffer.place)
    write_state(state, sink)
    behind = buffer.write_behind(sink.others)
    return [(offset if inside else behind + offset, length) for inside, offset, length in sink.parts]


class _PlacesSink:
    """Is written to, and notes from where.

    Attributes:
        others: what was not written from ``place``, in order.
        parts: whether a part was written from ``place``, otherwise it is of ``others``; its offset there and length.
    """

    def __init__(self, place: range) -> None:
        self._place = place
        self.others = bytearray()
        self.parts: list[tuple[bool, int, int]] = []

    def write(self, data: bytes, /) -> int:
        length = len(data)
        address = np.frombuffer(data, np.uint8).ctypes.data if length else 0
        inside = address in self._place
        if inside:
            offset = address - self._place.start
        else:
            offset = len(self.others)
            self.others += data
        if self.parts and self.parts[-1][0] == inside and sum(self.parts[-1][1:]) == offset:
            _, offset, before = self.parts.pop()
            length += before
        self.parts.append((inside, offset, length))
        return len(data)

    def flush(self) -> None:
        """Everything is where it is."""
