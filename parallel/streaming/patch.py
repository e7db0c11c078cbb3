"""A piece of a map: the rows and columns that an operation needs; what lies outside the image is yet to be padded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from parallel.space.span import Span

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


def cut_patch(tensor: Tensor, has: Box, need: Box, box: Box, sides: tuple[int, int], dims: tuple[int, int]) -> Patch:
    """Return what ``need`` asks for of a map of which ``tensor`` is the part ``has``."""
    have = []
    for axis in (0, 1):
        inside = need[axis].within(sides[axis])
        if not inside.size:  # beyond the map altogether, before or after it
            place = min(max(need[axis].start, has[axis].start), has[axis].stop)
            inside = Span(place, place)
        have.append(inside)
        if inside != has[axis]:
            tensor = _narrowed(tensor, dims[axis], inside.start - has[axis].start, inside.size)
    rows, columns = have
    wide: Box = (_around(need[0], rows), _around(need[1], columns))
    return Patch(tensor, wide, (rows, columns), box, sides, dims)


def _narrowed(value: Any, dim: int, start: int, size: int) -> Any:
    """Of each, where a value is several maps."""
    if isinstance(value, Tensor):
        return value.narrow(dim, start, size)
    return tuple(_narrowed(each, dim, start, size) for each in value)


def _around(need: Span, have: Span) -> Span:
    """``need``, or as many rows next to an empty ``have``."""
    return need if have.size else Span(have.start - need.size, have.stop)
