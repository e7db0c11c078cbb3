"""A strategy cut into stages, and whether it fits: bytes of its ranks, worked out as far as they are asked for."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from parallel.graph.partition import Partition
from parallel.plan.stages import StageCache
from parallel.strategy import Strategy


@dataclass(frozen=True)
class Fitting:
    """A strategy with everything decided, its stages, and what its ranks take, as far as that is asked for."""

    strategy: Strategy
    partition: Partition
    cutting: StageCache

    @functools.cached_property
    def fits(self) -> bool:
        return self.fits_device and not self.over_bytes

    @functools.cached_property
    def fits_device(self) -> bool:
        """Known before all the rest where one of the first ranks takes too much."""
        limit = self.cutting.cluster.usable_bytes
        return all(self._peak(rank) <= limit for rank in range(self.strategy.depth))

    @functools.cached_property
    def peak_bytes(self) -> tuple[int, ...]:
        """Of every rank of a group; of a team's ranks what its largest member takes."""
        members = self.strategy.members
        return tuple(self._peak(seat) for seat in range(self.strategy.depth) for _ in range(members))

    @functools.cached_property
    def over_bytes(self) -> int:
        """By how much the fullest rank misses the memory, or the host's."""
        cluster = self.cutting.cluster
        over = max(self.peak_bytes) - cluster.usable_bytes
        policy = self.strategy.policy
        if (policy.moves or policy.stream) and cluster.host_bytes < math.inf:
            on_host = self.cutting.host_bytes(self.strategy, self.partition)
            # The host of a CPU is itself: what its ranks do not fill is free for what is moved.
            left = max(0, -over) if cluster.kind == "cpu" else 0
            over = max(over, on_host - round(cluster.host_bytes) - left)
        return max(0, over)

    @functools.cached_property
    def _peaks(self) -> dict[int, int]:
        return {}

    def _peak(self, rank: int) -> int:
        if rank not in self._peaks:
            self._peaks[rank] = self.cutting.rank_bytes(self.strategy, self.partition, rank).total
        return self._peaks[rank]
