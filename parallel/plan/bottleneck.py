"""The cuts of a line whose largest load is smallest, by dynamic programming over matrices of windows.

Takes, for every stage, the load of each window [i, j) of places in line as a matrix; gives the places of the cuts. In
``best_chain`` every stage is a load of its own; in ``best_pairs`` stages k and D-1-k together are one, as on the ranks
of inverted replicas. Both are exact: first the smallest possible largest load, then, among all that reach it, the
fewest bytes. Infinite entries are windows that may not be used. No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

Loads = npt.NDArray[np.float64]


def best_chain(loads: Callable[[int, slice], Loads], stages: int, bytes_: Loads) -> tuple[float, list[int]]:
    """Return the cuts into ``stages`` windows.

    Args:
        loads: takes a stage and places, gives those rows of its (P, P) matrix; infinite where i >= j.
        bytes_: (P, P); the sum over the stages breaks ties.

    Returns:
        The largest load, infinite where no cuts will do, and the place where each stage begins.
    """
    best = loads(0, slice(0, 1))[0]
    for stage in range(1, stages):
        reached = _reached(best)
        if reached.start == reached.stop:
            return np.inf, []
        best = np.maximum(best[reached, None], loads(stage, reached)).min(axis=0)
    limit = float(best[-1])
    if not np.isfinite(limit):
        return limit, []
    total, chosen = np.where(loads(0, slice(0, 1))[0] <= limit, bytes_[0], np.inf), []
    for stage in range(1, stages):
        reached = _reached(total)
        sums = np.where(loads(stage, reached) <= limit, total[reached, None] + bytes_[reached], np.inf)
        chosen.append(reached.start + sums.argmin(axis=0))
        total = sums.min(axis=0)
    starts, end = [], bytes_.shape[0] - 1
    for begin in reversed(chosen):
        end = int(begin[end])
        starts.append(end)
    return limit, [0, *reversed(starts)]


def _reached(best: Loads) -> slice:
    """Return the places from the first to the last that the stages so far can end at; nothing begins beyond."""
    places = np.flatnonzero(np.isfinite(best))
    return slice(int(places[0]), int(places[-1]) + 1) if len(places) else slice(0, 0)


@dataclass(frozen=True)
class Pair:
    """Stages k and D-1-k, which share a rank.

    Attributes:
        loads: (of the first stage, of the second), whose sum is the load; the second is None for the middle stage of an
            odd number.
        most: sums of such matrices that may not be above 1.
        speed: work that a load of 1 does, at most.
    """

    loads: tuple[Loads, Loads | None]
    most: tuple[tuple[Loads, Loads | None], ...] = ()
    speed: float = 1.0

    def parts(self, bound: float) -> tuple[Loads, Loads, Loads]:
        """Return (n, P, P) of the first stage and of the second, what is summed of each, and (n, 1, 1) that sums may
        not exceed: loads, which may come to ``bound``, then ``most``."""
        first, second = zip(self.loads, *self.most, strict=True)
        return np.stack(first), np.stack(second), np.array([bound, *[1.0] * len(self.most)])[:, None, None]

    def at(self, places: npt.NDArray[np.int64]) -> Pair:
        """Return the pair with these places only."""
        grid = np.ix_(places, places)

        def among(loads: tuple[Loads, Loads | None]) -> tuple[Loads, Loads | None]:
            return loads[0][grid], None if loads[1] is None else loads[1][grid]

        return Pair(among(self.loads), tuple(map(among, self.most)), self.speed)

    def load(self, window: tuple[int, int], other: tuple[int, int]) -> float:
        """Return the load of two windows; infinite where they may not be."""

        def total(first: Loads, second: Loads | None) -> float:
            return float(first[window] + (0.0 if second is None else second[other]))

        return np.inf if any(total(*most) > 1 for most in self.most) else total(*self.loads)

    def middle(self) -> Loads:
        """Return the loads of the windows of a middle stage; infinite where they may not be."""
        load = self.loads[0].copy()
        for most, _ in self.most:
            load[most > 1] = np.inf
        return load


def best_pairs(
    pairs: Sequence[Pair], bytes_: Loads, work: Loads, known: Sequence[int] | None = None
) -> tuple[float, list[int]]:
    """Return the cuts into stages of which the first and the last, the second and the last but one, ... are one load.

    Args:
        pairs: from the outermost to the innermost.
        bytes_: (P, P); the sum over the stages breaks ties.
        work: (P, P), of each window, a sum over what is in it; shows early that what is left is too much.
        known: places where stages may begin; the better they are, the shorter the search.

    Returns:
        The largest load, infinite where no cuts will do, and the place where each stage begins.
    """
    size = bytes_.shape[0]
    bound = np.inf if known is None else _largest(pairs, [*known, size - 1])
    if np.isinf(bound) and size > 24:  # what fewer places can reach bounds the search over all of them
        few = np.unique(np.linspace(0, size - 1, size // 3).round().astype(int))
        bound, _ = best_pairs(
            [pair.at(few) for pair in pairs], *(matrix[np.ix_(few, few)] for matrix in (bytes_, work))
        )
    limit = _Search(pairs, bytes_, work, bound).smallest()
    return (limit, _Search(pairs, bytes_, work, limit).cuts()) if np.isfinite(limit) else (limit, [])


def _largest(pairs: Sequence[Pair], bounds: Sequence[int]) -> float:
    windows = list(pairwise(bounds))
    return max(pair.load(windows[k], windows[-1 - k]) for k, pair in enumerate(pairs))


class _Search:
    """The search from the outside in: ``value[i, j]`` is the best so far with all layers placed but those of window [i,
    j).

    Args:
        bound: loads above it are of no use.
    """

    def __init__(self, pairs: Sequence[Pair], bytes_: Loads, work: Loads, bound: float) -> None:
        self._bytes, self._work, self._bound = bytes_, work, bound
        self._speeds = [pair.speed for pair in pairs]
        self._outer = [pair for pair in pairs if pair.loads[1] is not None]
        self._middle = pairs[-1].middle() if pairs[-1].loads[1] is None else None
        self._size = bytes_.shape[0]
        self._in_order = np.tri(self._size, dtype=bool).T

    def smallest(self) -> float:
        """Return the largest load at best."""
        value = self._start()
        for k in range(len(self._outer)):
            value, _ = self._inward(k, value, np.maximum, count_bytes=False)
        if self._middle is not None:
            value = np.maximum(value, self._middle)
            return float(value.min())
        return float(np.diagonal(value).min())

    def cuts(self) -> list[int]:
        """Return the places where the stages begin: no load above the bound, fewest bytes."""
        value, ways = self._start(), []
        for k in range(len(self._outer)):
            value, way = self._inward(k, value, np.add, count_bytes=True)
            ways.append(way)
        if self._middle is None:
            i = j = int(np.diagonal(value).argmin())
            starts: list[int] = []
        else:
            total = np.where(self._middle <= self._bound, value + self._bytes, np.inf)
            i, j = (int(n) for n in np.unravel_index(int(total.argmin()), total.shape))
            starts = [i]
        for way in reversed(ways):
            starts.append(j)
            i, j = divmod(int(way[i, j]), self._size)
            starts.append(i)
        return sorted(starts)

    def _start(self) -> Loads:
        value = np.full((self._size, self._size), np.inf)
        value[0, -1] = 0.0
        return value

    def _inward(
        self, k: int, value: Loads, join: Callable[[Loads, Loads], Loads], *, count_bytes: bool
    ) -> tuple[Loads, npt.NDArray[np.int64]]:
        """Return ``value`` after pair ``k``, and the window around each window by which it is reached."""
        after = np.full_like(value, np.inf)
        way = np.zeros(value.shape, dtype=np.int64)
        first, second, bounds = self._outer[k].parts(self._bound)
        # Nothing summed is negative: what is too much alone is too much with the other stage, too.
        ends, begins = _extents(np.all(first <= bounds, axis=0)), _extents(np.all(second <= bounds, axis=0).T)
        for i, j in np.argwhere(np.isfinite(value)).tolist():
            # The first stage must not end behind the beginning of the second.
            across = slice(ends[i].start, min(ends[i].stop, j + 1))
            along = slice(max(begins[j].start, i), begins[j].stop)
            if across.start >= across.stop or along.start >= along.stop:
                continue
            sums = first[:, i, across, None] + second[:, None, along, j]
            allowed = (sums <= bounds).all(axis=0) & self._in_order[across, along]
            cost = self._bytes[i, across, None] + self._bytes[None, along, j] if count_bytes else sums[0]
            new = np.where(allowed, join(value[i, j], cost), np.inf)
            better = new < after[across, along]
            after[across, along][better] = new[better]
            way[across, along][better] = i * self._size + j
        left = sum(self._speeds[k + 1 :]) * self._bound * (1 + 1e-9)
        after[self._work > left] = np.inf
        return after, way


def _extents(allowed: npt.NDArray[np.bool_]) -> list[slice]:
    """Return for each row the places from the first to the last that is allowed."""
    count = allowed.shape[1]
    begin, end = allowed.argmax(axis=1), count - allowed[:, ::-1].argmax(axis=1)
    some = allowed.any(axis=1)
    return [slice(*bounds) for bounds in zip((begin * some).tolist(), (end * some).tolist(), strict=True)]
