"""A member's part of a region, computed box by box: the boxes of its part of the tile, rims of others fetched once.

Phases, parts and the order of sums are planned for the whole tile, so that all members come to the same messages. A map
between parts lies with each member as far as its later boxes look, its own part and rows of others; these are fetched
when the map is there, and their gradients are handed back, and added, before the part that made it goes back. Sums are
merged over the members when a phase ends, their gradients summed when its backward pass begins.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from parallel.space.box_bytes import Cuts
from parallel.space.boxes import StreamedModel
from parallel.space.grid import Span
from parallel.space.parts import Part
from parallel.space.rule import Step
from parallel.space.team import Box, Exchange, Grid
from parallel.space.team_boxes import TeamBoxes, plan_team_boxes
from parallel.streaming.maps import Maps
from parallel.streaming.part_plan import PartPlan, places_of
from parallel.streaming.region import Region
from parallel.streaming.region_run import Gradients, Kept, Phase, RegionRun
from parallel.team.team_comm import TeamComm
from parallel.team.team_context import ForwardContext
from parallel.trace.stage_module import Boxes


class BoxedRegion(RegionRun):
    """One member's part of a region, planned for tiles of one size.

    Args:
        grid: of the team.
        link: to the other members.
        random: names of nodes that may draw.
        options: of ``RegionRun``.

    Attributes:
        context: the forward pass under way.
    """

    context: ForwardContext
    boxes: TeamBoxes

    def __init__(
        self, region: Region, box: int, grid: Grid, link: TeamComm, random: Collection[str], **options: Any
    ) -> None:
        self._link, self._grid, self._random = link, grid, random
        super().__init__(region, box, **options)
        self._mesh = self.boxes.mesh
        self._exchanges = self._find_exchanges()
        self._held = {name: exchange.boxes[link.member] for name, exchange in self._exchanges.items()}

    def cuts(self, part: Part) -> tuple[Cuts, tuple[range, range] | None]:
        return self.boxes.cuts(part), self.boxes.places(self._link.member, part)

    def planned(self, model: StreamedModel, box: int, stored_bytes: int | None) -> TeamBoxes:
        return plan_team_boxes(model, box, self._grid, stored_bytes)

    def maps(self, device: torch.device, here: frozenset[str]) -> Maps:
        return self._maps(device, here, self._held)

    def enter(self, maps: Maps, name: str, value: Tensor | Boxes) -> None:
        assert isinstance(value, Tensor)
        if self._exchanges[name].is_local:
            maps.put(name, value)
        else:
            maps.write(name, self._own(name), value)
            self._fetch(maps, name)

    def plain(self, module: nn.Module, step: Step, known: Mapping[str, Any]) -> Any:
        if self.region.nodes[step.name].name not in self._random:
            return super().plain(module, step, known)
        return self.context.run_with_rng(lambda: super(BoxedRegion, self).plain(module, step, known))

    def leave(self, maps: Maps, name: str) -> Tensor:
        return maps.part(name, self._own(name))

    def enter_gradient(self, maps: Maps, name: str, gradient: Tensor) -> None:
        maps.write(name, self._own(name), gradient)

    def after_part(self, part: PartPlan, kept: Kept) -> None:
        for step in part.given:
            if not step.sums and not self._exchanges[step.name].is_local:
                self._fetch(kept.maps, step.name)

    def after_phase(self, phase: Phase, kept: Kept) -> None:
        for name in _sums(phase):
            merge, value = self.region.operations[name].merge, kept.known[name]
            if merge is None:
                kept.known[name] = self._link.all_reduce(value, False)
            else:
                kept.known[name] = functools.reduce(merge, self._link.all_gather(value, False))

    def before_phase_backward(self, phase: Phase, kept: Kept, back: Gradients) -> None:
        for name in _sums(phase):
            if name in self.region.flows:
                gradient = back.known[name] if name in back.known else torch.zeros_like(kept.known[name])
                back.known[name] = self._link.all_reduce(gradient, False)

    def before_part_backward(self, part: PartPlan, kept: Kept, back: Gradients) -> None:
        for step in part.given:
            name = step.name
            if step.sums or name not in self.region.flows or self._exchanges[name].is_local:
                continue
            self._hand_back(kept, back, name)

    def after_backward(self, kept: Kept, back: Gradients) -> None:
        for name in self.region.inputs:
            if name in self.region.flows and not self._exchanges[name].is_local:
                self._hand_back(kept, back, name)

    def leave_gradient(self, maps: Maps, name: str) -> Tensor | None:
        return maps.part(name, self._own(name)) if name in maps else None

    def _hand_back(self, kept: Kept, back: Gradients, name: str) -> None:
        if name not in back.maps and name in kept.maps:
            back.maps.put_zeros(name, kept.maps)
        elif name not in back.maps:  # it left, and no gradient came back for it
            back.maps.write(name, self._own(name), torch.zeros((), dtype=self.region.forms[name][1]))
        self._give_back(back.maps, name)

    def _own(self, name: str) -> Box:
        return self._mesh.owned(self._link.member, self.region.sides[name])

    def _fetch(self, maps: Maps, name: str) -> None:
        """Fetch of others what is held here of a map, and send what others hold."""
        exchange, member = self._exchanges[name], self._link.member
        pieces = exchange.recvs[member]
        leaving = [(target, maps.fetch(name, box).contiguous()) for target, box in exchange.sends[member]]
        arriving = [(piece.owner, maps.empty(name, piece.box)) for piece in pieces]
        for piece, value in zip(pieces, self._link.swap(leaving, arriving).wait(), strict=True):
            maps.write(name, piece.box, value)

    def _give_back(self, gradients: Maps, name: str) -> None:
        """Send the gradients of what others own to them, and add those that come to this member's own."""
        exchange, member = self._exchanges[name], self._link.member
        sent = exchange.sends[member]
        leaving = [(p.owner, gradients.fetch(name, p.box).contiguous()) for p in exchange.recvs[member]]
        arriving = [(target, gradients.empty(name, box)) for target, box in sent]
        for (_, box), value in zip(sent, self._link.swap(leaving, arriving).wait(), strict=True):
            gradients.add(name, box, value)

    def _find_exchanges(self) -> dict[str, Exchange]:
        """By name of a map between parts, or that enters or leaves: who holds what of it."""
        region, mesh, members = self.region, self._mesh, range(self._grid.members)
        looked_at: dict[str, list[list[Box]]] = {}
        for name in region.inputs:
            looked_at[name] = [[mesh.owned(member, region.sides[name])] for member in members]
        for phase, planned in zip(self.phases, self.boxes.phases, strict=True):
            for part, paper in zip(phase.parts, planned.parts, strict=True):
                given = [step.name for step in part.given if not step.sums]
                for name in given:
                    looked_at[name] = [[mesh.owned(member, region.sides[name])] for member in members]
                # In its backward pass a part finds what it gave, with rims, where its own steps look at it.
                names = (*part.entering, *(name for name in given if name in part.users))
                for member in members:
                    for row, column in places_of(part.cells, self.boxes.places(member, paper)):
                        rows, columns = part.rows[row], part.columns[column]
                        for name in names:
                            if name in rows and name in columns:
                                looked_at[name][member].append((rows[name], columns[name]))
        return {
            name: mesh.needed([_hull(boxes) for boxes in by_member], region.sides[name])
            for name, by_member in looked_at.items()
        }


def _sums(phase: Phase) -> list[str]:
    """Return names of the sums that a phase ends with, in order."""
    return [step.name for part in phase.parts for step in part.given if step.sums]


def _hull(boxes: Sequence[Box]) -> Box:
    """Return the smallest box around ``boxes``."""
    rows, columns = zip(*boxes, strict=True)
    return _around(rows), _around(columns)


def _around(spans: Sequence[Span]) -> Span:
    return Span(min(span.start for span in spans), max(span.stop for span in spans))
