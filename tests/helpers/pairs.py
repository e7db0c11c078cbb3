"""Of a grid of parameters, a part in which every pair of values occurs: what two of them do together is still seen."""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Sequence


def covering(rows: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Positions in ``rows``, combinations of values, of some that have every pair of values that ``rows`` have.

    Each time the first of those that add the most pairs is taken. With two values or fewer to a row, all are.
    """
    pairs = [set(itertools.combinations(enumerate(row), 2)) for row in rows]
    if not rows or len(rows[0]) < 3:
        return list(range(len(rows)))
    missing = set().union(*pairs)
    chosen: list[int] = []
    while missing:
        best = max(range(len(rows)), key=lambda k: len(pairs[k] & missing))
        missing -= pairs[best]
        chosen.append(best)
    return sorted(chosen)
