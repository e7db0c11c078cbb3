"""Operations of a region as a plan sees them: what they are made of, their rule on each axis, and when sums are known.

A step gives a *map*, whose rows are rows of the tile, or a *sum* over all rows of one, as pooling does. What is made of
sums alone, as the gate of a squeeze-and-excitation, has no rows: it is computed once, between two phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from parallel.space.rule import SAME, Rule

PRIOR = "~"
"""Between the name of a node and that of a step before its own."""


@dataclass(frozen=True, slots=True)
class Step:
    """One operation of a region.

    Attributes:
        name: of its value.
        maps: names of the maps that it takes.
        others: names of values without rows that it takes, made in the region.
        rules: (rows, columns).
        sides: rows and columns of its value; of a sum, those of the map that is summed.
        sums: its value is a sum over all rows and columns.
        plain: neither: no map takes part.
        flops: of its forward pass on the whole tile; bytes are of the whole tile, too.
        value_bytes: of its value.
        saves: maps that backward needs, of those it takes and its own value.
        kept_bytes: that backward needs besides, as the places of maxima.
        work_bytes: that live only while its backward pass runs, besides gradients of maps and parameters.
        param_bytes: of the parameters it uses.
        lies_in: map in whose memory its value lies; "" where it has its own.
        hands_on: its backward pass gives the gradient of its value on as it is.
        draws_whole: it draws a number for each px of the whole map, whatever of it is computed.
        normed: it normalises each channel of a map by the moments that are summed before it.
        copies_pads: where a box is padded on one side alone, what it takes is copied, and the copy kept.
    """

    name: str
    maps: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    rules: tuple[Rule, Rule] = (SAME, SAME)
    sides: tuple[int, int] = (0, 0)
    sums: bool = False
    plain: bool = False
    flops: float = 0.0
    value_bytes: int = 0
    saves: tuple[str, ...] = ()
    kept_bytes: int = 0
    work_bytes: int = 0
    param_bytes: int = 0
    lies_in: str = ""
    hands_on: bool = False
    copies_pads: bool = False
    draws_whole: bool = False
    normed: bool = False

    @property
    def inputs(self) -> tuple[str, ...]:
        return (*self.maps, *self.others)


def in_phases(steps: Sequence[Step]) -> list[tuple[list[Step], list[Step]]]:
    """Return by phase what is computed once, and then what is computed box by box.

    A sum is known when its phase is over; what is made of it belongs to the next. Each list keeps the order of
    ``steps``, which is that of the model.
    """
    known_from: dict[str, int] = {}
    phases: list[tuple[list[Step], list[Step]]] = []
    for step in steps:
        phase = max((known_from.get(name, 0) for name in step.inputs), default=0)
        known_from[step.name] = phase + step.sums
        while len(phases) <= phase:
            phases.append(([], []))
        phases[phase][0 if step.plain else 1].append(step)
    return phases
