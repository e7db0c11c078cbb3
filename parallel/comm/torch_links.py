"""Links between GPUs over NCCL: a process group of two ranks for each direction in which one sends to the other.

Takes the pairs of ranks that will talk; makes the groups of this rank's own and connects them. NCCL knows no tags and
performs the operations of one group in turn, so that two directions in one group would wait for each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Links:
    """The groups of one rank for messages to others.

    Args:
        rank: of the whole run, as are all others here.
        timeout: how long an operation waits for the other rank.
        device: of the tensors that will be sent.
    """

    def __init__(self, rank: int, timeout: timedelta, device: torch.device, backend: str = "nccl") -> None:
        self._rank = rank
        self._timeout = timeout
        self._device = device
        self._backend = backend
        self._asked: set[tuple[int, int]] = set()
        self._groups: dict[tuple[int, int], Any] = {}

    def make(self, pairs: Iterable[tuple[int, int]]) -> None:
        """Make and connect this rank's links of ``pairs`` (sender, receiver), which are those of all ranks.

        Every rank of the run comes here with the same pairs. A group is named after the number of calls before it, so
        that those outside a pair count with it. ``use_local_synchronization`` would spare them that, but counts what
        each rank has made by itself: the two of a pair would wait for each other under different names.
        """
        new = sorted(set(pairs) - self._asked)
        self._asked.update(new)
        made = {pair: dist.new_group(pair, self._timeout, self._backend) for pair in new}
        own = {pair: group for pair, group in made.items() if self._rank in pair}
        self._groups |= own
        # NCCL connects at the first message, and the first of two ranks to come waits there for the other: all meet in
        # one order, as those of a schedule may be waited for in a circle.
        for source, target in own:
            word = torch.zeros(1, device=self._device)
            (self.isend(word, target) if source == self._rank else self.irecv(word, source)).wait()

    def isend(self, flat: Tensor, target: int) -> Any:
        return dist.isend(flat, target, self._group(self._rank, target))

    def irecv(self, flat: Tensor, source: int) -> Any:
        return dist.irecv(flat, source, self._group(source, self._rank))

    def _group(self, source: int, target: int) -> Any:
        assert (source, target) in self._groups, f"rank {source} was never connected to send to rank {target}"
        return self._groups[source, target]
