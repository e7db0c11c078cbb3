"""The bytes of a checkpoint's file as parts of memory that another process can read, without a second copy of them.

Takes a state whose tensors lie in a shared buffer; gives offsets and lengths that, one after the other, are the file
that ``save_checkpoint`` would write. ``torch.save`` does the writing: where it writes from the buffer, the offset is
noted instead; headers, names and check sums, some hundred kilobytes, are put behind it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from app.checkpoint.atomic_file import Span
from app.checkpoint.file import write_state
from app.checkpoint.shared_buffer import SharedBuffer


def image_of(state: dict[str, Any], buffer: SharedBuffer) -> list[Span]:
    """Return the parts of ``buffer`` that make the file of ``state``.

    Raises:
        OSError: there is no room for them.
    """
    sink = _OffsetSink(buffer.addresses)
    write_state(state, sink)
    behind = buffer.write_behind(sink.others)
    return [(offset if inside else behind + offset, length) for inside, offset, length in sink.spans]


class _OffsetSink:
    """A sink that notes from where it is written to.

    Args:
        addresses: of the buffer.

    Attributes:
        others: what was not written from ``addresses``, in order.
        spans: whether bytes were written from ``addresses``, otherwise they are of ``others``; offset there and length.
    """

    def __init__(self, addresses: range) -> None:
        self._addresses = addresses
        self.others = bytearray()
        self.spans: list[tuple[bool, int, int]] = []

    def write(self, data: bytes, /) -> int:
        """Note where ``data`` lies; return its length."""
        length = len(data)
        address = np.frombuffer(data, np.uint8).ctypes.data if length else 0
        inside = address in self._addresses
        if inside:
            offset = address - self._addresses.start
        else:
            offset = len(self.others)
            self.others += data
        if self.spans and self.spans[-1][0] == inside and sum(self.spans[-1][1:]) == offset:
            _, offset, before = self.spans.pop()
            length += before
        self.spans.append((inside, offset, length))
        return len(data)

    def flush(self) -> None:
        """Do nothing: everything is where it is."""
