"""Exchange maps of a region in boxes between the members of a team: rows that boxes look at, and their gradients.

A map between parts lies with each member as far as its later boxes look, its own part and rows of others. Rows of
others are fetched once, when the map is there; their gradients are sent back, and added, before the part that made the
map goes back.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from parallel.space.boxes import Boxes as PlannedBoxes
from parallel.space.grid import Span
from parallel.space.team import Box, Exchange
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan, places_of
from parallel.streaming.region import Region
from parallel.team.team_comm import TeamComm
from parallel.trace.stage_module import Boxes


class RegionExchange:
    """Exchanges of one region's maps.

    Args:
        parts: by phase.

    Attributes:
        names: of the maps of which a member looks at rows of another; none in a team of one.
        held: rows and columns of a map that this member holds, by name; of others all.
    """

    def __init__(
        self, region: Region, boxes: PlannedBoxes, parts: Sequence[Sequence[PartPlan]], comm: TeamComm
    ) -> None:
        self._region, self._boxes, self._comm = region, boxes, comm
        exchanges = self._find(parts) if comm.members > 1 else {}
        self._exchanges = {name: each for name, each in exchanges.items() if not each.is_local}
        self.names = frozenset(self._exchanges)
        self.held: Mapping[str, Box] = {name: each.boxes[comm.member] for name, each in exchanges.items()}

    def put(self, maps: Maps, name: str, value: Tensor | Boxes) -> None:
        """Take a map that enters, or the gradient of one that leaves: this member's part."""
        if name in self.names:
            assert isinstance(value, Tensor)
            maps.write(name, self._owned(name), value)
        else:
            maps.put(name, value)

    def own_part(self, maps: Maps, name: str) -> Tensor:
        """Return this member's part of a map."""
        return maps.part(name, self._owned(name))

    def fetch(self, maps: Maps, name: str) -> None:
        """Fetch the rows of others that this member looks at, and send those that others look at."""
        exchange, member = self._exchanges[name], self._comm.member
        pieces = exchange.recvs[member]
        leaving = [(target, maps.fetch(name, box).contiguous()) for target, box in exchange.sends[member]]
        arriving = [(piece.owner, maps.empty(name, piece.box)) for piece in pieces]
        for piece, value in zip(pieces, self._comm.swap(leaving, arriving)(), strict=True):
            maps.write(name, piece.box, value)

    def send_back(self, gradients: Maps, name: str, like: Maps) -> None:
        """Send the gradients of rows of others to their owners, and add those that come to this member's own.

        Args:
            like: has the map, where it is still there.
        """
        if name not in gradients and name in like:
            gradients.put_zeros(name, like)
        elif name not in gradients:  # it left, and no gradient came back for it
            gradients.write(name, self._owned(name), torch.zeros((), dtype=self._region.forms[name][1]))
        exchange, member = self._exchanges[name], self._comm.member
        sent = exchange.sends[member]
        leaving = [(p.owner, gradients.fetch(name, p.box).contiguous()) for p in exchange.recvs[member]]
        arriving = [(target, gradients.empty(name, box)) for target, box in sent]
        for (_, box), value in zip(sent, self._comm.swap(leaving, arriving)(), strict=True):
            gradients.add(name, box, value)

    def _owned(self, name: str) -> Box:
        return self._boxes.mesh.owned(self._comm.member, self._region.sides[name])

    def _find(self, parts: Sequence[Sequence[PartPlan]]) -> dict[str, Exchange]:
        """Return by name of a map between parts, or that enters or leaves, which member holds what of it."""
        mesh, sides, members = self._boxes.mesh, self._region.sides, range(self._comm.members)
        looked_at = {name: [[box] for box in mesh.all_owned(sides[name])] for name in self._region.inputs}
        for phase, planned in zip(parts, self._boxes.phases, strict=True):
            for part, paper in zip(phase, planned.parts, strict=True):
                given = [step.name for step in part.given if not step.sums]
                looked_at |= {name: [[box] for box in mesh.all_owned(sides[name])] for name in given}
                # In its backward pass a part finds what it gave, with rims, where its own steps look at it.
                names = (*part.entering, *(name for name in given if name in part.users))
                for member in members:
                    for row, column in places_of(part.cells, self._boxes.places(member, paper)):
                        rows, columns = part.rows[row], part.columns[column]
                        for name in names:
                            if name in rows and name in columns:
                                looked_at[name][member].append((rows[name], columns[name]))
        return {
            name: mesh.needed([_hull(boxes) for boxes in by_member], sides[name])
            for name, by_member in looked_at.items()
        }


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around ``boxes``."""
    rows, columns = (
        Span(min(span.start for span in spans), max(span.stop for span in spans)) for spans in zip(*boxes, strict=True)
    )
    return rows, columns
