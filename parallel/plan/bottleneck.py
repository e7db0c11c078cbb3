"""The cuts of a line into pairs of stages whose largest load is smallest, by dynamic programming over matrices.

Takes, for stages k and D-1-k together, as on the ranks of inverted replicas, the load of each window [i, j) of places
in line as a matrix; gives the places of the cuts. As exact as ``graph.partition.best_chain``, in which every stage is a
load of its own. No torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from parallel.graph.partition import Loads


@dataclass(frozen=True)
class Pair:
    """Stages k and D-1-k, which share a rank.

    Attributes:
        first: (n, P, P) of the first stage; (n, P, P) of the ``second`` likewise, None for the middle stage of an odd
            number. What both have added up is a load, and shares of memory that may not be above 1.
        speed: work that a load of 1 does, at most.
    """

    first: Loads
    second: Loads | None
    speed: float = 1.0

    def at(self, places: npt.NDArray[np.int64]) -> Pair:
        """Return the pair with these places only."""
        rows, second = places[:, None], self.second
        return Pair(self.first[:, rows, places], second if second is None else second[:, rows, places], self.speed)

    def load(self, window: tuple[int, int], other: tuple[int, int]) -> float:
        """Return the load of two windows; infinite where they may not be."""
        load, *shares = self.first[:, *window] + (0.0 if self.second is None else self.second[:, *other])
        return np.inf if any(share > 1 for share in shares) else float(load)


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
    bound = np.inf
    if known is not None:
        windows = list(pairwise([*known, size - 1]))
        bound = max(pair.load(windows[k], windows[-1 - k]) for k, pair in enumerate(pairs))
    if np.isinf(bound) and size > 24:  # what fewer places can reach bounds the search over all of them
        few = np.unique(np.linspace(0, size - 1, size // 3).round().astype(int))
        grid = np.ix_(few, few)
        bound, _ = best_pairs([pair.at(few) for pair in pairs], bytes_[grid], work[grid])
    limit, _ = _search(pairs, None, work, bound)
    return (limit, _search(pairs, bytes_, work, limit)[1]) if np.isfinite(limit) else (limit, [])


def _search(pairs: Sequence[Pair], bytes_: Loads | None, work: Loads, bound: float) -> tuple[float, list[int]]:
    """Return the smallest largest load, or the fewest bytes, with no load above ``bound``, and the cuts.

    From the outside in: ``value[i, j]`` is the best so far with all layers placed but those of window [i, j).
    """
    size, join = len(work), np.maximum if bytes_ is None else np.add
    value, ways = np.full((size, size), np.inf), []
    value[0, -1] = 0.0
    for k, pair in enumerate(pairs):
        if pair.second is not None:
            value, way = _inward(pair, value, bytes_, bound)
            value[work > sum(inner.speed for inner in pairs[k + 1 :]) * bound * (1 + 1e-9)] = np.inf
            ways.append(way)
    middle = pairs[-1].first if pairs[-1].second is None else None
    if middle is None:
        total = np.where(np.eye(size, dtype=bool), value, np.inf)
    else:
        allowed = (middle <= _bounds(bound, len(middle))).all(axis=0)
        total = np.where(allowed, join(value, middle[0] if bytes_ is None else bytes_), np.inf)
    i, j = divmod(int(total.argmin()), size)
    best, starts = float(total[i, j]), [] if middle is None else [i]
    for way in reversed(ways):
        starts.append(j)
        i, j = divmod(int(way[i, j]), size)
        starts.append(i)
    return best, sorted(starts)


def _bounds(load: float, count: int) -> Loads:
    """Return (count, 1, 1) that sums may not exceed: a load, then shares of memory."""
    return np.array([load, *[1.0] * (count - 1)])[:, None, None]


def _inward(pair: Pair, value: Loads, bytes_: Loads | None, bound: float) -> tuple[Loads, npt.NDArray[np.int64]]:
    """Return ``value`` after a pair, and the window around each window by which it is reached."""
    size, first, second = len(value), pair.first, pair.second
    assert second is not None
    bounds, in_order = _bounds(bound, len(first)), np.tri(size, dtype=bool).T
    after, way = np.full_like(value, np.inf), np.zeros(value.shape, dtype=np.int64)
    # Nothing summed is negative: what is too much alone is too much with the other stage, too.
    ends, begins = _extents(np.all(first <= bounds, axis=0)), _extents(np.all(second <= bounds, axis=0).T)
    for i, j in np.argwhere(np.isfinite(value)).tolist():
        # The first stage must not end behind the beginning of the second.
        across = slice(ends[i].start, min(ends[i].stop, j + 1))
        along = slice(max(begins[j].start, i), begins[j].stop)
        if across.start >= across.stop or along.start >= along.stop:
            continue
        sums = first[:, i, across, None] + second[:, None, along, j]
        allowed = (sums <= bounds).all(axis=0) & in_order[across, along]
        if bytes_ is None:
            joined = np.maximum(value[i, j], sums[0])
        else:
            joined = value[i, j] + (bytes_[i, across, None] + bytes_[None, along, j])
        new = np.where(allowed, joined, np.inf)
        better = new < after[across, along]
        after[across, along][better] = new[better]
        way[across, along][better] = i * size + j
    return after, way


def _extents(allowed: npt.NDArray[np.bool_]) -> list[slice]:
    """Return for each row the places from the first to the last that is allowed."""
    count = allowed.shape[1]
    begin, end = allowed.argmax(axis=1), count - allowed[:, ::-1].argmax(axis=1)
    some = allowed.any(axis=1)
    return [slice(*bounds) for bounds in zip((begin * some).tolist(), (end * some).tolist(), strict=True)]
