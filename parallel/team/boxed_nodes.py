"""Runs the nodes of a model on one member of a team, whose part of the tile is computed box by box."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

import torch
from torch import fx, nn

from parallel.offload.host_memory import HostMemory
from parallel.space.rule import Step
from parallel.space.team import Grid
from parallel.streaming.box_sums import BoxSums, beside
from parallel.streaming.region import Region
from parallel.streaming.region_run import RegionRun
from parallel.streaming.streamed_module import PlannedRegion, StreamedRun
from parallel.team.boxed_region import BoxedRegion
from parallel.team.program import NodeRun
from parallel.team.team_comm import TeamComm
from parallel.team.team_context import ForwardContext
from parallel.team.team_plan import TeamPlan

Targets = tuple[int, ...]


@dataclass(frozen=True)
class BoxedParts:
    """How members' parts of a tile are computed box by box: as for ``RegionRun``."""

    box: int
    stored_bytes: int | None = None
    host: HostMemory | None = None


class BoxedNodes(NodeRun):
    """As ``NodeRun``, with what the nodes have of the model's region in boxes, where they have any.

    Args:
        grid, link: of the team.
        device: of the stage; the region was read before it was moved there.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
        boxed: BoxedParts,
        grid: Grid,
        link: TeamComm,
        device: torch.device,
    ) -> None:
        super().__init__(nodes, inputs, outputs, random)
        self._boxes = _Planned(nodes, inputs, outputs, boxed.box, boxed.stored_bytes, host=boxed.host)
        self._boxes.grid, self._boxes.link, self._boxes.random = grid, link, self._random
        self._device = device
        self._planned: weakref.WeakKeyDictionary[TeamPlan, dict[Targets, PlannedRegion | None]]
        self._planned = weakref.WeakKeyDictionary()

    def run(
        self, stage: nn.Module, context: ForwardContext, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        plan = self.planned(stage, context.plan, () if asked is None else tuple(asked.targets.shape))
        if plan is None:
            return super().run(stage, context, values, asked)
        sums = {} if asked is None or not plan.sums else beside(plan.run.region, asked)
        assert isinstance(plan.run, BoxedRegion)
        plan.run.context = context
        leaving = plan.leaving(stage, values, sums)
        if plan.sums:
            return tuple(leaving)
        made = dict(zip(plan.run.region.leaving, leaving, strict=True))
        return self._rest(stage, context, values, made, asked)

    def planned(self, stage: nn.Module, plan: TeamPlan, targets: Targets = ()) -> PlannedRegion | None:
        """Return what is computed box by box, planned for tiles as ``plan`` is; None where nothing is.

        Args:
            targets: shape of those that sums are asked with.
        """
        made = self._planned.setdefault(plan, {})
        if targets not in made:
            made[targets] = self._plan(stage, plan, targets)
        return made[targets]

    def _plan(self, stage: nn.Module, plan: TeamPlan, targets: Targets) -> PlannedRegion | None:
        region = None if plan.region is None else region_of_stage(plan.region, self._nodes, self._inputs)
        if region is None:
            return None
        region = replace(region, forms={name: (*form[:2], self._device) for name, form in region.forms.items()})
        self._boxes.tile = plan.mesh.side
        return self._boxes.of_region(stage, region, targets) or self.planned(stage, plan)


class _Planned(StreamedRun):
    """Plans of a member's region for tiles of any shape."""

    grid: Grid
    link: TeamComm
    random: Collection[str]
    tile: tuple[int, int]

    def planned_boxes(self, stage: nn.Module, region: Region) -> RegionRun:
        scale = scale_of(region, self.tile)
        options = {"stored_bytes": self._stored_bytes, "scale": scale, "host": self._host}
        return BoxedRegion(region, self._box, self.grid, self.link, self.random, **options)


def region_of_stage(region: Region, nodes: Iterable[fx.Node], inputs: Sequence[str]) -> Region | None:
    """Return what ``nodes`` compute of a region; None where they compute no map of it.

    Args:
        inputs: names of the values that enter the stage.

    Raises:
        ValueError: several maps, or several tensors, pass between stages as one value.
    """
    here = {node.name for node in nodes if node.op not in ("placeholder", "get_attr")}
    steps = tuple(step for step in region.steps if region.nodes[step.name].name in here)
    if not any(step.flops and not step.sums for step in steps):
        return None
    made = {step.name for step in steps}
    maps = {name for step in steps for name in step.maps} - made
    others = {name for step in steps for name in step.others} - made
    leaving = tuple(step.name for step in steps if _leaves(region, step, made))
    passing = sorted(maps | {name for name in leaving if name in region.dims})
    for name, forms in [*((n, region.forms) for n in passing), *((n, region.pooled) for n in sorted(others))]:
        if name not in forms:
            raise ValueError(
                f"--stream: {name} is several {'maps' if name in region.dims else 'tensors'}, which pass from stage to "
                "stage together: cut the model elsewhere (--developer cuts)"
            )
    given = tuple(name for name in inputs if name in others)
    return replace(
        region,
        steps=steps,
        forms={**region.forms, **{name: region.pooled[name] for name in given}},
        leaving=leaving,
        inputs=tuple(name for name in inputs if name in maps),
        given=given,
    )


def _leaves(region: Region, step: Step, made: Collection[str]) -> bool:
    """Whether what follows, here or in a later stage, uses the value of a step."""
    node = region.nodes[step.name]
    inside = {*made, *region.constants}
    return node.name == step.name and any(user.name not in inside for user in node.users)


def scale_of(region: Region, side: tuple[int, int]) -> tuple[Fraction, Fraction]:
    """Return px of tiles of ``side`` for each of the largest map that enters."""
    rows, columns = max(region.sides[name] for name in region.inputs)
    return Fraction(side[0], rows), Fraction(side[1], columns)
