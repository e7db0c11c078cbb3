"""From the rows of one column to places side by side: where each chain stands, and in which lane each skip runs.

Widths are in units. A chain takes the width of a box, a lane one unit; both are put as far left as they can be, chains
before lanes and short lanes before long ones, so that skips nest beside the trunk as arcs do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from parallel.draw.graph_grid import Net, chains_of


@dataclass(frozen=True, slots=True)
class Lane:
    """Where the value of ``net`` runs down beside the boxes, to ``targets`` in this column.

    Attributes:
        x: unit.
        first: row of its source, or the row above the column where it comes from an earlier one.
        last: row of its last target, or the row below the column where it goes on to a later one.
    """

    net: Net
    targets: tuple[int, ...]
    x: int
    first: int
    last: int


@dataclass
class Column:
    """Rows ``first`` to ``last`` of the grid, placed.

    Attributes:
        x: unit at which the box of each part begins.
        straight: (source, target) that stand in one chain: drawn straight down.
        dropped: source at the end of a chain -> target that its line goes down to, beside other boxes.
        entering: net from an earlier column -> part it goes straight down to.
        leaving: nets that leave the column straight down from their source.
        width: units.
    """

    first: int
    last: int
    x: dict[int, int] = field(default_factory=dict)
    straight: set[tuple[int, int]] = field(default_factory=set)
    dropped: dict[int, int] = field(default_factory=dict)
    entering: dict[int, int] = field(default_factory=dict)
    leaving: set[int] = field(default_factory=set)
    lanes: list[Lane] = field(default_factory=list)
    width: int = 0


@dataclass
class _Space:
    """What is taken: row -> bits of units."""

    taken: dict[int, int] = field(default_factory=dict)

    def place(self, first: int, last: int, width: int, least: int = 0) -> int:
        """The leftmost unit from ``least`` on that is free in all rows; taken from now on."""
        union = 0
        for row in range(first, last + 1):
            union |= self.taken.get(row, 0)
        x = least
        while union >> x & ((1 << width) - 1):
            x += 1
        for row in range(first, last + 1):
            self.taken[row] = self.taken.get(row, 0) | ((1 << width) - 1) << x
        return x


def place_column(first: int, last: int, rows: Sequence[int], nets: Sequence[Net], box: int) -> Column:
    """Chains and lanes of rows ``first`` to ``last``.

    Args:
        rows: of each part, of all columns.
        box: units of a box and the space beside it.
    """
    column, space = Column(first, last), _Space()
    members = [number for number, row in enumerate(rows) if first <= row <= last]
    inside = set(members)
    sources: dict[int, list[int]] = {}
    for net in nets:
        for target in net.targets:
            sources.setdefault(target, []).append(net.source)
    chains = chains_of(members, rows, sources)
    column.straight = {pair for chain in chains for pair in pairwise(chain)}
    targets_of = {net.source: net.targets for net in nets}
    _ends(column, chains, rows, targets_of, sources, inside)
    for chain in chains:
        tail = chain[-1]
        end = rows[tail]
        if tail in column.leaving:
            end = last
        elif tail in column.dropped:
            end = rows[column.dropped[tail]]
        elif tail in targets_of:
            # Nothing begins right under it, or its wires would seem to lead there.
            end += 1
        x = space.place(rows[chain[0]], end, box)
        column.x |= dict.fromkeys(chain, x)
    wanted = []
    for net in nets:
        if rows[net.source] > last:
            continue
        targets = tuple(target for target in net.targets if target in inside and _needs_lane(column, rows, net, target))
        later = any(rows[target] > last for target in net.targets)
        if not targets and (not later or net.source in column.leaving):
            continue
        begin = rows[net.source] if net.source in inside else first - 1
        end = last + 1 if later and net.source not in column.leaving else max(rows[target] for target in targets)
        touched = [column.x[number] + box for number in (net.source, *targets) if number in column.x]
        wanted.append((end - begin, begin, max(touched, default=box), end, net, targets))
    for _, begin, least, end, net, targets in sorted(wanted, key=lambda want: (*want[:2], want[4].source)):
        x = space.place(begin, end, 1, least)
        column.lanes.append(Lane(net, targets, x, begin, end))
    column.width = max(bits.bit_length() for bits in space.taken.values())
    return column


def _ends(
    column: Column,
    chains: Sequence[Sequence[int]],
    rows: Sequence[int],
    targets_of: Mapping[int, Sequence[int]],
    sources: Mapping[int, Sequence[int]],
    inside: set[int],
) -> None:
    """How chains begin and end: from an earlier column, into a later one, or down to where they are joined."""
    for chain in chains:
        head, tail = chain[0], chain[-1]
        before = [source for source in sources.get(head, ()) if rows[source] < column.first]
        near = any(source in inside for source in sources.get(head, ()))
        if before and not near and rows[head] == column.first:
            source = max(before, key=lambda source: (rows[source], source))
            if source not in column.entering:
                column.entering[source] = head
        joins = [t for t in targets_of.get(tail, ()) if t in inside and rows[t] > rows[tail] + 1]
        if any(rows[target] > column.last for target in targets_of.get(tail, ())) and rows[tail] == column.last:
            column.leaving.add(tail)
        elif joins:
            column.dropped[tail] = min(joins, key=lambda target: (rows[target], target))


def _needs_lane(column: Column, rows: Sequence[int], net: Net, target: int) -> bool:
    if net.source not in column.x:
        return column.entering.get(net.source) != target
    adjacent = rows[target] == rows[net.source] + 1
    return not adjacent and (net.source, target) not in column.straight and column.dropped.get(net.source) != target
