"""Operations of a region as a plan sees them: steps, and the rule of each on an axis: rows it gives, rows it needs.

A window moves over its input: convolutions, pools, pads, crops, strides, pixel unshuffle, and all that works row by
row. A transposed window spreads each row: transposed convolutions and pixel shuffle. Resampling looks rows up, and so
do pads that mirror or repeat rows of the map. Adaptive pooling divides it into cells. Rows outside the map are padded
where they are needed, at that operation, and never computed.

A step gives a *map*, whose rows are rows of the tile, or a *sum* over all rows of one, as pooling does. What is made of
sums alone, as the gate of a squeeze-and-excitation, has no rows: it is computed once, between two phases.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from parallel.space.cuts import Span


class Rule(Protocol):
    """One axis of an operation."""

    def out(self, side: int) -> int:
        """Return the rows that come of ``side`` rows."""
        ...

    def need(self, rows: Span, side: int) -> Span:
        """Return the rows of the input, which has ``side``, that ``rows`` of the output are made of: those outside it
        are padding."""
        ...


@dataclass(frozen=True, slots=True)
class Window:
    """A window of ``kernel`` rows, ``dilation`` apart, that moves by ``stride`` over the map and the rows padded
    ``before`` and ``after`` it; a negative pad crops.

    Attributes:
        ceil: a last window that leaves the padded map counts, if it begins within the map or the pad before it.
    """

    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    before: int = 0
    after: int = 0
    ceil: bool = False

    @property
    def reach(self) -> int:
        """Rows from the first of a window to its last, both counted."""
        return self.dilation * (self.kernel - 1) + 1

    def out(self, side: int) -> int:
        room = side + self.before + self.after - self.reach
        if not self.ceil:
            return room // self.stride + 1
        rows = -(-room // self.stride) + 1
        return rows - 1 if (rows - 1) * self.stride >= side + self.before else rows

    def need(self, rows: Span, side: int) -> Span:
        first = rows.start * self.stride - self.before
        return Span(first, first + (rows.size - 1) * self.stride + self.reach)


@dataclass(frozen=True, slots=True)
class Transposed:
    """The transpose of a window: row r of the input goes to rows r * stride - padding and the ``kernel`` - 1 after it,
    ``dilation`` apart."""

    kernel: int
    stride: int
    dilation: int = 1
    padding: int = 0
    output_padding: int = 0

    @property
    def reach(self) -> int:
        """Rows from the first to the last that one row of the input goes to."""
        return self.dilation * (self.kernel - 1) + 1

    def out(self, side: int) -> int:
        return (side - 1) * self.stride - 2 * self.padding + self.reach + self.output_padding

    def need(self, rows: Span, side: int) -> Span:
        first = -((self.reach - 1 - rows.start - self.padding) // self.stride)
        return Span(first, (rows.stop - 1 + self.padding) // self.stride + 1).within(side)


@dataclass(frozen=True, slots=True)
class Resample:
    """Rows looked up between, or at, rows of the input.

    Attributes:
        size: rows of the output.
        step: rows of the input per row of the output, where the caller set it; None: by the two sizes.
        how: "nearest" and "nearest-exact" take a row, "linear" two; "corners": linear, first and last rows aligned.
    """

    size: int
    step: float | None
    how: Literal["nearest", "nearest-exact", "linear", "corners"]

    def out(self, side: int) -> int:
        return self.size

    def scale(self, side: int) -> float:
        """Return the rows of the input, which has ``side``, per row of the output."""
        if self.how == "corners":
            return (side - 1) / (self.size - 1) if self.size > 1 else 0.0
        return side / self.size if self.step is None else self.step

    def need(self, rows: Span, side: int) -> Span:
        """A row more on each side than exact numbers ask for: torch rounds them to the tensor's type."""
        scale = self.scale(side)
        first, last = rows.start * scale, rows.stop * scale
        return Span(math.floor(first) - 2, math.floor(last) + 3).within(side)


@dataclass(frozen=True, slots=True)
class Mirrored:
    """A map with ``before`` rows in front of it and ``after`` behind it that are rows of its own; a negative pad crops.

    Attributes:
        how: "reflect" counts back from the first and last row without repeating it, "replicate" repeats it.
    """

    before: int
    after: int
    how: Literal["reflect", "replicate"]

    def out(self, side: int) -> int:
        return side + self.before + self.after

    def source(self, row: int, side: int) -> int:
        """Return the row of the input, which has ``side``, that ``row`` of the output is."""
        place = row - self.before
        if self.how == "reflect":
            place = abs(place)
            place = min(place, 2 * (side - 1) - place)
        return min(max(place, 0), side - 1)

    def need(self, rows: Span, side: int) -> Span:
        turns = (self.before, self.before + side - 1)
        ends = [rows.start, rows.stop - 1, *(row for row in turns if rows.start < row < rows.stop - 1)]
        sources = [self.source(row, side) for row in ends]
        return Span(min(sources), max(sources) + 1)


@dataclass(frozen=True, slots=True)
class AdaptivePool:
    """Adaptive pooling: ``size`` cells, which overlap where they do not divide the rows."""

    size: int

    def out(self, side: int) -> int:
        return self.size

    def need(self, rows: Span, side: int) -> Span:
        return Span(rows.start * side // self.size, -(-rows.stop * side // self.size))


@dataclass(frozen=True, slots=True)
class Chained:
    """One operation after another in one."""

    first: Rule
    then: Rule

    def out(self, side: int) -> int:
        return self.then.out(self.first.out(side))

    def need(self, rows: Span, side: int) -> Span:
        return self.first.need(self.then.need(rows, self.first.out(side)), side)


SAME = Window()
"""Row by row: what works on each pixel alone."""
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
        global_op: neither: no map takes part.
        flops: of its forward pass on the whole tile; bytes are of the whole tile, too.
        value_bytes: of its value.
        saves: maps that backward needs, of those it takes and its own value.
        kept_bytes: that backward needs besides, as the places of maxima.
        work_bytes: that live only while its backward pass runs, besides gradients of maps and parameters.
        param_bytes: of the parameters it uses.
        aliases: map in whose memory its value lies; "" where it has its own.
        passes_grad_through: its backward pass gives the gradient of its value on as it is.
        draws_whole: it draws a number for each pixel of the whole map, whatever of it is computed.
        pads_by_copy: where a box is padded on one side alone, what it takes is copied, and the copy kept.
    """

    name: str
    maps: tuple[str, ...] = ()
    others: tuple[str, ...] = ()
    rules: tuple[Rule, Rule] = (SAME, SAME)
    sides: tuple[int, int] = (0, 0)
    sums: bool = False
    global_op: bool = False
    flops: float = 0.0
    value_bytes: int = 0
    saves: tuple[str, ...] = ()
    kept_bytes: int = 0
    work_bytes: int = 0
    param_bytes: int = 0
    aliases: str = ""
    passes_grad_through: bool = False
    pads_by_copy: bool = False
    draws_whole: bool = False

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
        phases[phase][0 if step.global_op else 1].append(step)
    return phases
