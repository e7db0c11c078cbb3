"""What is wrong with a plan of boxes, before anything is computed: what ``check`` is to schedules.

The boxes of a part give each px of what it gives once. Every step has the rows that its rule asks for, or they lie
outside the map, where it pads; and its rule gives as many rows as it has.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from parallel.space.span import Span
from parallel.space.step import Step

Spans = Mapping[str, Span]


def rule_faults(steps: Sequence[Step], sides: Mapping[str, tuple[int, int]]) -> list[str]:
    """Return the steps whose rules give other sides than they have, or whose maps differ in size."""
    found = []
    for step in steps:
        if step.plain:
            continue
        for axis, word in ((0, "rows"), (1, "columns")):
            given = {step.rules[axis].out(sides[name][axis]) for name in step.maps}
            if given != {step.sides[axis]}:
                found.append(f"{step.name} has {step.sides[axis]} {word}; its rule gives {sorted(given)}")
    return found


def span_faults(steps: Sequence[Step], spans: Spans, sides: Mapping[str, tuple[int, int]], axis: int) -> list[str]:
    """Return the rows that a box lacks along one axis.

    Args:
        spans: what it computes or fetches of each map.
    """
    found = []
    for step in steps:
        if step.name not in spans:
            continue
        for name in step.maps:
            need = step.rules[axis].need(spans[step.name], sides[name][axis]).within(sides[name][axis])
            if name not in spans or not spans[name].holds(need):
                found.append(f"{step.name} needs {tuple(need)} of {name}; there is {tuple(spans.get(name, ()))}")
    return found


def partition_faults(name: str, parts: Sequence[Span], side: int) -> list[str]:
    """Return the rows of a map that boxes give twice, or not at all."""
    counts = [0] * side
    for part in parts:
        for row in range(*part):
            counts[row] += 1
    return [f"row {row} of {name} is given {count} times" for row, count in enumerate(counts) if count != 1]
