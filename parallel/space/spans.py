"""Which rows of every map a box needs: from what it is to give, backwards through the steps to what enters them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel.space.span import Span
from parallel.space.step import Step


def needed_spans(
    steps: Sequence[Step], wanted: Mapping[str, Span], sides: Mapping[str, tuple[int, int]], axis: int
) -> dict[str, Span]:
    """Return the rows of each map that are computed, or fetched where no step makes it, along one axis.

    Args:
        wanted: the rows of a map that the box is to give, or that it adds to a sum, by name of the step; all of them
            not empty.
        sides: rows and columns of every map.
        axis: 0 for rows, 1 for columns.
    """
    spans = dict(wanted)
    for step in reversed(steps):
        rows = spans.get(step.name)
        if rows is None:
            continue
        for name in step.maps:
            side = sides[name][axis]
            need = step.rules[axis].need(rows, side).touching(side)
            spans[name] = need.hull(spans.get(name))
    return spans
