"""From an outline to a grid: the row each part stands in, chains that stand under each other, and folds.

Rows are longest ways from the input, as in layered drawings (Sugiyama, Tagawa and Toda 1981), with each stage in rows
of its own, so that a cut is a straight line. A value that several parts use is one net.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.draw.outline import Outline

UNEVEN = 20.0
"""Nets that may cross a fold before a column becomes twice as long as the others."""


@dataclass(frozen=True, slots=True)
class Net:
    """What part ``source`` gives to ``targets``; ``bytes`` of the largest share."""

    source: int
    targets: tuple[int, ...]
    bytes: int


def nets_of(outline: Outline) -> list[Net]:
    """One for each part whose values others use, in order."""
    targets: dict[int, list[int]] = {}
    sizes: dict[int, int] = {}
    for link in outline.links:
        targets.setdefault(link.source, []).append(link.target)
        sizes[link.source] = max(sizes.get(link.source, 0), link.bytes)
    return [Net(source, tuple(targets[source]), sizes[source]) for source in sorted(targets)]


def rows_of(outline: Outline, stages: Sequence[int]) -> list[int]:
    """Row of each part; ``stages`` is the stage of each. Layers of one block have rows of their own, too."""
    begins = {group.first for group in outline.groups} | {group.last + 1 for group in outline.groups}
    if outline.level in ("block", "module"):
        begins = set()
    sources: dict[int, list[int]] = {}
    users: dict[int, list[int]] = {}
    for link in outline.links:
        sources.setdefault(link.target, []).append(link.source)
        users.setdefault(link.source, []).append(link.target)
    rows: list[int] = []
    base = 0
    for number, stage in enumerate(stages):
        if number and (stage != stages[number - 1] or number in begins):
            base = max(rows) + 1
        rows.append(max([base, *(rows[source] + 1 for source in sources.get(number, ()))]))
    for number in reversed(range(len(rows))):
        # What needs nothing, such as a parameter, stands right above what uses it.
        if number not in sources and number in users and number > 0:
            rows[number] = max(rows[number], min(rows[user] for user in users[number]) - 1)
    return rows


def folds_of(rows: Sequence[int], nets: Sequence[Net], most: int) -> list[int]:
    """First row of each column: equal columns of about ``most`` rows, folded where few nets cross."""
    count = max(rows) + 1
    ideal = -(-count // -(-count // most))
    crossing = [0] * (count + 1)
    for net in nets:
        for row in range(rows[net.source] + 1, max(rows[target] for target in net.targets) + 1):
            crossing[row] += 1
    best, begin = [0.0], [0]
    for end in range(1, count + 1):
        starts = range(max(0, end - 2 * ideal), end)
        off = [abs(end - start - ideal) / ideal for start in starts]
        costs = [best[start] + crossing[start] + UNEVEN * part**2 for start, part in zip(starts, off, strict=True)]
        best.append(min(costs))
        begin.append(starts[costs.index(best[-1])])
    folds = [begin[count]]
    while folds[-1]:
        folds.append(begin[folds[-1]])
    return folds[::-1]


def chains_of(members: Sequence[int], rows: Sequence[int], sources: Mapping[int, Sequence[int]]) -> list[list[int]]:
    """Ways through ``members`` that do not meet, each to be drawn straight down; the trunk comes first."""
    chains: list[list[int]] = []
    chain_of: dict[int, int] = {}
    for number in sorted(members, key=lambda number: (rows[number], number)):
        open_ends = [
            chain_of[source]
            for source in sources.get(number, ())
            if source in chain_of and chains[chain_of[source]][-1] == source
        ]
        if not open_ends:
            chains.append([])
        chain_of[number] = min(open_ends, default=len(chains) - 1)
        chains[chain_of[number]].append(number)
    return chains
