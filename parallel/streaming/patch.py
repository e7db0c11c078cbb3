"""A piece of a map: the rows and columns that an operation needs; what lies outside the image is yet to be padded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from parallel.space.span import Span
from parallel.streaming.narrowing import Cut, narrowed

Box = tuple[Span, Span]
"""(rows, columns)"""


@dataclass(frozen=True, slots=True)
class Patch:
    """What an operation is handed of a map.

    Attributes:
        tensor: the needed rows and columns that the map has.
        need: all that are needed, those outside the map among them.
        have: those of ``tensor``.
        box: those of the output.
        sides: rows and columns of the whole input map.
        dims: of rows and columns in ``tensor``.
    """

    tensor: Tensor
    need: Box
    have: Box
    box: Box
    sides: tuple[int, int]
    dims: tuple[int, int]

    @property
    def pads(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Rows missing (before, after), columns missing (before, after)."""
        rows, columns = (
            (have.start - need.start, need.stop - have.stop) for have, need in zip(self.have, self.need, strict=True)
        )
        return rows, columns

    def padded(self, fill: float = 0.0) -> Tensor:
        """Return all that is needed of an (n, c, h, w) map, ``fill`` where the map has nothing."""
        (top, bottom), (left, right) = self.pads
        if not (top or bottom or left or right):
            return self.tensor
        return F.pad(self.tensor, (left, right, top, bottom), value=fill)


def cut_patch(
    value: Any, has: Box, need: Box, box: Box, sides: tuple[int, int], dims: tuple[int, int], parts: Mapping[Box, Any]
) -> Patch:
    """Return what ``need`` asks for of a map of which ``value`` is the part ``has``.

    Args:
        parts: smaller parts of it that are there.
    """
    have = had(need, has, sides)
    part = parts.get(have)
    wide: Box = (_around(need[0], have[0]), _around(need[1], have[1]))
    return Patch(_narrowed(value, dims, cut_of(have, has)) if part is None else part, wide, have, box, sides, dims)


def had(need: Box, has: Box, sides: tuple[int, int]) -> Box:
    """Return the rows and columns of ``need`` that the map has; an empty span of ``has`` where it has none."""
    rows, columns = (_had(need[axis], has[axis], sides[axis]) for axis in (0, 1))
    return rows, columns


def _had(need: Span, has: Span, side: int) -> Span:
    inside = need.within(side)
    if inside.size:
        return inside
    place = min(max(need.start, has.start), has.stop)  # beyond the map altogether, before or after it
    return Span(place, place)


def cut_of(part: Box, has: Box) -> Cut:
    """Return where ``part`` lies in ``has``."""
    rows, columns = ((inner.start - outer.start, inner.size) for inner, outer in zip(part, has, strict=True))
    return rows, columns


def _narrowed(value: Any, dims: tuple[int, int], cut: Cut) -> Any:
    """Of each, where a value is several maps."""
    if isinstance(value, Tensor):
        return narrowed(value, dims, cut)
    return tuple(_narrowed(each, dims, cut) for each in value)


def _around(need: Span, have: Span) -> Span:
    """``need``, or as many rows next to an empty ``have``."""
    return need if have.size else Span(have.start - need.size, have.stop)
