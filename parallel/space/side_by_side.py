"""A region computed side by side by a team, on paper: how far it goes, and what its members exchange and sum.

Takes the steps of a region at one size of tile, and a grid; gives the share of every map that its largest member has,
and of every step what members fetch of each other, what they add up, and what they copy meanwhile. What runs them
follows the same rules (``parallel.team``). No torch here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from parallel.space.borders import Borders, borders
from parallel.space.boxes import StreamedModel
from parallel.space.grid import Span
from parallel.space.rule import PRIOR, Step
from parallel.space.team import Box, Exchange, Grid, SpatialMesh


@dataclass(frozen=True)
class Fetch:
    """What the members fetch of one map before a step.

    Attributes:
        source: name of the map.
        exchange: pieces by member.
        boxes_px: of the largest box that a member then has of it.
        padded_px: with what is padded around it, where a member pads one side more than the other; else 0.
    """

    source: str
    exchange: Exchange
    boxes_px: int
    padded_px: int

    @functools.cached_property
    def arriving_px(self) -> int:
        """Of the member that fetches most."""
        return max(sum(box_px(piece.box) for piece in pieces) for pieces in self.exchange.recvs)

    @functools.cached_property
    def messages(self) -> int:
        """That come to the member which is sent most of them."""
        return max(map(len, self.exchange.recvs))


@dataclass(frozen=True)
class SideBySide:
    """A region divided among a team.

    Attributes:
        steps: in order, up to the first whose map has no part for every member.
        sides: rows and columns of every map.
        ends_at: (layer, reason) that ended it; None where everything that has rows is in it.
    """

    mesh: SpatialMesh
    steps: tuple[Step, ...]
    sides: Mapping[str, tuple[int, int]]
    ends_at: tuple[str, str] | None

    @functools.cached_property
    def by_node(self) -> dict[str, tuple[Step, ...]]:
        """Steps of each node of the model: its own, and those before it."""
        of_node: dict[str, list[Step]] = {}
        for step in self.steps:
            of_node.setdefault(step.name.partition(PRIOR)[0], []).append(step)
        return {name: tuple(steps) for name, steps in of_node.items()}

    @functools.cached_property
    def in_parts(self) -> frozenset[str]:
        """Names of the values that lie in parts with the members, what enters included."""
        made = {step.name for step in self.steps if not step.global_op and not step.sums}
        taken = {name for step in self.steps for name in step.maps}
        return frozenset(name for name in made | taken if name in self.sides)

    def own(self, name: str) -> tuple[int, int]:
        """Return the most rows, and the most columns, that a member has of a map."""
        held = self.mesh.all_owned(self.sides[name])
        return max(rows.size for rows, _ in held), max(columns.size for _, columns in held)

    def share(self, name: str) -> float:
        """Return the part of a map that the largest member has."""
        return math.prod(self.own(name)) / math.prod(self.sides[name])

    def fetches(self, step: Step) -> Iterator[Fetch]:
        """Yield what a step fetches of each map that it takes, where a member needs what another has."""
        for source in step.maps:
            if step.sums:
                continue
            fetch = _fetch(self.mesh, source, step.rules, self.sides[step.name], self.sides[source])
            if not fetch.exchange.is_local:
                yield fetch

    def borders(self, step: Step, fetch: Fetch) -> list[Borders | None]:
        """Return, by member, how a convolution is taken apart into own part and halos; None where it is not."""
        exchange, whole = fetch.exchange, self.sides[fetch.source]
        boxes = zip(self.mesh.all_owned(self.sides[step.name]), exchange.boxes, exchange.owned, strict=True)
        return [borders(step.rules, made, have, own, whole) for made, have, own in boxes]

    def gathered(self, name: str) -> Fetch:
        """Return what member 0 fetches to have all of a map."""
        sides = self.sides[name]
        return Fetch(name, self.mesh.gathered(sides), math.prod(sides), 0)


def divide_among(model: StreamedModel, grid: Grid) -> SideBySide:
    """Return the region of ``model`` that a team of ``grid`` computes side by side; one without steps where nothing can
    be divided so."""
    mesh = SpatialMesh(grid, (model.side[0], model.side[1]))
    steps, ends_at = list(model.steps), model.ends_at
    if reason := mesh.fault(mesh.side):
        return SideBySide(mesh, (), model.sides, ("the tile", reason))
    for number, step in enumerate(steps):
        if not step.global_op and not step.sums and (reason := mesh.fault(step.sides)):
            ends_at = (step.name, reason)
            node = step.name + PRIOR
            steps = [each for each in steps[:number] if not each.name.startswith(node)]
            break
    while steps and steps[-1].global_op:  # what is made of the last sums belongs to what follows
        steps.pop()
    return SideBySide(mesh, tuple(steps), model.sides, ends_at)


@functools.lru_cache(4096)
def _fetch(mesh: SpatialMesh, source: str, rules: tuple, made: tuple[int, int], taken: tuple[int, int]) -> Fetch:  # type: ignore[type-arg]
    exchange = mesh.exchange(rules, made, taken)
    padded, lopsided = 0, False
    for need, box in zip(exchange.needs, exchange.boxes, strict=True):
        pads = [(has.start - wants.start, wants.stop - has.stop) for wants, has in zip(need, box, strict=True)]
        lopsided |= any(before != after for before, after in pads)
        padded = max(padded, box_px(need))
    return Fetch(source, exchange, max(map(box_px, exchange.boxes)), padded if lopsided else 0)


def box_px(box: Box | tuple[Span, ...]) -> int:
    return math.prod(span.size for span in box)
