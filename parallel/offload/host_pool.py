"""Host memory for what is moved off a device: taken once, used again and again, within a budget.

Page-locking memory takes far longer than a copy, so buffers that are given back are kept for the next use. Sizes are
rounded up to a few steps per power of two, so that a buffer fits many tensors. A buffer takes its size of the host's
memory, and none once it is freed.
"""

from __future__ import annotations

from collections import defaultdict

from torch import Tensor

from parallel.memory.policy import buffer_bytes
from parallel.offload.copies import Copies


class HostPool:
    """Buffers of one rank.

    Args:
        copies: of its device; they know what host memory suits them.
        budget: bytes that may be taken; None: no limit.

    Attributes:
        bytes: in use now.
        peak_bytes: most that were in use at a time.
        taken_bytes: of all buffers, in use or not.
    """

    def __init__(self, copies: Copies, budget: int | None = None) -> None:
        self.bytes = 0
        self.peak_bytes = 0
        self.taken_bytes = 0
        self._copies = copies
        self._budget = budget
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    def take(self, size: int) -> Tensor | None:
        """Room for ``size`` bytes, uint8 (>= size,); None where the budget has none left."""
        room = buffer_bytes(size)
        if self._free[room]:
            buffer = self._free[room].pop()
        else:
            if self._budget is not None and self.taken_bytes + room > self._budget:
                self._release(self.taken_bytes + room - self._budget)
                if self.taken_bytes + room > self._budget:
                    return None
            buffer = self._copies.empty_on_host(room)
            self.taken_bytes += room
        self.bytes += room
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        return buffer

    def give(self, buffer: Tensor) -> None:
        """Take ``buffer`` back, once no copy reads or writes it any more."""
        self.bytes -= buffer.numel()
        self._free[buffer.numel()].append(buffer)

    def _release(self, size: int) -> None:
        """Give up unused buffers of other sizes, the largest first, until ``size`` bytes are free."""
        for room in sorted(self._free, reverse=True):
            while self._free[room] and size > 0:
                self._free[room].pop()
                self.taken_bytes -= room
                size -= room
