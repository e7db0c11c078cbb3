"""A region that can be computed in boxes, from shapes alone, and what members of a team exchange that compute it.

Takes the steps of a region at one size of tile, and a grid. The planner costs these exchanges, and the runner adds to
the same plan how each step is computed (``parallel.team``). A convolution is split into a member's own part, whose pads
give an output that is right but in the boundary strips. These are computed a second time once the halos have
arrived. Backward splits the input into own part and halos; a convolution is linear in it. No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from parallel import remembered
from parallel.space.cuts import Span
from parallel.space.phases import maps_to_recompute
from parallel.space.rule import PRIOR, Step, Window
from parallel.space.team import Box, Exchange, SpatialMesh, TeamGrid


@dataclass(frozen=True)
class RegionSpec:
    """Region of a model that can be computed in boxes, for tiles of one size.

    Attributes:
        steps: in the order of the model.
        sides: rows and columns of every map.
        side: rows and columns of the tile.
        inputs: bytes of the maps that enter, by name.
        live_out: names that are used after the region.
        whole: names of values that cannot be stored.
        images: names of what enters without a gradient.
        tiles: of the microbatch.
        ends_at: (layer, reason) that ended it; None where everything that has rows is in it.
    """

    steps: tuple[Step, ...]
    sides: Mapping[str, tuple[int, int]]
    side: tuple[int, int]
    inputs: Mapping[str, int]
    live_out: tuple[str, ...]
    whole: frozenset[str] = frozenset()
    images: frozenset[str] = frozenset()
    tiles: int = 1
    ends_at: tuple[str, str] | None = None

    def of_tiles(self, tiles: int) -> RegionSpec:
        """Return the region of one tile for microbatches of ``tiles``."""
        assert self.tiles == 1, self.tiles
        if tiles == 1:
            return self
        steps = (
            replace(
                step,
                flops=step.flops * tiles,
                value_bytes=step.value_bytes * tiles,
                kept_bytes=step.kept_bytes * tiles,
                work_bytes=step.work_bytes * tiles,
            )
            for step in self.steps
        )
        inputs = {name: size * tiles for name, size in self.inputs.items()}
        return replace(self, steps=tuple(steps), inputs=inputs, tiles=tiles)

    @remembered
    def maps_to_recompute(self, limit: int) -> frozenset[str]:
        """Return names of the maps to recompute so that the others take no more than ``limit`` bytes on the host."""
        return maps_to_recompute(self.steps, self.live_out, self.sizes, self.images, limit)

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Bytes of every map."""
        return {**self.inputs, **{step.name: step.value_bytes for step in self.steps}}

    @functools.cached_property
    def square(self) -> bool:
        """Rows and columns are alike, in the tile and in every step."""
        sides = (self.side, *self.sides.values())
        return all(rows == columns for rows, columns in (*sides, *(step.rules for step in self.steps)))


MOST = 0.5
"""Of its output, in strips: beyond, one convolution of all that is needed is less work."""


def overlap_pays(map_size: int, weight_size: int) -> bool:
    """Return whether a convolution is better taken apart: each of its strips reads, and each gradient of a halo writes,
    the weights again, where putting all together copies a member's part of a tile. Both in bytes, or in numbers."""
    return map_size >= weight_size


@dataclass(frozen=True)
class PaddedBox:
    """A part of a convolution's input, which alone is not all that the output needs.

    Attributes:
        box: its rows and columns.
        made: output that it is part of.
        pads: zeros (before, after) of rows and of columns with which it alone is an input for ``made``.
    """

    box: Box
    made: Box
    pads: tuple[tuple[int, int], tuple[int, int]]


@dataclass(frozen=True)
class Borders:
    """A convolution of a member's own part, and of what is around it.

    Attributes:
        base: of the input: what is needed of its own part.
        pads: rows, columns padded on both sides of ``base``.
        strips: input of output that needs what others have; apart from each other.
        halos: input that others have; apart from each other and from ``base``, with it all that is needed.
    """

    base: Box
    pads: tuple[int, int]
    strips: tuple[PaddedBox, ...]
    halos: tuple[PaddedBox, ...]


@functools.lru_cache(4096)
def borders(rules: tuple[Window, Window], made: Box, have: Box, own: Box, sides: tuple[int, int]) -> Borders | None:
    """Return how a convolution is taken apart; None where its own part is not padded alike on both sides, or is so
    small that it is mostly strips.

    Args:
        made: output of this member.
        have: input that it needs and the map has.
        own: input that it has.
        sides: of the whole input.
    """
    rows, columns = (_axis(rules[k], made[k], have[k], own[k], sides[k]) for k in (0, 1))
    if rows is None or columns is None:
        return None
    (base, top, bottom, pad), (base_columns, left, right, pad_columns) = rows, columns
    of_strips = (top.size + bottom.size) / made[0].size + (left.size + right.size) / made[1].size
    if of_strips > MOST:
        return None
    middle = Span(top.stop, bottom.start)
    strips = [(top, made[1]), (bottom, made[1]), (middle, left), (middle, right)]
    halos = [
        ((Span(have[0].start, base.start), have[1]), (top, made[1])),
        ((Span(base.stop, have[0].stop), have[1]), (bottom, made[1])),
        ((base, Span(have[1].start, base_columns.start)), (made[0], left)),
        ((base, Span(base_columns.stop, have[1].stop)), (made[0], right)),
    ]
    return Borders(
        (base, base_columns),
        (pad, pad_columns),
        tuple(_padded(rules, None, strip, sides) for strip in strips if strip[0].size and strip[1].size),
        tuple(_padded(rules, *halo, sides) for halo in halos if halo[0][0].size and halo[0][1].size),
    )


def _axis(rule: Window, made: Span, have: Span, own: Span, side: int) -> tuple[Span, Span, Span, int] | None:
    """(own part, strip before, strip after, pad) along one axis."""
    base = Span(max(have.start, own.start), min(have.stop, own.stop))
    if not base.size or rule.reach < rule.stride:
        return None
    pad = base.start - rule.need(made, side).start
    if (base.size + 2 * pad - rule.reach) // rule.stride + 1 != made.size:
        return None
    first = -(-(base.start + rule.before) // rule.stride) if have.start < base.start else made.start
    last = (base.stop + rule.before - rule.reach) // rule.stride + 1 if have.stop > base.stop else made.stop
    if not made.start <= first <= last <= made.stop:
        return None
    return base, Span(made.start, first), Span(last, made.stop), pad


def _padded(rules: tuple[Window, Window], box: Box | None, made: Box, sides: tuple[int, int]) -> PaddedBox:
    """Return ``box``, or all that the map has of what ``made`` needs, with its pads."""
    rows, columns = (rules[k].need(made[k], sides[k]) for k in (0, 1))
    box = box or (rows.within(sides[0]), columns.within(sides[1]))
    pads = [
        (inner.start - need.start, need.stop - inner.stop) for inner, need in zip(box, (rows, columns), strict=True)
    ]
    return PaddedBox(box, made, (pads[0], pads[1]))


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


def divide_among(region: RegionSpec, grid: TeamGrid) -> SpatialPlan:
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


def divided_region(region: RegionSpec, grid: TeamGrid) -> RegionSpec | None:
    """Return the region as far as a team of the grid computes it; None where nothing can be divided so."""
    plan = divide_among(region, grid)
    if not plan.steps or len(plan.steps) == len(region.steps):
        return region if plan.steps else None
    later = {name for step in region.steps[len(plan.steps) :] for name in step.inputs}.union(region.live_out)
    live_out = tuple(step.name for step in plan.steps if step.name in later)
    return replace(region, steps=plan.steps, live_out=live_out, ends_at=plan.ends_at)
