"""The best partition for given devices: the slowest rank as fast as it can be, within the memory of each.

Takes a ``LayerGraph``, seconds per layer, the link and the devices; gives a ``Partition``. Messages are charged to the
stage that receives the values: their bytes, and those of the gradients that go back. Among all partitions that are as
fast, the one with the fewest bytes between stages. Exact over all places where a cut may fall (up to 2,400), by dynamic
programming as in PipeDream (Harlap et al., 2018, section 3.2), without replication. No torch here.

Pairs of stages on one rank are searched over at most ``PLACES`` places at a time: first spread over the model, then
close around the best cuts. With no more places than that the result is exact, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition, cut_positions, too_many
from parallel.memory.windows import Windows, thinned
from parallel.plan.bottleneck import Loads, Pair, best_chain, best_pairs

PLACES = 72
"""Where the stages of a pair may begin, ends included; the search takes the fourth power of it at worst."""
ROUNDS = 3
"""Searches around the best cuts, at most."""
EVERY = slice(None)
"""Place: a matrix with all its rows."""


@dataclass(frozen=True)
class MemoryRule:
    """What the stages of each rank of a group may take.

    Attributes:
        limits: bytes, by rank.
        in_flight: by rank, every combination of numbers of microbatches in flight that it comes to, one number for each
            stage it holds, in ascending order (``rank_bytes.in_flight``).
        per_parameter: bytes that a rank holds for each byte of the parameters of a stage: they themselves, gradients,
            optimizer state; those of a pair's rank that keeps no optimizer state of the stage in ``per_other``.
        recompute: what is kept of a microbatch is what entered the stage.
    """

    limits: tuple[float, ...]
    in_flight: tuple[tuple[tuple[int, ...], ...], ...]
    per_parameter: float
    per_other: float | None = None
    recompute: bool = False


def partition_optimal(
    graph: LayerGraph,
    stages: int,
    seconds: Sequence[float],
    *,
    link_s: float = 0.0,
    speeds: Sequence[float] | None = None,
    memory: MemoryRule | None = None,
    paired: bool = False,
    positions: Sequence[int] | None = None,
    windows: Callable[[Sequence[int] | None], Windows] | None = None,
    explain: bool = True,
) -> Partition:
    """Return the partition into ``stages`` whose slowest rank is fastest; of those, the one with the fewest bytes sent.

    With more stages than ranks (interleaved: stage s on rank s mod D) the slowest stage is made as fast as it can be,
    and each stage of a rank may take an equal part of its memory.

    Args:
        graph: traced with a microbatch of the size in question.
        seconds: of each layer, forward and backward.
        link_s: per byte on a link between ranks.
        speeds: of the ranks of a group in order, as multiples of that which ``seconds`` are for; their number is that
            of the ranks. All 1 unless given.
        memory: of each rank; as much as it takes unless given.
        paired: two inverted replicas: rank k holds stages k and D-1-k, and computes both.
        positions: in ``graph.layers`` at which stages may begin; all places where a cut may fall unless given.
        windows: gives the windows between places, where searches share them; they are made anew unless given.
        explain: search the smallest memory that would do when this one does not.

    Raises:
        ValueError: the model cannot be cut into so many stages, or not so that they fit the memory: says the smallest
            that would do.
    """
    ranks = len(speeds) if speeds is not None else len(memory.limits) if memory is not None else stages
    assert stages % ranks == 0, (stages, ranks)
    assert not paired or stages == ranks, (stages, ranks)
    places = [0, *(cut_positions(graph) if positions is None else positions), len(graph.layers)]
    if not 1 <= stages < len(places):
        raise ValueError(too_many(graph, len(places) - 1, stages))
    speeds = [1.0] * ranks if speeds is None else speeds

    def search(chosen: Sequence[int] | None, known: Sequence[int] | None = None) -> tuple[float, list[int]]:
        between = Windows(graph, seconds, chosen) if windows is None else windows(chosen)
        return _Problem(between, stages, link_s, speeds, memory, paired, explain).solve(known)

    if not paired:
        _, starts = search(places if positions is not None else None)
        return Partition(graph, tuple(starts))
    few = thinned(graph, places, max(PLACES, 2 * stages))
    known: Sequence[int] | None = None
    if len(few) < len(places):  # cuts that are good for each stage by itself are a good beginning
        known = partition_optimal(
            graph, stages, seconds, link_s=link_s, speeds=speeds, positions=positions, windows=windows
        ).starts
        few = sorted({*few, *known})
    best, starts = search(few, known)
    for _ in range(ROUNDS):
        close = _around(places, few, starts)
        if len(few) == len(places) or close == few:
            break
        before, few = best, close
        best, starts = search(few, starts)
        if best >= before:
            break
    return Partition(graph, tuple(starts))


def _around(places: Sequence[int], few: Sequence[int], starts: Sequence[int]) -> list[int]:
    """Return ``starts``, and beside each as many places as there is room for, up to its neighbours in ``few``."""
    each = max(2, (PLACES - len(starts)) // max(1, 2 * (len(starts) - 1)))
    chosen = {places[0], places[-1], *starts}
    index, coarse = ({position: n for n, position in enumerate(line)} for line in (places, few))
    for start in starts[1:]:
        below, above = index[few[coarse[start] - 1]], index[few[coarse[start] + 1]]
        at = index[start]
        for end in (below, above):
            near = np.linspace(at, end, min(each, abs(end - at)) + 1).round().astype(int)
            chosen.update(places[n] for n in near)
    return sorted(chosen)


@dataclass(frozen=True, eq=False)
class _Problem:
    """Loads and bytes of all windows, for one choice of places."""

    windows: Windows
    stages: int
    link_s: float
    speeds: Sequence[float]
    memory: MemoryRule | None
    paired: bool
    explain: bool

    def solve(self, known: Sequence[int] | None = None) -> tuple[float, list[int]]:
        """Return the load of the slowest rank, and the positions where stages begin.

        Args:
            known: positions where stages of pairs may begin.
        """
        travels = self._travels
        if self.paired:
            pairs = [self._pair(k) for k in range((self.stages + 1) // 2)]
            index = {position: n for n, position in enumerate(self.windows.positions)}
            places = None if known is None else [index[position] for position in known]
            load, cuts = best_pairs(pairs, travels, self.windows.seconds, places)
        else:
            load, cuts = best_chain(self._stage, self.stages, travels)
        if not cuts:
            raise ValueError(self._too_small(travels) if self.explain else "no such stages fit the memory")
        return load, [self.windows.positions[cut] for cut in cuts]

    @property
    def _travels(self) -> Loads:
        """Bytes that a window receives, and gives back."""
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
        return np.where(self._bytes(in_flight, self.memory.per_parameter, rows, computing=True) > limit, np.inf, load)

    def _alone(self, stage: int) -> tuple[int, float]:
        """Return the most microbatches in flight of a stage, and the bytes of its rank, or of its share of them."""
        assert self.memory is not None
        ranks = len(self.speeds)
        chunk, rank = divmod(stage, ranks)
        most = max(numbers[chunk] for numbers in self.memory.in_flight[rank])
        return most, self.memory.limits[rank] / (self.stages // ranks)

    def _filled(self, stage: int, rows: slice) -> Loads:
        """Part of the memory that a stage alone on its rank, or in its part of the rank's memory, would fill."""
        assert self.memory is not None
        in_flight, limit = self._alone(stage)
        return self._bytes(in_flight, self.memory.per_parameter, rows, computing=True) / limit

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
            ("kept", recompute),
            lambda: (windows.entered_bytes if recompute else windows.kept_bytes).astype(np.float64),
        )

    @property
    def _passing(self) -> Loads:
        """Bytes that live besides in each window while it is computed."""
        return self.windows.peak_bytes - self._kept

    def _pair(self, k: int) -> Pair:
        other = self.stages - 1 - k
        speed = min(self.speeds[k], self.speeds[other])
        load = self._seconds(speed)
        most = () if self.memory is None else tuple(self._pair_filled(k))
        # The rank of a middle stage computes it for both replicas.
        return Pair((2 * load, None), most, speed / 2) if k == other else Pair((load, load), most, speed)

    def _pair_filled(self, k: int) -> list[tuple[Loads, Loads | None]]:
        """Return which parts of the memory of ranks k and D-1-k stages k and D-1-k fill, in each state that a rank
        comes to."""
        assert self.memory is not None
        rule, other = self.memory, self.stages - 1 - k
        if k == other:
            return [(self._filled_middle(k), None)]
        filled: list[tuple[Loads, Loads | None]] = []
        for rank in (k, other):
            own = rule.per_parameter
            not_own = own if rule.per_other is None else rule.per_other
            first, second = (own, not_own) if rank == k else (not_own, own)
            for left, right in rule.in_flight[rank]:
                for computing, number in ((0, left), (1, right)):
                    if number:
                        filled.append(
                            (
                                self._bytes(left, first, computing=computing == 0) / rule.limits[rank],
                                self._bytes(right, second, computing=computing == 1) / rule.limits[rank],
                            )
                        )
        return filled

    def _filled_middle(self, k: int) -> Loads:
        assert self.memory is not None
        most = max(number for (number,) in self.memory.in_flight[k])
        return self._bytes(most, self.memory.per_parameter, computing=True) / self.memory.limits[k]

    def _too_small(self, travels: Loads) -> str:
        """Say how much more memory it takes: the fullest rank made as empty as it can be."""
        assert self.memory is not None
        limits = self.memory.limits
        factor = self._fullest(travels)
        if len(set(limits)) == 1:
            needed = f"{factor * limits[0] / 2**30:.2f} GiB would do"
        else:
            needed = f"with {factor:.3f} times as much on every rank it would"
        given = ", ".join(f"{limit / 2**30:.2f}" for limit in dict.fromkeys(limits))
        return (
            f"no {self.stages} stages fit {given} GiB a rank; {needed}. Use more ranks, smaller microbatches, "
            "recomputation or smaller tiles"
        )

    def _fullest(self, travels: Loads) -> float:
        """Return which part of its memory the fullest rank fills at best."""
        if not self.paired:
            return best_chain(self._filled, self.stages, travels)[0]
        filled = [self._pair_filled(k) for k in range((self.stages + 1) // 2)]
        low, high, nothing = 0.0, 1.0, np.zeros_like(travels)

        def fits(factor: float) -> bool:
            pairs = [
                Pair(
                    (nothing, None if states[0][1] is None else nothing),
                    tuple((first / factor, None if second is None else second / factor) for first, second in states),
                )
                for states in filled
            ]
            return bool(np.isfinite(best_pairs(pairs, travels, nothing)[0]))

        while not fits(high):
            low, high = high, 2 * high
        while high - low > 1e-3 * high:
            middle = (low + high) / 2
            low, high = (low, middle) if fits(middle) else (middle, high)
        return high


def _only_windows(loads: Loads) -> Loads:
    """Return ``loads``, infinite where a window would end before it begins."""
    loads[np.tri(len(loads), dtype=bool)] = np.inf
    return loads
