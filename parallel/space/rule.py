"""What an operation does along one axis: how many rows it gives, and which rows a span of them needs.

A window moves over its input: convolutions, pools, pads, crops, strides, pixel unshuffle, and all that works row by
row. A transposed window spreads each row: transposed convolutions and pixel shuffle. Resampling looks rows up, and so
do pads that mirror or repeat rows of the map. Cells share the map out. Rows outside the map are padded where they are
needed, at that operation, and never computed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, Protocol

from parallel.space.span import Span


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
        """As of a window."""
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
class Cells:
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
"""Row by row: what works on each px alone."""
