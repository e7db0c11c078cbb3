"""The best partition for given devices: the slowest rank as fast as it can be, within the memory of each.

Takes the ``Windows`` of a graph, the link and the devices; gives a ``Partition``. Messages are charged to the
stage that receives the values: their bytes, and those of the gradients that go back. Among all partitions that are as
fast, the one with the fewest bytes between stages. Exact over all places where a cut may fall, by dynamic
programming as in PipeDream (Harlap et al., 2018, section 3.2), without replication. No torch here.

Pairs of stages on one rank are searched over at most ``PLACES`` places, spread over the model, and the cuts that
balance each stage alone. With no more places than that the result is exact, too. ``best_replicated`` gives stages
several replicas (Narayanan et al., SOSP 2019, section 3.1), to compare: the engine has one rank a stage.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from parallel.graph.partition import Loads, Partition, best_chain, too_many
from parallel.memory.windows import Windows, thinned
from parallel.plan.bottleneck import Pair, best_pairs

PLACES = 96
"""Where the stages of a pair may begin, ends included; the search takes the fourth power of it at worst."""
EVERY = slice(None)
"""Place: a matrix with all its rows."""


@dataclass(frozen=True)
class MemoryRule:
    """Bytes that the stages of each rank of a group may take.

    Attributes:
        limits: bytes, by rank.
        in_flight: by rank, every combination of numbers of microbatches in flight that it comes to, one number for each
            stage it holds, in ascending order (``rank_bytes.in_flight``).
        per_parameter: bytes that a rank holds for each byte of the parameters of a stage: they themselves, gradients,
            optimizer state.
        recompute: what is kept of a microbatch is what entered the stage.
        stashes: a rank, of one stage, holds a version of its parameters for each microbatch in flight.
    """

    limits: tuple[float, ...]
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    per_parameter: float
    recompute: bool = False
    stashes: bool = False


def partition_optimal(
    windows: Windows,
    stages: int,
    *,
    link_s: float = 0.0,
    speeds: Sequence[float] | None = None,
    memory: MemoryRule | None = None,
    paired: bool = False,
) -> Partition:
    """Return the partition into ``stages`` whose slowest rank is fastest; of those, the one with the fewest bytes sent.

    With more stages than ranks (interleaved: stage s on rank s mod D) the slowest stage is made as fast as it can be.
    Each stage of a rank may then take an equal part of its memory.

    Args:
        windows: between the places where stages may begin.
        link_s: per byte on a link between ranks.
        speeds: of the ranks of a group in order, as multiples of that which the seconds of ``windows`` are for; their
            number is that of the ranks. All 1 unless given.
        memory: of each rank; as much as it takes unless given.
        paired: two inverted replicas: rank k holds stages k and D-1-k, and computes both.

    Raises:
        ValueError: the model cannot be cut into so many stages, or not so that they fit the memory.
    """
    ranks = len(speeds) if speeds is not None else len(memory.limits) if memory is not None else stages
    assert stages % ranks == 0, (stages, ranks)
    assert not paired or stages == ranks, (stages, ranks)
    graph, places = windows.graph, windows.positions
    if not 1 <= stages < len(places):
        raise ValueError(too_many(graph, len(places) - 1, stages))
    speeds = [1.0] * ranks if speeds is None else speeds
    known: Sequence[int] | None = None
    if paired and len(few := thinned(graph, places, max(PLACES, 2 * stages))) < len(places):
        # Cuts that are good for each stage by itself are a good beginning.
        known = partition_optimal(windows, stages, link_s=link_s, speeds=speeds).starts
        windows = windows.among(sorted({*few, *known}))
    return Partition(graph, tuple(_Problem(windows, stages, link_s, speeds, memory, paired).solve(known)))


@dataclass(frozen=True, eq=False)
class _Problem:
    """Loads and bytes of all windows, for one choice of places."""

    windows: Windows
    stages: int
    link_s: float
    speeds: Sequence[float]
    memory: MemoryRule | None
    paired: bool

    def solve(self, known: Sequence[int] | None = None) -> list[int]:
        """Return where stages begin; those of pairs may begin at ``known`` positions."""
        travels = self._travels
        if self.paired:
            pairs = [self._pair(k) for k in range((self.stages + 1) // 2)]
            index = {position: n for n, position in enumerate(self.windows.positions)}
            places = None if known is None else [index[position] for position in known]
            _, cuts = best_pairs(pairs, travels, self.windows.seconds, places)
        else:
            _, cuts = best_chain(self._stage, self.stages, travels)
        if not cuts:
            raise ValueError(f"no {self.stages} stages fit the memory")
        return [self.windows.positions[cut] for cut in cuts]

    @property
    def _travels(self) -> Loads:
        """Bytes that a window receives, and returns."""
        windows = self.windows
        return windows.remembered(
            "travels", lambda: (windows.received_bytes + windows.returned_bytes).astype(np.float64)
        )

    def _seconds(self, speed: float) -> Loads:
        def load() -> Loads:
            return _only_windows(self.windows.seconds / speed + self.link_s * self._travels)

        return self.windows.remembered(("seconds", speed, self.link_s), load)

    def _stage(self, stage: int, rows: slice) -> Loads:
        load = self._seconds(self.speeds[stage % len(self.speeds)])[rows]
        if self.memory is None:
            return load
        in_flight, limit = self._alone(stage)
        per_parameter = self.memory.per_parameter + (in_flight - 1) * self.memory.stashes
        return np.where(self._bytes(in_flight, per_parameter, rows, computing=True) > limit, np.inf, load)

    def _alone(self, stage: int) -> tuple[int, float]:
        """Return the most microbatches in flight of a stage, and the bytes of its rank, or of its share of them."""
        assert self.memory is not None
        ranks = len(self.speeds)
        chunk, rank = divmod(stage, ranks)
        most = max(numbers[chunk] for numbers in self.memory.in_flight[rank])
        return most, self.memory.limits[rank] / (self.stages // ranks)

    def _bytes(self, in_flight: int, per_parameter: float, rows: slice = EVERY, *, computing: bool) -> Loads:
        """Return the bytes of windows that begin at some of the places; infinite where they would end before."""

        def fixed() -> Loads:
            own = per_parameter * self.windows.param_bytes
            return _only_windows((own + self._passing if computing else own).astype(np.float64))

        key = ("fixed", per_parameter, computing, self.memory is not None and self.memory.recompute)
        return self.windows.remembered(key, fixed)[rows] + in_flight * self._kept[rows]

    @property
    def _kept(self) -> Loads:
        """Bytes that each window keeps of a microbatch in flight."""
        assert self.memory is not None
        windows, recompute = self.windows, self.memory.recompute
        return windows.remembered(
            ("kept", recompute), lambda: (windows.entered_bytes if recompute else windows.kept_bytes).astype(np.float64)
        )

    @property
    def _passing(self) -> Loads:
        """Bytes that live besides in each window while it is computed."""
        return self.windows.peak_bytes - self._kept

    def _pair(self, k: int) -> Pair:
        """Return loads of stages k and D-1-k, and the parts of their ranks' memory that they fill in each state."""
        rule, other = self.memory, self.stages - 1 - k
        speed = min(self.speeds[k], self.speeds[other])
        load = self._seconds(speed)
        if k == other:  # its rank computes it for both replicas
            filled = []
            if rule is not None:
                most = max(number for (number,) in rule.in_flight[k])
                filled = [self._bytes(most, rule.per_parameter, computing=True) / rule.limits[k]]
            return Pair(np.stack([2 * load, *filled]), None, speed / 2)
        first, second = [load], [load]
        for rank in (k, other):
            if rule is None:
                continue
            own, limit = rule.per_parameter, rule.limits[rank]
            for computing, numbers in itertools.product((0, 1), rule.in_flight[rank]):
                if numbers[computing]:
                    first.append(self._bytes(numbers[0], own, computing=computing == 0) / limit)
                    second.append(self._bytes(numbers[1], own, computing=computing == 1) / limit)
        return Pair(np.stack(first), np.stack(second), speed)


def _only_windows(loads: Loads) -> Loads:
    """Return ``loads``, infinite where a window would end before it begins."""
    loads[np.tri(len(loads), dtype=bool)] = np.inf
    return loads


class ReplicatedStage(NamedTuple):
    """Parts ``start`` to ``stop``, not included, on so many ranks."""

    ranks: int
    start: int
    stop: int


def best_replicated(
    seconds: Sequence[float],
    parameter_bytes: Sequence[float],
    sent_bytes: Sequence[float],
    ranks: int,
    bandwidth: float,
) -> tuple[float, tuple[ReplicatedStage, ...]]:
    """Return the seconds of a minibatch in the steady state, and the stages; of equally fast ones, the fewest.

    A stage of q replicas takes the longer of its passes and of the sums of its gradients, 2 (q - 1) / bandwidth times
    its parameters, over q. The messages between two stages are shared by the replicas of the second.

    Args:
        seconds: forward and backward, of each part of the model in order.
        parameter_bytes: of each part.
        sent_bytes: of the values that each part hands on for a minibatch; those of the last do not count.
        ranks: of all stages together.
        bandwidth: bytes per second of a rank.
    """
    size = len(seconds)
    compute, weights = (np.concatenate([[0.0], np.cumsum(values)]) for values in (seconds, parameter_bytes))
    windows = np.triu(np.ones((size + 1, size + 1), dtype=bool), 1)
    ends = np.arange(size + 1)
    travels = 2 * np.concatenate([[0.0], np.asarray(sent_bytes, dtype=np.float64)]) / bandwidth

    def stage_s(replicas: int) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """(begin, end) -> seconds of a minibatch; infinite where nothing is between."""
        passes, sums = compute - compute[:, None], 2 * (replicas - 1) * (weights - weights[:, None]) / bandwidth
        return np.where(windows, np.maximum(passes, sums) / replicas, np.inf)

    by_replicas = {replicas: stage_s(replicas) for replicas in range(1, ranks + 1)}
    best = {count: by_replicas[count][0].copy() for count in by_replicas}  # of the first parts, on so many ranks
    last = {count: [(count, 0)] * (size + 1) for count in best}  # replicas of the last stage, and where it begins
    for count in best:
        for replicas in range(1, count):
            times = np.maximum(best[count - replicas][:, None], by_replicas[replicas])
            times = np.maximum(times, travels[:, None] / replicas)
            begins = times.argmin(axis=0)
            fastest = times[begins, ends]
            for place in np.flatnonzero(fastest < best[count] * (1 - 1e-9)).tolist():
                best[count][place], last[count][place] = fastest[place], (replicas, int(begins[place]))
    stages, count, end = [], ranks, size
    while end:
        replicas, begin = last[count][end]
        stages.append(ReplicatedStage(replicas, begin, end))
        count, end = count - replicas, begin
    return float(best[ranks][size]), tuple(reversed(stages))
