"""A region planned in boxes of the parts of a team's members, on paper: what the largest member takes.

Takes the steps of a region at one size of tile, and a grid; gives ``TeamBoxes``. Phases and parts are those of the
whole tile, so that all members come to the same messages; boxes end where the parts of members do. A map between parts
lies with each member as far as its boxes look. No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from parallel.space.box_bytes import AxisNeeds, Cuts
from parallel.space.boxes import Boxes, plan_boxes
from parallel.space.phases import Part, Phase
from parallel.space.region import PaperRegion
from parallel.space.team import Grid, SpatialMesh

EXCHANGE_COPIES = 2
"""Of what a member fetches of others: the room it arrives in, and what it sends meanwhile, which is about as much."""


@dataclass(frozen=True)
class TeamBoxes(Boxes):
    """A region in boxes of the parts of members.

    Attributes:
        mesh: the members' parts of the tile.
    """

    mesh: SpatialMesh

    def cuts(self, part: Part) -> Cuts:
        return self.mesh.boxed(part.box)

    def places(self, member: int, part: Part) -> tuple[range, range]:
        """Return the numbers of the rows and columns of boxes that ``member`` computes."""
        return self.mesh.boxes_of(member, self.cuts(part))

    @property
    def square(self) -> bool:
        return super().square and self.mesh.cuts[0] == self.mesh.cuts[1]

    def counts(self, part: Part, axis: int) -> dict[int, int]:
        """Of the member with most boxes along the axis: first and last, and the largest between them."""
        members = range(self.mesh.grid.members)
        numbers = max((self.places(member, part)[axis] for member in members), key=len)
        cuts, counts = self.cuts(part)[axis], {numbers[0]: 1, numbers[-1]: 1}
        if inner := numbers[1:-1]:
            counts[max(inner, key=lambda k: cuts[k + 1] - cuts[k])] = len(inner)
        return counts

    @functools.cached_property
    def held(self) -> dict[str, tuple[int, int]]:
        """By name of a map between parts, or that enters: the most rows, and the most columns, that a member holds."""
        spans: dict[str, list[list[tuple[int, int]]]] = {}
        grid = self.mesh.grid
        for name in {*self.model.inputs, *(name for phase, part in self.parts() for name in _maps(phase, part))}:
            sides = self.model.sides[name]
            rows = [self.mesh.owned(row * grid.columns, sides)[0] for row in range(grid.rows)]
            columns = [self.mesh.owned(column, sides)[1] for column in range(grid.columns)]
            spans[name] = [[(span.start, span.stop) for span in axis] for axis in (rows, columns)]
        for phase, part in self.parts():
            self._look(phase, part, spans)
        most = {name: [max(stop - start for start, stop in axis) for axis in axes] for name, axes in spans.items()}
        return {name: (rows, columns) for name, (rows, columns) in most.items()}

    def _look(self, phase: Phase, part: Part, spans: dict[str, list[list[tuple[int, int]]]]) -> None:
        """Widen what members hold to where the first and the last of their boxes of a part look."""
        steps, across, grid = phase.steps_of(part), phase.outputs(part), self.mesh.grid
        for axis, count in enumerate((grid.rows, grid.columns)):
            for number in range(count):
                boxes = self.places(number * grid.columns if axis == 0 else number, part)[axis]
                for box in {boxes[0], boxes[-1]}:
                    needs = AxisNeeds(across, self.model.sides, self.cuts(part)[axis], axis, box)
                    for name, span in needs.begin_with_all(steps).items():
                        if name in spans:
                            start, stop = spans[name][axis][number]
                            spans[name][axis][number] = min(start, span.start), max(stop, span.stop)

    def map_bytes(self, name: str) -> int:
        """Return the bytes that the largest member holds of a map."""
        sides = self.model.sides[name]
        px = self.held[name] if name in self.held else self.mesh.largest(sides)
        return round(self.model.sizes[name] * math.prod(px) / math.prod(sides))

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a map that the largest member owns."""
        sides = self.model.sides[name]
        return round(self.model.sizes[name] * math.prod(self.mesh.largest(sides)) / math.prod(sides))

    @functools.cached_property
    def fetched_of_others(self) -> dict[str, int]:
        """Bytes that the largest member is sent of each map between parts, and of what enters."""
        return {name: self.map_bytes(name) - self.own_bytes(name) for name in self.held}

    @functools.cached_property
    def host_bytes(self) -> int:
        """Those of maps between parts, and of the member's part of the tile with what it looks at of others'."""
        return self.stored_bytes + sum(
            self.map_bytes(name) for name in self.model.inputs if self.fetched_of_others[name]
        )

    @functools.cached_property
    def device_bytes(self) -> int:
        """As of one device; or the pieces of a map on their way, where those are more."""
        sent = EXCHANGE_COPIES * max(self.fetched_of_others.values(), default=0)
        return max(super().device_bytes, sent)

    @property
    def entering_bytes(self) -> int:
        """Of the member's part of the tile, on the device."""
        return sum(self.own_bytes(name) for name in self.model.inputs)


def plan_team_boxes(model: PaperRegion, box: int, grid: Grid, stored_bytes: int | None = None) -> TeamBoxes:
    """Return the region in boxes of ``box`` px of the members' parts.

    Args:
        model: of what a team of the grid computes side by side (``divided_region``).
        stored_bytes: that maps between parts may take with each member; None: 32 for each px of its part.

    Raises:
        ValueError: as ``plan_boxes``.
    """
    mesh = SpatialMesh(grid, model.side)
    of_all = None if stored_bytes is None else stored_bytes * grid.members
    return TeamBoxes(model, plan_boxes(model, box, of_all).phases, mesh)


def _maps(phase: Phase, part: Part) -> Sequence[str]:
    return [step.name for step in phase.outputs(part) if not step.sums]
