"""Runs the nodes of a model on one member of a team, whose part of the tile is computed box by box."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from parallel.offload.host_space import HostSpace
from parallel.space.team import Grid
from parallel.streaming.box_sums import BoxSums, beside
from parallel.streaming.images import Boxes
from parallel.streaming.region import Region
from parallel.streaming.region_run import RegionRun
from parallel.streaming.streamed_module import StreamedRun
from parallel.team.boxed_region import BoxedRegion
from parallel.team.link import TeamLink
from parallel.team.nodes import NodeRun
from parallel.team.passing import Pass


@dataclass(frozen=True)
class BoxedParts:
    """How members' parts of a tile are computed box by box: as for ``RegionRun``."""

    box: int
    stored_bytes: int | None = None
    host: HostSpace | None = None


class BoxedNodes(NodeRun):
    """As ``NodeRun``, with the region in boxes.

    Args:
        grid, link: of the team.
    """

    def __init__(
        self,
        nodes: Sequence[fx.Node],
        inputs: tuple[str, ...],
        outputs: tuple[str, ...],
        random: Collection[str],
        boxed: BoxedParts,
        grid: Grid,
        link: TeamLink,
    ) -> None:
        super().__init__(nodes, inputs, outputs, random)
        self._boxes = _Planned(nodes, inputs, outputs, boxed.box, boxed.stored_bytes, host=boxed.host)
        self._boxes.grid, self._boxes.link, self._boxes.random = grid, link, self._random

    def run(
        self, stage: nn.Module, passing: Pass, values: Sequence[Any], asked: BoxSums | None = None
    ) -> tuple[Any, ...]:
        region = passing.plan.region
        if region is None:
            return super().run(stage, passing, values, asked)
        self._boxes.region = region
        (shape, dtype, device) = region.forms[region.inputs[0]]
        tiles = torch.zeros((), dtype=dtype, device=device).expand(shape)
        plan = self._boxes.planned(stage, (tiles,), () if asked is None else asked.targets.shape)
        sums = {} if asked is None or not plan.sums else beside(plan.run.region, asked)
        assert isinstance(plan.run, BoxedRegion)
        plan.run.passing = passing
        leaving = plan.leaving(stage, values, sums)
        if plan.sums:
            return tuple(leaving)
        made = dict(zip(plan.run.region.leaving, leaving, strict=True))
        return self._rest(stage, passing, values, made, asked)


class _Planned(StreamedRun):
    """Plans of a member's region for tiles of any shape."""

    region: Region
    grid: Grid
    link: TeamLink
    random: Collection[str]

    def read(self, stage: nn.Module, entering: Mapping[str, Tensor | Boxes], given: Mapping[str, Any]) -> Region:
        return self.region

    def planned_boxes(self, stage: nn.Module, region: Region) -> RegionRun:
        options = {"stored_bytes": self._stored_bytes, "scale": self._scale, "host": self._host}
        return BoxedRegion(region, self._box, self.grid, self.link, self.random, **options)
