"""Microbatches of a global batch, and the share of each data-parallel group, by speed where workers are unequal.

Any shares give the same step: weights, random numbers and running statistics go by the number of a microbatch, not by
the rank that computes it. Letters: m microbatches, W groups (with ``ddp`` a rank each); group r computes n_r of t_r
seconds each, after a fixed c_r.
"""

from __future__ import annotations

import csv
import functools
import heapq
import io
import itertools
from collections.abc import Sequence

Shares = tuple[tuple[int, ...], ...]
"""Microbatches of each group, rising; every microbatch is in one group's."""

FINE = 8
"""Microbatches for each group from which on shares follow speeds closely enough not to be warned of."""

WINDOW = 20
"""Steps of a running job between two looks at the speed of its groups."""

GAIN = 0.05
"""Part of a step that other shares have to save, by two windows in a row."""

COLUMNS = ["microbatch", "group"]
CHANGING = ["step", *COLUMNS]
"""Of shares that change while a run goes on: from which step on, counted from 0."""

Changes = tuple[tuple[int, Shares], ...]
"""Steps, rising from 0, and the shares from there on."""


@functools.lru_cache(maxsize=64)  # plans ask for the share of each of many groups
def split_batch(batch: int, m: int) -> tuple[range, ...]:
    """Return the tiles of each of ``m`` microbatches: consecutive, sizes differing by at most one, larger ones first.

    Raises:
        ValueError: fewer tiles than microbatches.
    """
    if not 1 <= m <= batch:
        raise ValueError(
            f"{batch} tiles cannot be cut into {m} microbatches of at least one tile: "
            "raise --batch or lower --microbatches"
        )
    return even_parts(batch, m)


def even_parts(count: int, parts: int) -> tuple[range, ...]:
    """Return consecutive ranges of sizes that differ by at most one, larger ones first; the last are empty where there
    are more of them than ``count``."""
    size, larger = divmod(count, parts)
    starts = [k * size + min(k, larger) for k in range(parts + 1)]
    return tuple(range(a, b) for a, b in itertools.pairwise(starts))


def share_of(rank: int, world: int, m: int) -> range:
    """Return the microbatches that ``rank`` of ``world`` computes: consecutive, counts differing by at most one.

    Raises:
        ValueError: fewer microbatches than ranks.
    """
    if m < world:
        raise ValueError(f"{m} microbatches cannot keep {world} ranks busy: raise --microbatches to {world} or more")
    return split_batch(m, world)[rank]


def consecutive(counts: Sequence[int]) -> Shares:
    """Return shares of so many microbatches each, the first group's first."""
    ends = itertools.accumulate(counts, initial=0)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


def most_unlike(microbatches: int, groups: int) -> tuple[Shares, ...]:
    """Return shares that have nothing in common: in each, one group computes all but what every other has to."""
    most = microbatches - groups + 1
    return tuple(consecutive([most if g == turn else 1 for g in range(groups)]) for turn in reversed(range(groups)))


def parse_counts(text: str) -> Shares | None:
    """Return the shares of counts such as "3,1"; None where the text is not counts.

    Raises:
        ValueError: a group has none.
    """
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() for word in words):
        return None
    counts = [int(word) for word in words]
    if 0 in counts:
        raise ValueError(f"every group computes a microbatch at least; got {text}: start fewer ranks instead")
    return consecutive(counts)


def read_changes(text: str) -> Changes:
    """Return the shares of a CSV file with the columns ``COLUMNS``, a row for each microbatch, or with ``CHANGING``,
    these rows for each step from which others are in force.

    Raises:
        ValueError: what is wrong with its columns, numbers, microbatches, groups or steps.
    """
    head, *rows = [row for row in csv.reader(io.StringIO(text.removeprefix("\ufeff"))) if row] or [[]]
    if head not in (COLUMNS, CHANGING):
        asked = f"{','.join(COLUMNS)} or {','.join(CHANGING)}"
        raise ValueError(f"its first line is {asked}; got {','.join(head) or 'nothing'}")
    owners: dict[int, dict[int, int]] = {}
    for row in rows:
        if len(row) != len(head) or not all(word.strip().isascii() and word.strip().isdigit() for word in row):
            raise ValueError(f"a line is {len(head)} numbers from 0, {', '.join(head)}; got {','.join(row)}")
        *step, i, group = map(int, row)
        of_step = owners.setdefault(step[0] if step else 0, {})
        if i in of_step:
            raise ValueError(f"microbatch {i} stands in it twice")
        of_step[i] = group
    changes = tuple((step, _shares(owners[step])) for step in sorted(owners))
    if not changes or changes[0][0] != 0:
        known = f"it begins at step {changes[0][0]}" if changes else "it has none"
        raise ValueError(f"a run begins at step 0, of which it has no line: {known}")
    sizes = {step: (sum(map(len, shares)), len(shares)) for step, shares in changes}
    if odd := [step for step, size in sizes.items() if size != sizes[0]]:
        raise ValueError(
            f"it has {sizes[0][0]} microbatches of {sizes[0][1]} groups at step 0, and {sizes[odd[0]][0]} of "
            f"{sizes[odd[0]][1]} at step {odd[0]}: a run keeps both"
        )
    return changes


def _shares(owners: dict[int, int]) -> Shares:
    if missing := sorted(set(range(len(owners))) - owners.keys()):
        raise ValueError(f"microbatches are counted from 0, a line for each of them; {missing[0]} is missing")
    groups = sorted(set(owners.values()))
    if groups != list(range(len(groups))):
        raise ValueError(f"groups are counted from 0, and each has a microbatch at least; got groups {groups}")
    return tuple(tuple(i for i in sorted(owners) if owners[i] == g) for g in groups)


def rows_of(step: int, shares: Shares) -> list[list[int]]:
    """Return the rows of ``CHANGING`` for shares in force from ``step`` on."""
    owners = {i: group for group, share in enumerate(shares) for i in share}
    return [[step, i, owners[i]] for i in sorted(owners)]


def coarseness(microbatches: int, groups: int) -> float:
    """Return the largest part by which the best shares exceed the step of ever finer microbatches, if each has several.

    The last group to be done ends at T, and none of the others could have taken one more in less: (n + 1) t >= T of
    those, n t = T of it. So T sum(1 / t) <= m + W - 1, where the ideal is m / sum(1 / t).
    """
    return (groups - 1) / microbatches


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


class Rebalancing:
    """Counts of microbatches of a running job, which follow measured speeds and are steady under noise.

    All ranks are given the same tables of seconds and so decide alike. After LB-BSP (Chen et al. 2018): adapt at the
    boundaries of steps.
    """

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self._before: tuple[float, ...] | None = None

    def look(self, seconds: Sequence[float]) -> bool:
        """Take the seconds that a microbatch took each group in the window that ends now; True where ``counts`` change.

        They do where the best ones for this window save ``GAIN`` of a step in it, and would have in the one before.
        """
        before, self._before = self._before, tuple(seconds)
        best = best_counts(sum(self.counts), seconds)
        if before is None or not (self._saves(best, seconds) and self._saves(best, before)):
            return False
        self.counts, self._before = best, None
        return True

    def _saves(self, counts: Sequence[int], seconds: Sequence[float]) -> bool:
        return step_seconds(counts, seconds) < (1 - GAIN) * step_seconds(self.counts, seconds)
