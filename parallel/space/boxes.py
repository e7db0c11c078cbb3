"""A region planned in boxes, from shapes alone: phases, their parts, and the bytes that they take of device and host.

Takes the steps of a region at one size of tile, and the grid of a team, which may be of one rank; returns ``Boxes``,
for the runner and the planner alike. Phases and parts are those of the whole tile, so that all members come to the same
messages; boxes end where the parts of members do. Each member holds as much of a map between parts as its boxes look
at. All bytes are those of the largest member. No torch here.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from parallel.space.box_bytes import AxisNeeds, Cuts, fullest_box_bytes
from parallel.space.cuts import Span
from parallel.space.parts import divide, worst_case_boxes
from parallel.space.phases import Part, Phase, peak_map_bytes, peak_stored_bytes, phases_of
from parallel.space.spatial_plan import RegionSpec
from parallel.space.team import SpatialMesh, TeamGrid

EXCHANGE_COPIES = 2
"""Of what a member fetches of others: the room it arrives in, and what it sends meanwhile, which is about as much."""
STORED_PER_PX = 32
"""Bytes of maps for each px of the tile that may lie between parts, where nobody says: 8 GiB for 16,384 px."""


@dataclass(frozen=True)
class Boxes:
    """A region in boxes.

    Attributes:
        phases: in order.
        mesh: the members' parts of the tile.
    """

    region: RegionSpec
    phases: tuple[Phase, ...]
    mesh: SpatialMesh

    def parts(self) -> Iterator[tuple[Phase, Part]]:
        """Yield every part with its phase, in order."""
        for phase in self.phases:
            for part in phase.parts:
                yield phase, part

    @functools.cached_property
    def square(self) -> bool:
        """Rows and columns are alike, and cut alike."""
        return self.region.square and self.mesh.cuts[0] == self.mesh.cuts[1]

    def cuts(self, part: Part) -> Cuts:
        """Return where the boxes of a part begin and end."""
        return self.mesh.boxed(part.box)

    def places(self, member: int, part: Part) -> tuple[range, range]:
        """Return the numbers of the rows and columns of boxes that ``member`` computes."""
        return self.mesh.boxes_of(member, self.cuts(part))

    def counts(self, part: Part, axis: int) -> dict[int, int]:
        """Return number of a box -> how many are as large, of the member with most boxes along an axis: the first and
        the last, and the largest between them."""
        members = range(self.mesh.grid.members)
        return _counts(self.cuts(part)[axis], max((self.places(member, part)[axis] for member in members), key=len))

    @functools.cached_property
    def held(self) -> dict[str, tuple[int, int]]:
        """(Most rows, most columns) that a member holds of each map between parts, or that enters; of one rank none."""
        if self.mesh.grid.members == 1:
            return {}
        live = (step.name for phase, part in self.parts() for step in phase.live_steps(part) if not step.sums)
        names = {*self.region.inputs, *live}
        spans = {name: [list(axis) for axis in self.mesh.axes(self.region.sides[name])] for name in names}
        for phase, part in self.parts():
            self._look(phase, part, spans)
        return {
            name: (max(span.size for span in rows), max(span.size for span in columns))
            for name, (rows, columns) in spans.items()
        }

    def _look(self, phase: Phase, part: Part, spans: Mapping[str, list[list[Span]]]) -> None:
        """Widen what members hold to where their boxes of a part look."""
        steps, live_out, cuts, grid = phase.steps_of(part), phase.live_steps(part), self.cuts(part), self.mesh.grid
        for axis, count in enumerate((grid.rows, grid.columns)):
            for number in range(count):
                boxes = self.places(number * grid.columns if axis == 0 else number, part)[axis]
                needs = AxisNeeds(live_out, self.region.sides, cuts[axis], axis, boxes[0], boxes[-1])
                for name, span in needs.prepend_all(steps).items():
                    if name in spans:
                        start, stop = spans[name][axis][number]
                        spans[name][axis][number] = Span(min(start, span.start), max(stop, span.stop))

    def map_bytes(self, name: str) -> int:
        """Return the bytes that a member holds of a map."""
        return self._bytes(name, self.held[name]) if name in self.held else self.own_bytes(name)

    def own_bytes(self, name: str) -> int:
        """Return the bytes of a map that a member owns."""
        return self._bytes(name, self.mesh.largest(self.region.sides[name]))

    def _bytes(self, name: str, sides: tuple[int, int]) -> int:
        """Return the bytes of so many rows and columns of a map."""
        return round(self.region.sizes[name] * math.prod(sides) / math.prod(self.region.sides[name]))

    @functools.cached_property
    def fetched_of_others(self) -> dict[str, int]:
        """Bytes that a member is sent of each map between parts, and of what enters."""
        return {name: self.map_bytes(name) - self.own_bytes(name) for name in self.held}

    @property
    def entering_bytes(self) -> int:
        """Bytes of a member's part of the tile, on the device; a tile that one rank has alone waits on the host."""
        return sum(map(self.own_bytes, self.region.inputs)) if self.mesh.grid.members > 1 else 0

    @functools.cached_property
    def host_bytes(self) -> int:
        """Bytes of maps between parts, and of the member's part of the tile with halos of others'."""
        entering = (name for name in self.region.inputs if self.fetched_of_others.get(name))
        return self.stored_bytes + sum(map(self.map_bytes, entering))

    @functools.cached_property
    def _stored(self) -> tuple[frozenset[str], list[tuple[set[str], set[str]]]]:
        """Names of the maps between parts; of each part those that it gives and fetches."""
        parts = []
        for phase, part in self.parts():
            steps = phase.steps_of(part)
            made = {step.name for step in steps}
            fetched = {name for step in steps for name in step.maps} - made
            parts.append(({step.name for step in phase.live_steps(part)}, fetched - self.region.images))
        return frozenset().union(*(given & other for given, _ in parts for _, other in parts)), parts

    def peak_bytes(self, names: Collection[str]) -> int:
        """Return the peak bytes of some maps between parts, and of their gradients."""
        return peak_map_bytes(names, self._stored[1], self.map_bytes)

    def on_device(self, most: int) -> frozenset[str]:
        """Return names of maps between parts, the largest first, that take at most ``most`` bytes of a device, with
        their gradients."""
        chosen: set[str] = set()
        for name in sorted(self._stored[0] if most > 0 else (), key=lambda name: (-self.map_bytes(name), name)):
            if self.peak_bytes({*chosen, name}) <= most:
                chosen.add(name)
        return frozenset(chosen)

    def on_host(self, here: frozenset[str]) -> int:
        """Return the peak bytes of all maps between parts but those ``here``, and of their gradients."""
        return self.peak_bytes(self._stored[0] - here) if here else self.stored_bytes

    @functools.cached_property
    def stored_bytes(self) -> int:
        """Peak bytes of the maps between parts, and of their gradients."""
        return self.peak_bytes(self._stored[0])

    @functools.cached_property
    def device_bytes(self) -> int:
        """Peak bytes of a step without parameters, optimizer and what follows the region: of the fullest box, with the
        gradients of parameters that there are by then; or of a map's pieces on their way, if those are more."""
        most = summed = 0.0
        for phase, part in reversed(list(self.parts())):
            own = sum(step.param_bytes for step in phase.steps_of(part))
            several = any(sum(self.counts(part, axis).values()) > 1 for axis in range(2))
            most = max(most, summed + own * several + self.part_bytes(phase, part))
            summed += own
        return max(round(most), EXCHANGE_COPIES * max(self.fetched_of_others.values(), default=0))

    def part_bytes(self, phase: Phase, part: Part) -> float:
        """Return the bytes of the fullest box of a part."""
        rows, columns = (_counts(cuts, range(len(cuts) - 1)) for cuts in self.cuts(part))
        boxes = ((r, c) for r in rows for c in columns if r <= c or not self.square)
        steps, live_out = phase.steps_of(part)[::-1], phase.live_steps(part)
        return fullest_box_bytes(steps, live_out, self.region, self.cuts(part), boxes, self.square)

    @functools.cached_property
    def copied_bytes(self) -> int:
        """Bytes of boxes on their way to and from the host while another is computed, where copies overlap: in
        a backward pass what the next box fetches, and gradients of what the last two fetched."""
        most = 0.0
        for phase, part in self.parts():
            count = math.prod(sum(self.counts(part, axis).values()) for axis in range(2))
            given = sum(map(self.own_bytes, self.stored_by(phase, part))) / count
            most = max(most, 3 * self.fetched_bytes(phase, part) / count + 2 * given)
        return round(most)

    def work(self, phase: Phase, part: Part) -> tuple[dict[str, float], dict[str, float]]:
        """Return by step the share of it that a usual box computes, and that all boxes compute together: 1 and what
        their halos add."""
        steps, live_out = phase.steps_of(part), phase.live_steps(part)
        usual, of_all = ({step.name: 1.0 for step in steps} for _ in range(2))
        cuts = self.cuts(part)
        for axis, middle in enumerate(worst_case_boxes(cuts)[0]):
            counts = self.counts(part, axis)
            needs = {kind: AxisNeeds(live_out, self.region.sides, cuts[axis], axis, kind) for kind in {*counts, middle}}
            for step in reversed(steps):
                sizes = {kind: need.prepend(step).size for kind, need in needs.items()}
                usual[step.name] *= sizes[middle] / step.sides[axis]
                of_all[step.name] *= sum(count * sizes[kind] for kind, count in counts.items()) / step.sides[axis]
        return {name: share for name, share in usual.items() if share}, of_all

    def stored_by(self, phase: Phase, part: Part) -> set[str]:
        """Return names of the maps that a part gives to later ones."""
        return {step.name for step in phase.live_steps(part) if not step.sums} - set(self.region.live_out)

    def fetched_bytes(self, phase: Phase, part: Part, here: frozenset[str] = frozenset()) -> float:
        """Return the bytes that all boxes of a part fetch, of maps that are not ``here``."""
        steps, live_out, region, cuts = phase.steps_of(part), phase.live_steps(part), self.region, self.cuts(part)
        rows, columns = (
            AxisNeeds(live_out, region.sides, cuts[axis], axis, usual).prepend_all(steps)
            for axis, usual in enumerate(worst_case_boxes(cuts)[0])
        )
        fetched = (rows.keys() & columns.keys()) - here.union(step.name for step in steps)
        px = {name: rows[name].size * columns[name].size for name in fetched}
        of_box = math.fsum(region.sizes[name] * px[name] / math.prod(region.sides[name]) for name in fetched)
        return of_box * math.prod(sum(self.counts(part, axis).values()) for axis in range(2))


def _counts(cuts: Sequence[int], numbers: range) -> dict[int, int]:
    """Return number of a box -> how many are as large: the first and the last, and the largest between them."""
    counts = {numbers[0]: 1, numbers[-1]: 1}
    if inner := numbers[1:-1]:
        counts[max(inner, key=lambda k: cuts[k + 1] - cuts[k])] = len(inner)
    return counts


def plan_boxes(region: RegionSpec, box: int, grid: TeamGrid, stored_bytes: int | None = None) -> Boxes:
    """Return the region in boxes of ``box`` px of the members' parts of a tile, larger where maps are small.

    Args:
        region: as far as a team of the grid computes it side by side (``divided_region``).
        stored_bytes: that maps between parts may take on the host of each member; None: 32 for each pixel of its part.

    Raises:
        ValueError: a value that is several maps would have to be stored.
    """
    stored_bytes = None if stored_bytes is None else stored_bytes * grid.members
    recomputed = () if stored_bytes is None else region.maps_to_recompute(stored_bytes)
    phases = phases_of(region.steps, region.live_out, recomputed)
    left: float = STORED_PER_PX * math.prod(region.side) * region.tiles
    if stored_bytes is not None:
        # Maps within a phase may all have their gradients beside them.
        left = max(0, min(left, (stored_bytes - peak_stored_bytes(phases, region.sizes, region.images)) // 2))
    box_bytes = math.prod(min(1.0, box / side) for side in region.side) * _whole_tile_bytes(region)
    # A map has one place on the host: what several phases make none may store.
    made = Counter(step.name for phase in phases for step in phase.steps)
    barred = region.whole.union(name for name, phases_with in made.items() if phases_with > 1)
    planned = []
    for phase in phases:
        if several := region.whole & phase.fetched:
            raise ValueError(f"--stream: {min(several)} is several maps, which are used on both sides of a sum")
        parts = divide(region, phase, box, box_bytes, left, barred) if phase.steps else []
        planned.append(replace(phase, parts=tuple(parts)))
        within = {step.name: step.value_bytes for part in parts for step in phase.live_steps(part)}
        left = max(0, left - sum(size for name, size in within.items() if name not in phase.live_out))
    return Boxes(region, tuple(planned), SpatialMesh(grid, region.side))


def _whole_tile_bytes(region: RegionSpec) -> float:
    """Bytes of one box that is the whole tile; smaller boxes without halos take their share of it."""
    steps = [step for step in region.steps if not step.global_op]
    rows, columns = region.side
    live_out = [step for step in steps if step.name in region.live_out]
    return fullest_box_bytes(steps[::-1], live_out, region, ((0, rows), (0, columns)), [(0, 0)])
