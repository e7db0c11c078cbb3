"""From a placed column to px: where its boxes stand, and how high the gaps between its rows have to be.

A gap holds the wires that run across in it, each on a track of its own: first those that leave the row above, then the
cut if there is one, then those that reach the row below.
"""

from __future__ import annotations

from collections.abc import Sequence

from parallel.draw.graph_column import Column, Lane
from parallel.draw.graph_grid import Net
from parallel.draw.graph_places import BOX_HEIGHT, CUT, GAP, PORT, TRACK, UNIT

EDGE = 9.0
"""Height left above and below the wires across a gap, for arrows."""


class Frame:
    """One column in px.

    Attributes:
        right: edge of its lanes.
        top: y of the gap above its first row; ``bottom`` of the end of the gap below its last.
        row_y: row -> y of its boxes.
        track_y: (row above a gap, "out of" or "into", part) -> y of the wire across that leaves or reaches the part.
        cut_y: first row of a stage -> y of the cut above it.
        enters: source of a net -> x at which it comes into the column from above; ``leaves`` likewise below.
        aside: source -> x of its lane, where it also comes in straight above a part.

    Args:
        left: edge of the boxes.
        top: y of the wires from the column before.
        rows: of each part, of all columns.
        cut_rows: first rows of stages after the first.
        crossing: nets from earlier columns.
    """

    def __init__(
        self,
        column: Column,
        left: float,
        top: float,
        rows: Sequence[int],
        nets: Sequence[Net],
        cut_rows: set[int],
        box_width: float,
        crossing: Sequence[Net],
    ) -> None:
        self.column, self.left, self.rows = column, left, rows
        self.box_width, self.cut_rows = box_width, cut_rows
        self.right = left + column.width * UNIT
        self.sources = {net.source: net for net in nets}
        self.members = sorted(column.x)
        self.across: dict[int, dict[tuple[str, int], list[float]]] = {}
        """Row above a gap -> (out of or into, part) -> where its wire across has to reach."""
        self.enters: dict[int, float] = {}
        self.leaves: dict[int, float] = {}
        self.aside: dict[int, float] = {}
        self._plan()
        self.row_y: dict[int, float] = {}
        self.track_y: dict[tuple[int, str, int], float] = {}
        self.cut_y: dict[int, float] = {}
        y = top + len(crossing) * TRACK
        self.top = y
        for row in range(column.first - 1, column.last + 1):
            y = self._gap(row, y)
            if row < column.last:
                self.row_y[row + 1] = y
                y += BOX_HEIGHT
        self.bottom = y

    def middle(self, part: int) -> float:
        """x of the middle of its box."""
        return self.x(part) + self.box_width / 2

    def x(self, part: int) -> float:
        """Left edge of its box."""
        return self.left + self.column.x[part] * UNIT

    def lane_x(self, lane: Lane) -> float:
        """Where the lane runs."""
        return self.left + lane.x * UNIT + UNIT / 2

    def beside(self, part: int, lane: Lane) -> bool:
        """No box stands between the part and the lane."""
        between = range(self.column.x[part] + 1, lane.x)
        return not any(
            other != part and self.rows[other] == self.rows[part] and self.column.x[other] in between
            for other in self.members
        )

    def gap_routed(self) -> list[tuple[int, int]]:
        """Neighbouring rows' (source, target) that do not stand under each other, and those dropped."""
        pairs = [(source, target) for source, target in self.column.dropped.items()]
        for source in self.members:
            for target in self.sources[source].targets if source in self.sources else ():
                near = target in self.column.x and self.rows[target] == self.rows[source] + 1
                if near and (source, target) not in self.column.straight:
                    pairs.append((source, target))
        return sorted(pairs)

    def joins(self, target: int) -> bool:
        """A wire comes straight from above."""
        return any(pair[1] == target for pair in self.column.straight) or target in self.column.entering.values()

    def port(self, target: int, x: float) -> float:
        """Where a wire from ``x`` comes into ``target`` from above."""
        middle = self.middle(target)
        return middle + (PORT if x > middle else -PORT)

    def _want(self, row: int, side: str, part: int, *xs: float) -> None:
        self.across.setdefault(row, {}).setdefault((side, part), []).extend(xs)

    def _plan(self) -> None:
        """Which wires go across in which gap, and how far."""
        for source, target in self.gap_routed():
            row = self.rows[target] - 1
            if self.joins(target) or source in self.column.dropped:
                x = self.middle(source)
                self._want(row, "into", target, x, self.port(target, x))
            else:
                self._want(row, "out of", source, self.middle(source), self.middle(target))
        for lane in self.column.lanes:
            source, x = lane.net.source, self.lane_x(lane)
            if source in self.column.x and not self.beside(source, lane):
                self._want(self.rows[source], "out of", source, self.middle(source), x)
            for target in lane.targets:
                if not self.beside(target, lane):
                    self._want(self.rows[target] - 1, "into", target, x, self.port(target, x))

    def _gap(self, row: int, y: float) -> float:
        """Heights of the wires across below ``row``, and of a cut; gives y of the next row."""
        wanted = self.across.get(row, {})
        start = y
        y += EDGE
        for side in ("out of", "into"):
            tracks: list[list[tuple[float, float]]] = []
            for (this, part), xs in sorted(wanted.items(), key=lambda item: (min(item[1]), item[0][1])):
                if this != side:
                    continue
                low, high = min(xs) - 4, max(xs) + 4
                free = [k for k, track in enumerate(tracks) if all(high < a or b < low for a, b in track)]
                if not free:
                    tracks.append([])
                k = free[0] if free else len(tracks) - 1
                tracks[k].append((low, high))
                self.track_y[row, side, part] = y + k * TRACK
            y += len(tracks) * TRACK
            if side == "out of" and row + 1 in self.cut_rows and row < self.column.last:
                self.cut_y[row + 1] = y + CUT - EDGE
                y += CUT
        return max(y + EDGE, start + GAP)

    def below(self, part: int) -> float:
        """y of the lower edge of its box."""
        return self.row_y[self.rows[part]] + BOX_HEIGHT

    def above(self, part: int) -> float:
        """y of the upper edge of its box."""
        return self.row_y[self.rows[part]]
