"""A tile divided among the ranks of a team: which member owns which box of a map, and what of it others need.

Takes a grid and the sides of a tile; gives boxes and exchanges. A member owns one box of every map: the same relative
cuts for all maps (``grid``), so that maps that are added or joined agree. What it needs beyond its box, of neighbours,
corners or further off, follows from the rule of the operation alone. After Dryden et al. 2019 (Improving strong-scaling
of CNN training by exploiting finer-grained parallelism), with boxes in place of halo widths.
"""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

from parallel import remembered
from parallel.space.cuts import ALIGNED, Span, box_span, box_spans, tile_cuts
from parallel.space.rule import Rule

Box = tuple[Span, Span]
"""(rows, columns)"""
Sides = tuple[int, int]
SMALL_ALL_REDUCE_BYTES, SMALL_TEAM = 2**16, 4
"""Sums of at most so many bytes, in teams of at most so many members, go as a message to each, where members are on
CPUs."""


def small_sum_bytes(members: int) -> int:
    """Return up to how many bytes a message to each member takes less than a sum, in which each member waits for the
    one before it; -1: for none."""
    return SMALL_ALL_REDUCE_BYTES if 1 < members <= SMALL_TEAM else -1


@dataclass(frozen=True, slots=True)
class TeamGrid:
    """Members of a team, ``rows`` x ``columns`` of them: member r * columns + c has row r and column c of boxes."""

    rows: int = 1
    columns: int = 1

    @property
    def members(self) -> int:
        return self.rows * self.columns

    def __str__(self) -> str:
        return f"{self.rows}x{self.columns}"

    @classmethod
    def parse(cls, text: str) -> TeamGrid:
        """Return the grid that ``2x4`` says: two rows of four boxes.

        Raises:
            ValueError: other text, or a side of 0.
        """
        found = re.fullmatch(r"0*([1-9]\d*)x0*([1-9]\d*)", text.strip(), re.ASCII)
        if found is None:
            raise ValueError(f"a grid is ROWSxCOLUMNS of members, as 2x1 or 2x2; got {text!r}")
        return cls(int(found[1]), int(found[2]))


@functools.lru_cache(1024)
def team_cuts(side: int, boxes: int) -> tuple[int, ...]:
    """Return where ``side`` px are cut into ``boxes`` of about equal size, both ends included."""
    step = ALIGNED if side >= 2 * ALIGNED * boxes else 1
    return (0, *(round(j * side / boxes / step) * step for j in range(1, boxes)), side)


class HaloPiece(NamedTuple):
    """Part of a map that a member has."""

    owner: int
    box: Box


@dataclass(frozen=True)
class Exchange:
    """Exchange of one map among members before an operation.

    Attributes:
        needs: by member: what it needs, rows and columns outside the map among them.
        boxes: by member: what of that the map has.
        pieces: by member: what ``boxes`` is assembled of, row by row of owners.
        owned: by member: its own box.
    """

    needs: tuple[Box, ...]
    boxes: tuple[Box, ...]
    pieces: tuple[tuple[HaloPiece, ...], ...]
    owned: tuple[Box, ...]

    @functools.cached_property
    def is_local(self) -> bool:
        """Nobody needs what another has."""
        return all(piece.owner == member for member, pieces in enumerate(self.pieces) for piece in pieces)

    @functools.cached_property
    def sends(self) -> tuple[tuple[tuple[int, Box], ...], ...]:
        """(target, box) of each message that a member sends, by member, in order of targets."""
        found: list[list[tuple[int, Box]]] = [[] for _ in self.pieces]
        for target, pieces in enumerate(self.recvs):
            for piece in pieces:
                found[piece.owner].append((target, piece.box))
        return tuple(map(tuple, found))

    @functools.cached_property
    def recvs(self) -> tuple[tuple[HaloPiece, ...], ...]:
        """Pieces that a member receives, by member, in order of owners."""
        return tuple(tuple(p for p in pieces if p.owner != member) for member, pieces in enumerate(self.pieces))

    @functools.cached_property
    def px(self) -> int:
        """Pixels that all members send together."""
        return sum(box_px(piece.box) for pieces in self.recvs for piece in pieces)

    @functools.cached_property
    def received_px(self) -> int:
        """Pixels that the member which fetches most receives."""
        return max(sum(box_px(piece.box) for piece in pieces) for pieces in self.recvs)

    @functools.cached_property
    def messages(self) -> int:
        """Messages to the member that is sent most of them."""
        return max(map(len, self.recvs))

    @functools.cached_property
    def boxes_px(self) -> int:
        """Pixels of the largest box that a member then has."""
        return max(map(box_px, self.boxes))

    @functools.cached_property
    def padded_px(self) -> int:
        """Pixels of the largest box with its padding, where a member pads one side more than the other; else 0."""
        pairs = [pair for need, box in zip(self.needs, self.boxes, strict=True) for pair in zip(need, box, strict=True)]
        lopsided = any(has.start - wants.start != wants.stop - has.stop for wants, has in pairs)
        return max(map(box_px, self.needs)) if lopsided else 0


@dataclass(frozen=True)
class SpatialMesh:
    """A tile of ``side`` px (rows, columns), divided among a team."""

    grid: TeamGrid
    side: Sides

    @functools.cached_property
    def cuts(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Cuts of rows and of columns, in px of the tile."""
        return team_cuts(self.side[0], self.grid.rows), team_cuts(self.side[1], self.grid.columns)

    def owned(self, member: int, sides: Sides) -> Box:
        """Return the box of ``member`` in a map of ``sides``."""
        row, column = divmod(member, self.grid.columns)
        return box_span(self.cuts[0], sides[0], row), box_span(self.cuts[1], sides[1], column)

    def all_owned(self, sides: Sides) -> tuple[Box, ...]:
        """Return the box of every member in a map of ``sides``."""
        return tuple(itertools.product(*self.axes(sides)))

    def largest(self, sides: Sides) -> Sides:
        """Return the most rows, and the most columns, that a member has of a map of ``sides``."""
        rows, columns = self.axes(sides)
        return max(span.size for span in rows), max(span.size for span in columns)

    def axes(self, sides: Sides) -> tuple[tuple[Span, ...], tuple[Span, ...]]:
        """Return the rows of each row of members, and the columns of each column."""
        return box_spans(self.cuts[0], sides[0]), box_spans(self.cuts[1], sides[1])

    def fault(self, sides: Sides) -> str | None:
        """Return why a map of ``sides`` cannot be divided; None where it can."""
        if all(span.size for axis in self.axes(sides) for span in axis):
            return None
        return f"gives maps of {sides[0]} x {sides[1]} px, of which not every member of a {self.grid} team has a part"

    @functools.lru_cache(4096)  # noqa: B019  one entry for all equal meshes
    def exchange(self, rules: tuple[Rule, Rule], made: Sides, taken: Sides) -> Exchange:
        """Return what an operation exchanges, of the map of sides ``taken`` for one of sides ``made``."""
        (of_rows, of_columns), (high, wide) = rules, taken
        needs = [(of_rows.need(rows, high), of_columns.need(columns, wide)) for rows, columns in self.all_owned(made)]
        return self.needed(needs, taken)

    @remembered
    def boxed(self, box: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return where the members' parts are cut into boxes of ``box`` px: rows and columns, in px of the tile."""
        rows, columns = (
            (0, *(first + cut for first, last in pairwise(cuts) for cut in tile_cuts(last - first, box)[1:]))
            for cuts in self.cuts
        )
        return rows, columns

    def boxes_of(self, member: int, boxed: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[range, range]:
        """Return the numbers of the rows and columns of ``boxed`` that ``member`` has."""
        row, column = divmod(member, self.grid.columns)
        (top, bottom), (left, right) = self.cuts[0][row : row + 2], self.cuts[1][column : column + 2]
        rows, columns = boxed
        return range(rows.index(top), rows.index(bottom)), range(columns.index(left), columns.index(right))

    @functools.lru_cache(256)  # noqa: B019  as above
    def gathered(self, sides: Sides) -> Exchange:
        """Return the exchange that gives member 0 all of a map, and the others nothing."""
        nothing = (Span(0, 0), Span(0, 0))
        return self.needed([(Span(0, sides[0]), Span(0, sides[1])), *[nothing] * (self.grid.members - 1)], sides)

    def needed(self, needs: Sequence[Box], sides: Sides) -> Exchange:
        """Return the exchange that gives each member what it ``needs`` of a map."""
        axes, width = self.axes(sides), self.grid.columns
        boxes = [(rows.within(sides[0]), columns.within(sides[1])) for rows, columns in needs]
        pieces = []
        for box in boxes:
            rows, columns = (
                [(k, common) for k, own in enumerate(axis) if (common := _both(span, own)).size]
                for span, axis in zip(box, axes, strict=True)
            )
            pieces.append(tuple(HaloPiece(r * width + c, (top, left)) for r, top in rows for c, left in columns))
        return Exchange(tuple(needs), tuple(boxes), tuple(pieces), tuple(itertools.product(*axes)))


def box_px(box: Box) -> int:
    return box[0].size * box[1].size


def overlap(source: Box, target: Box) -> Box | None:
    """Return what two boxes of one map have in common; None where they are apart."""
    rows, columns = _both(source[0], target[0]), _both(source[1], target[1])
    return (rows, columns) if rows.size and columns.size else None


def _both(one: Span, other: Span) -> Span:
    return Span(max(one.start, other.start), min(one.stop, other.stop))
