"""Shares of unequal workers: which data-parallel group computes which microbatches.

Takes what a user asks for; gives the microbatches of each group. A share is another assignment of the same
microbatches: weights, random numbers and running statistics go by the number of a microbatch, whoever computes it.
Letters: m microbatches, W groups (with ``ddp`` a rank each).
"""

from __future__ import annotations

import csv
import io
import itertools
from collections.abc import Sequence

Shares = tuple[tuple[int, ...], ...]
"""Microbatches of each group, rising; every microbatch is in one group's."""

FINE = 8
"""Microbatches for each group from which on shares follow speeds closely enough not to be warned of."""

COLUMNS = ["microbatch", "group"]


def consecutive(counts: Sequence[int]) -> Shares:
    """Return shares of so many microbatches each, the first group's first."""
    ends = itertools.accumulate(counts, initial=0)
    return tuple(tuple(range(a, b)) for a, b in itertools.pairwise(ends))


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


def read_owners(text: str) -> Shares:
    """Return the shares of a CSV file with the columns ``COLUMNS``, a row for each microbatch.

    Raises:
        ValueError: other columns, what is not a number, a microbatch missing or named twice, a group without one.
    """
    rows = [row for row in csv.reader(io.StringIO(text)) if row]
    if not rows or rows[0] != COLUMNS:
        raise ValueError(f"its first line is {','.join(COLUMNS)}; got {','.join(rows[0]) if rows else 'nothing'}")
    owners: dict[int, int] = {}
    for row in rows[1:]:
        if len(row) != 2 or not all(word.strip().isascii() and word.strip().isdigit() for word in row):
            raise ValueError(f"a line is two numbers from 0, microbatch and group; got {','.join(row)}")
        i, group = map(int, row)
        if i in owners:
            raise ValueError(f"microbatch {i} stands in it twice")
        owners[i] = group
    if missing := sorted(set(range(len(owners))) - owners.keys()):
        raise ValueError(f"microbatches are counted from 0, a line for each of them; {missing[0]} is missing")
    groups = sorted(set(owners.values()))
    if groups != list(range(len(groups))) or not groups:
        raise ValueError(f"groups are counted from 0, and each has a microbatch at least; got groups {groups}")
    return tuple(tuple(i for i in sorted(owners) if owners[i] == g) for g in groups)


def coarseness(microbatches: int, groups: int) -> float:
    """Return the largest part by which a step under the best shares may exceed one of finer and finer microbatches,
    where every group is given more than the one microbatch that it has to take.

    The last group to be done ends at T, and none of the others could have taken one more in less: (n + 1) t >= T of
    those, n t = T of it. So T sum(1 / t) <= m + W - 1, where the ideal is m / sum(1 / t).
    """
    return (groups - 1) / microbatches
