"""Which share of each map a box computes, and where it is padded on one side alone.

Takes the steps of a part, what a box is to give, and the cuts; gives shares by name, which bytes and flops of the whole
tile are multiplied by.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from parallel.space.grid import cells
from parallel.space.span import Span
from parallel.space.spans import needed_spans
from parallel.space.step import Step

Cuts = tuple[tuple[int, ...], tuple[int, ...]]
"""Of rows and of columns, in px of the tile, ends included."""


@dataclass(frozen=True)
class Shares:
    """Of one box.

    Attributes:
        computed: by name of a map or sum, the share of it that the box computes, or fetches.
        given: by name of what it gives, the share that is its own.
        padded: names of steps that lack rows or columns on one side more than on the other.
    """

    computed: Mapping[str, float]
    given: Mapping[str, float]
    padded: frozenset[str]


def shares_of(
    steps: Sequence[Step],
    across: Sequence[Step],
    sides: Mapping[str, tuple[int, int]],
    cuts: Cuts,
    box: tuple[int, int],
) -> Shares:
    """Return those of one box.

    Args:
        steps: of the part; those before it count as well.
        across: steps whose values leave the part.
        sides: rows and columns of every map.
        box: (row, column) of it.
    """
    own: list[dict[str, Span]] = []
    spans: list[dict[str, Span]] = []
    for axis in (0, 1):
        owned = {step.name: cells(cuts[axis], step.sides[axis])[box[axis]] for step in across}
        own.append(owned)
        spans.append(needed_spans(steps, {n: rows for n, rows in owned.items() if rows.size}, sides, axis))
    whole = {**sides, **{step.name: step.sides for step in steps}}
    computed = {
        name: rows.size * spans[1][name].size / math.prod(whole[name])
        for name, rows in spans[0].items()
        if name in spans[1]
    }
    given = {
        step.name: own[0][step.name].size * own[1][step.name].size / math.prod(step.sides)
        for step in across
        if step.name in computed
    }
    padded = frozenset(
        step.name
        for step in steps
        if step.copies_pads
        and step.name in computed
        and any(_lopsided(step, spans[axis], sides[step.maps[0]][axis], axis) for axis in (0, 1))
    )
    return Shares(computed, given, padded)


def _lopsided(step: Step, spans: Mapping[str, Span], side: int, axis: int) -> bool:
    need = step.rules[axis].need(spans[step.name], side)
    return max(0, -need.start) != max(0, need.stop - side)
