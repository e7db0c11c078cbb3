"""A region computed side by side by a team, on paper: how far it goes, and what its members exchange.

Takes the steps of a region at one size of tile, and a grid. The planner costs these exchanges, and the runner adds to
the same plan how each step is computed (``parallel.team``). No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from parallel.space.borders import Borders, borders
from parallel.space.region import PaperRegion
from parallel.space.rule import PRIOR, Step
from parallel.space.team import Box, Exchange, Grid, SpatialMesh


@dataclass(frozen=True, eq=False)
class SpatialPlan:
    """A region divided among a team.

    Attributes:
        steps: in order, as far as every member has a part of their maps; none where nothing can be divided so.
        sides: rows and columns of every map.
        ends_at: (layer, reason) that ended the region; None where everything that has rows is in it.
    """

    mesh: SpatialMesh
    steps: tuple[Step, ...]
    sides: Mapping[str, tuple[int, int]]
    ends_at: tuple[str, str] | None

    @functools.cached_property
    def by_name(self) -> dict[str, Step]:
        return {step.name: step for step in self.steps}

    @functools.cached_property
    def by_node(self) -> dict[str, tuple[Step, ...]]:
        """Steps of each node of the model: its own, and those before it."""
        of_node: dict[str, list[Step]] = {}
        for step in self.steps:
            of_node.setdefault(step.name.partition(PRIOR)[0], []).append(step)
        return {name: tuple(steps) for name, steps in of_node.items()}

    @functools.cached_property
    def sharded(self) -> frozenset[str]:
        """Names of the maps that are in parts with the members, those that enter included."""
        made = {step.name for step in self.steps if not step.global_op and not step.sums}
        taken = {name for step in self.steps for name in step.maps}
        return frozenset(name for name in made | taken if name in self.sides)

    @functools.cached_property
    def tile_boxes(self) -> tuple[Box, ...]:
        """Boxes of the tile, by member."""
        return self.mesh.all_owned(self.mesh.side)

    def owned(self, name: str, member: int) -> Box:
        """Return the box of a map that ``member`` has."""
        return self.mesh.owned(member, self.sides[name])

    def largest(self, name: str) -> tuple[int, int]:
        """Return the most rows, and the most columns, that a member has of a map."""
        return self.mesh.largest(self.sides[name])

    def share(self, name: str) -> float:
        """Return the part of a map that the largest member has."""
        return math.prod(self.largest(name)) / math.prod(self.sides[name])

    def exchange(self, step: str, source: str) -> Exchange:
        """Return what a step exchanges of the map ``source``."""
        made = self.by_name[step]
        return self.mesh.exchange(made.rules, made.sides, self.sides[source])

    def fetches(self, step: Step) -> Iterator[tuple[str, Exchange]]:
        """Yield (map, exchange) of each map that a step takes, where a member needs what another has."""
        for source in step.maps if not step.sums else ():
            exchange = self.exchange(step.name, source)
            if not exchange.is_local:
                yield source, exchange

    def borders(self, step: Step, source: str) -> list[Borders | None]:
        """Return by member how a convolution is split into own part and halos; None where it is not."""
        exchange, whole = self.exchange(step.name, source), self.sides[source]
        boxes = zip(self.mesh.all_owned(step.sides), exchange.boxes, exchange.owned, strict=True)
        return [borders(step.rules, made, have, own, whole) for made, have, own in boxes]

    def gathered(self, name: str) -> Exchange:
        """Return the exchange that gives member 0 all of a map."""
        return self.mesh.gathered(self.sides[name])


def divide_among(region: PaperRegion, grid: Grid) -> SpatialPlan:
    """Return the region as far as a team of ``grid`` computes it side by side."""
    mesh = SpatialMesh(grid, region.side)
    steps, ends_at = list(region.steps), region.ends_at
    if reason := mesh.fault(mesh.side):
        return SpatialPlan(mesh, (), region.sides, ("the tile", reason))
    for number, step in enumerate(steps):
        if not step.global_op and not step.sums and (reason := mesh.fault(step.sides)):
            ends_at = (step.name, reason)
            node = step.name + PRIOR
            steps = [each for each in steps[:number] if not each.name.startswith(node)]
            break
    while steps and steps[-1].global_op:  # what is made of the last sums belongs to what follows
        steps.pop()
    return SpatialPlan(mesh, tuple(steps), region.sides, ends_at)


def divided_region(region: PaperRegion, grid: Grid) -> PaperRegion | None:
    """Return the region as far as a team of the grid computes it; None where nothing can be divided so."""
    plan = divide_among(region, grid)
    if not plan.steps or len(plan.steps) == len(region.steps):
        return region if plan.steps else None
    later = {name for step in region.steps[len(plan.steps) :] for name in step.inputs}.union(region.leaving)
    leaving = tuple(step.name for step in plan.steps if step.name in later)
    return replace(region, steps=plan.steps, leaving=leaving, ends_at=plan.ends_at)
