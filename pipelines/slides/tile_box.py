"""A box of a tile, in px of the tile: what one rank of several reads of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class TileBox:
    """Rows [row_start, row_stop) and columns [column_start, column_stop) of a tile.

    Raises:
        ValueError: it is empty, or begins before the tile.
    """

    row_start: int
    row_stop: int
    column_start: int
    column_stop: int

    def __post_init__(self) -> None:
        if not (0 <= self.row_start < self.row_stop and 0 <= self.column_start < self.column_stop):
            raise ValueError(f"a box of a tile begins inside it and holds 1 px at least; got {self}")

    @classmethod
    def whole(cls, height: int, width: int) -> Self:
        """Return the box that is all of a tile."""
        return cls(0, height, 0, width)

    @property
    def height(self) -> int:
        return self.row_stop - self.row_start

    @property
    def width(self) -> int:
        return self.column_stop - self.column_start

    def __str__(self) -> str:
        return f"rows {self.row_start}-{self.row_stop}, columns {self.column_start}-{self.column_stop}"

    def holds(self, other: TileBox) -> bool:
        """Return whether all of ``other`` lies inside."""
        rows = self.row_start <= other.row_start and other.row_stop <= self.row_stop
        return rows and self.column_start <= other.column_start and other.column_stop <= self.column_stop

    def within(self, outer: TileBox) -> TileBox:
        """Return the same px, counted from the corner of ``outer``, which holds them."""
        top, left = outer.row_start, outer.column_start
        return TileBox(self.row_start - top, self.row_stop - top, self.column_start - left, self.column_stop - left)

    def crop(self, tile: NDArray[Any]) -> NDArray[Any]:
        """Return a view of these rows and columns of ``tile``, (h, w, ...)."""
        return tile[self.row_start : self.row_stop, self.column_start : self.column_stop]

    def before_turning(self, quarter_turns: int, flip: bool, height: int, width: int) -> TileBox:
        """Return where these px lay in a tile that was turned counter-clockwise and then flipped left to right.

        Args:
            quarter_turns: that were made; an oblong tile takes two or none (``turns_that_fit``).
            height, width: of the tile before.
        """
        top, bottom, left, right = self.row_start, self.row_stop, self.column_start, self.column_stop
        if flip:
            turned_width = (width, height)[quarter_turns % 2]
            left, right = turned_width - right, turned_width - left
        for turns_before in reversed(range(quarter_turns)):
            # row r and column c of what a turn gives were row c, column -1 - r
            side = (width, height)[turns_before % 2]
            top, bottom, left, right = left, right, side - bottom, side - top
        return TileBox(top, bottom, left, right)


def turns_that_fit(quarter_turns: int, height: int, width: int) -> int:
    """Return the quarter turns made of a tile: of an oblong one, which would not fit, as many half turns."""
    return quarter_turns if height == width else 2 * quarter_turns % 4
