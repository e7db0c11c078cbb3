"""How many microbatches each group computes so that a step ends soonest, from what one takes each of them.

Letters: m microbatches, W groups; group r computes n_r of t_r seconds each, after a fixed c_r.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence


def best_counts(m: int, seconds: Sequence[float], fixed: Sequence[float] = ()) -> tuple[int, ...]:
    """Return n_r, at least 1 each, of least max(c_r + n_r t_r).

    Every group has one; the next always goes to who would be done with it first, and no other counts end sooner: were
    one of the last group's to go elsewhere, it would end there no earlier.

    Args:
        m: microbatches, at least W.
        seconds: t_r, above 0.
        fixed: c_r; empty: 0.
    """
    fixed = fixed or [0.0] * len(seconds)
    counts = [1] * len(seconds)
    ends = [(c + 2 * t, r) for r, (c, t) in enumerate(zip(fixed, seconds, strict=True))]
    heapq.heapify(ends)
    for _ in range(m - len(seconds)):
        end, r = heapq.heappop(ends)
        counts[r] += 1
        heapq.heappush(ends, (end + seconds[r], r))
    return tuple(counts)


def step_seconds(counts: Sequence[int], seconds: Sequence[float], fixed: Sequence[float] = ()) -> float:
    """Return max(c_r + n_r t_r)."""
    fixed = fixed or [0.0] * len(seconds)
    return max(c + n * t for n, t, c in zip(counts, seconds, fixed, strict=True))
