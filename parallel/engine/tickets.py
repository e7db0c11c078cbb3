"""Data parallelism whose ranks draw their microbatches: slow and late workers compute fewer.

The gradient is that of fixed shares, whoever computed what. Its sum begins once nothing is left to draw, since no rank
knows before which microbatch is its last; a rank that drew none adds zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from parallel.comm.replicate import AveragedModule
from parallel.engine.data_parallel import DataParallelEngine
from parallel.engine.step import Microbatch
from parallel.schedule.tickets import Tickets


@dataclass(frozen=True, eq=False)
class DrawnMicrobatches:
    """A step's microbatches, to be had in any order.

    Attributes:
        share: those that are usually this rank's.
        take: gives microbatch i, each once; those of the share in order.
    """

    share: Sequence[int]
    take: Callable[[int], Microbatch]

    def __iter__(self) -> Iterator[Microbatch]:
        """Those of the share, for an engine that computes these."""
        return map(self.take, self.share)


class TicketEngine(DataParallelEngine):
    """As ``DataParallelEngine``, with ``step`` given ``DrawnMicrobatches``; ``share`` is what is read ahead.

    The last bits of sums follow the order in which ranks came to draw.
    """

    def _distributed(self, module: nn.Module) -> Callable[..., Any]:
        world = self._communicator.world
        self._counters = self._communicator.counters(Tickets.counters_for(world))
        self._tickets = Tickets(self._counters.add, self._communicator.rank, world, self._m)
        return AveragedModule(module, self._communicator, self._bucket_bytes)

    def _compute(self, microbatches: Iterable[Microbatch], step: int) -> dict[int, tuple[Tensor, int]]:
        assert isinstance(self._replica, AveragedModule), "step after close"
        assert isinstance(microbatches, DrawnMicrobatches), "no rank knows beforehand what it draws"
        computed = {}
        for i in self._tickets.of_step():
            loss, tiles = self._accumulate(i, self._time.begun(microbatches.take(i)), step)
            computed[i] = loss.cpu(), tiles  # waits for a GPU: a host ahead of it would draw what others are free for
            self._time.end(i)
        self._replica.average()
        self._time.summed()
        return computed

    def _sums_after(self, i: int) -> bool:
        return False

    def close(self) -> None:
        self._counters.close()
        super().close()
