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

LINK_CTAS = 4
"""Thread blocks of a link at most; NCCL_MAX_CTAS in the environment goes before it. A receive that waits for its
sender holds its thread blocks, by default up to 32, and what is computed meanwhile has to do without them."""


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

    def make(self, pairs: Iterable[tuple[int, int]], by_all: bool) -> None:
        """Make and connect this rank's links of ``pairs`` (sender, receiver), which are those of all ranks.

        Every rank of the run comes here with the same pairs. A group is named after the number of calls before it, so
        that those outside a pair count with it. ``use_local_synchronization`` would spare them that, but counts what
        each rank has made by itself: the two of a pair would wait for each other under different names.

        Args:
            by_all: every rank of the run calls this. If only some do, all ranks must have made these links before:
                groups that make links by themselves give them the same names, and connect to each other's ranks.
        """
        new = sorted(set(pairs) - self._asked)
        assert by_all or not new, f"links {new} are made by some ranks only: connect the whole run before its subgroups"
        self._asked.update(new)
        made = {pair: dist.new_group(pair, self._timeout, self._backend, pg_options=self._options()) for pair in new}
        own = {pair: group for pair, group in made.items() if self._rank in pair}
        self._groups |= own
        # NCCL connects at the first message, and the first of two ranks to come waits there for the other: all meet in
        # one order, as those of a schedule may be waited for in a circle.
        for source, target in own:
            word = torch.zeros(1, device=self._device)
            (self.isend(word, target) if source == self._rank else self.irecv(word, source)).wait()

    def isend(self, flat: Tensor, target: int) -> Any:
        return dist.isend(bytes_of(flat), target, self._group(self._rank, target))

    def irecv(self, flat: Tensor, source: int) -> Any:
        return dist.irecv(bytes_of(flat), source, self._group(source, self._rank))

    def _options(self) -> Any:
        if self._backend != "nccl":
            return None
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        options.config.max_ctas = LINK_CTAS
        return options

    def _group(self, source: int, target: int) -> Any:
        assert (source, target) in self._groups, f"rank {source} was never connected to send to rank {target}"
        return self._groups[source, target]


def bytes_of(flat: Tensor) -> Tensor:
    """NCCL has no 16-bit integers, nor unsigned ones of more than 8 bits."""
    return flat.view(torch.uint8)
