"""Estimate seconds, device bytes and host bytes of a step whose tiles are computed box by box.

Takes the region of a model (``RegionSpec``), the operations of its steps, and the graph of the whole model; gives
what a search asks of a candidate. Each part's operations are timed at the size of its box, by the same costs as any
other candidate's, and count as often as the boxes compute them: once without gradients, and once more with them before
they go back. What follows the region is a stage of its own. No torch here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from parallel import remembered
from parallel.cost.cluster import Cluster
from parallel.cost.stage_cost import Costs, stage_costs
from parallel.graph.layers import Layer, LayerGraph, Op
from parallel.graph.partition import Partition
from parallel.graph.scale import on_part
from parallel.memory.rank_bytes import RankBytes
from parallel.memory.stage_bytes import StageBytes, StageMemory
from parallel.plan.added_costs import Sum, sum_in_team_s
from parallel.plan.part_costs import convolved
from parallel.plan.plan import Limit
from parallel.schedule.timeline import StageCost
from parallel.space.boxes import Boxes, plan_boxes
from parallel.space.phases import peak_stored_bytes, phases_of
from parallel.space.rule import Step
from parallel.space.spatial_plan import RegionSpec, divided_region
from parallel.space.team import TeamGrid
from parallel.strategy import Strategy

SIDES = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Of boxes, in px, that a search tries."""
TILE_PX_BYTES = 3
"""Of the tile, which lies on the host as bytes."""
MAP_PASSES = 4
"""Times that a byte which a box fetches is moved: copied in both passes, its gradient read and added."""
STORED_PASSES = 3
"""Likewise of a map that is stored: written, and its gradient zeroed and read."""
NEIGHBOURS = 2
"""Members that one fetches halos of a map from."""

_Key = tuple[int, int, int | None, TeamGrid | None]
"""Side of the boxes, tiles of a microbatch, bytes of maps that are stored, and the grid of the team."""


@dataclass(frozen=True)
class Streamed:
    """Model that can be computed box by box.

    Attributes:
        region: for one tile.
        ops: by name of a step, what its forward pass computes of a tile of ``side`` px.
        whole: the loss is computed with it, box by box: nothing follows.
        estimate: returns what the layers of a graph cost, by tiles of a microbatch.
        hints: by tiles of a microbatch and grid of teams, the box size that a search begins with, which does not
            change what it finds: boxes take about as much on tiles of any size.
    """

    region: RegionSpec
    ops: Mapping[str, tuple[Op, ...]]
    side: int
    estimate: Callable[[LayerGraph], Callable[[int], Costs]]
    whole: bool = False
    hints: dict[tuple[int, TeamGrid | None], int] = field(default_factory=dict)


class StreamedStages:
    """Bytes and costs of candidates that compute tiles box by box."""

    def __init__(self, streamed: Streamed, cluster: Cluster) -> None:
        self._streamed, self._cluster = streamed, cluster

    def sides(self, grid: TeamGrid | None) -> list[int]:
        """Return the sides of boxes to try: smaller than the tile, or the part of a member of a team of ``grid``."""
        rows, columns = self._streamed.region.side
        largest = max(rows, columns) if grid is None else max(-(-rows // grid.rows), -(-columns // grid.columns))
        return [side for side in SIDES if side < largest]

    @remembered
    def region(self, grid: TeamGrid | None) -> RegionSpec | None:
        """Return the region that is computed box by box; for members of a team, as far as every one has a part."""
        return self._streamed.region if grid is None else divided_region(self._streamed.region, grid)

    def boxes(self, strategy: Strategy, tiles: int) -> Boxes:
        """Return the boxes of a candidate.

        Args:
            tiles: of its largest microbatch.
        """
        return self._planned(_key(strategy, tiles))

    @remembered
    def _planned(self, key: _Key) -> Boxes:
        side, tiles, stored, grid = key
        return plan_boxes(self._model(tiles, grid), side, grid or TeamGrid(), stored)

    @remembered
    def _model(self, tiles: int, grid: TeamGrid | None) -> RegionSpec:
        region = self.region(grid)
        assert region is not None, grid
        return region.of_tiles(tiles)

    def stage_bytes(self, strategy: Strategy, tiles: int, memory: StageMemory) -> StageBytes:
        """Return the bytes of the only stage, of a team's largest member.

        Args:
            memory: of the graph of the whole model and its loss for such a microbatch, or of the largest member's part.
        """
        boxes, graph = self.boxes(strategy, tiles), memory.graph
        parameters, box, start = sum(graph.owned_bytes), self._box_bytes(boxes), self._end(strategy, graph)
        here = boxes.on_device(strategy.policy.map_bytes or 0)
        of_rest = after = forward = 0
        if start < len(graph.layers):
            rest = memory.of_layers((start, len(graph.layers)))
            of_rest, after, forward = max(rest.first_backward, rest.forward), rest.parameters, rest.forward
        # What leaves the region as a map waits on the device for its gradient while boxes go back.
        leaving = sum(2 * boxes.own_bytes(name) for name in boxes.region.live_out if name in boxes.region.sides)
        own = boxes.entering_bytes + boxes.peak_bytes(here)
        first = own + max(of_rest, after + leaving + box)
        # Gradients that a team sums lie in buckets, which is counted elsewhere.
        beside = 0 if strategy.grid else parameters
        again = own + beside + max(of_rest, leaving + box)
        largest = max(layer.largest_param_bytes for layer in graph.layers)
        return StageBytes(parameters, own, own, own + forward, own + forward, again, first, 0, 0, 0, 0, largest)

    def _box_bytes(self, boxes: Boxes) -> int:
        """Return the bytes of the fullest box, and of others on their way where copies overlap the computation."""
        return boxes.device_bytes + (boxes.copied_bytes if self._cluster.kind == "cuda" else 0)

    def host_bytes(self, strategy: Strategy, tiles: int) -> int:
        """Return the bytes of maps between parts, and of the tiles of a microbatch."""
        boxes = self.boxes(strategy, tiles)
        here = boxes.on_device(strategy.policy.map_bytes or 0)
        return boxes.host_bytes - boxes.stored_bytes + boxes.on_host(here) + self.tile_bytes(tiles)

    def fits_host(self, strategy: Strategy, tiles: int, limit: float) -> bool:
        """Return whether ``host_bytes`` are within ``limit``; known without a plan where maps between phases alone take
        more."""
        least = self._crossing(tiles, strategy.grid) // strategy.members  # the largest member has as much at least
        return least + self.tile_bytes(tiles) <= limit and self.host_bytes(strategy, tiles) <= limit

    @remembered
    def _crossing(self, tiles: int, grid: TeamGrid | None) -> int:
        """Return the bytes of all maps between phases."""
        model = self._model(tiles, grid)
        return peak_stored_bytes(phases_of(model.steps, model.live_out), model.sizes, model.images)

    def tile_bytes(self, tiles: int) -> int:
        """Return the bytes of the tiles of a microbatch, on the host."""
        return tiles * TILE_PX_BYTES * math.prod(self._streamed.region.side)

    def limit(self, strategy: Strategy, tiles: int, held: RankBytes) -> Limit:
        """Return what takes most of the device, or of the host where that lacks more.

        Args:
            held: by the fullest rank.
        """
        boxes = self.boxes(strategy, tiles)
        host, box = self.host_bytes(strategy, tiles), self._box_bytes(boxes)
        if host - self._cluster.host_bytes > held.total - self._cluster.usable_bytes:
            maps, normed = boxes.stored_bytes, len(boxes.phases) > 2
            if host > 2 * maps:
                return Limit("tile on the host", host - maps)
            return Limit("maps of norms on the host" if normed else "maps on the host", maps)
        parts = {
            "parameters": held.parameters + held.optimizer,
            "box": box,
            "after boxes": held.total - held.communication - held.parameters - held.optimizer - box,
        }
        what = max(parts, key=lambda name: parts[name])
        return Limit(what, parts[what], str(strategy.policy.stream) if what == "box" else "")

    def stage_cost(self, strategy: Strategy, tiles: int, graph: LayerGraph, costs: Costs) -> StageCost:
        """Return the cost of the whole model for a microbatch.

        Args:
            graph, costs: of the whole model and its loss.
        """
        boxes, start = self.boxes(strategy, tiles), self._end(strategy, graph)
        (whole,) = stage_costs(Partition(graph, (0,)), costs)
        forward = sum(cost.forward_s for cost in costs.layers[start:])
        backward = sum(cost.backward_s for cost in costs.layers[start:])
        once, again = self._region_s(_key(strategy, tiles))
        moved = _moved(boxes, boxes.on_device(strategy.policy.map_bytes or 0)) / self._cluster.copy_bandwidth
        if strategy.grid:
            exchanged = self._exchange_s(boxes)
            once, again = once + exchanged, again + exchanged
        return dataclasses.replace(
            whole,
            forward_s=forward + once + moved / 3,
            backward_s=backward + again + moved * 2 / 3,
            backward_input_s=backward + again,
            backward_weight_s=0.0,
            activation_bytes=0,
        )

    def _exchange_s(self, boxes: Boxes) -> float:
        """Return the seconds of the exchanges of one pass: halos of maps, and sums."""
        members = boxes.mesh.grid.members
        link = self._cluster.link(0, members - 1)
        assert link is not None
        fetched = [size for size in boxes.fetched_of_others.values() if size]
        sums = [step for phase, part in boxes.parts() for step in phase.live_steps(part) if step.sums]
        halos = sum(NEIGHBOURS * link.latency_s + size / link.bandwidth for size in fetched)
        return halos + sum(sum_in_team_s(Sum(step.value_bytes, True), members, self._cluster) for step in sums)

    def _end(self, strategy: Strategy, graph: LayerGraph) -> int:
        """Position in ``graph`` of what follows the region."""
        region = self.region(strategy.grid)
        assert region is not None
        if self._streamed.whole and region is self._streamed.region:
            return len(graph.layers)
        made = {step.name for step in region.steps}
        return 1 + max(position for name, position in graph.position.items() if name in made)

    @remembered
    def _region_s(self, key: _Key) -> tuple[float, float]:
        """(forward pass, backward pass with all recomputed), seconds."""
        side, tiles, stored, grid = key
        boxes, layers, times, at_hand = self._planned((side, 1, stored, grid)), [], [], []
        for number, (phase, part) in enumerate(boxes.parts()):
            usual, of_all = boxes.work(phase, part)
            given = boxes.stored_by(phase, part)
            for step in phase.steps_of(part):
                if usual.get(step.name):
                    layers.append(self._layer(step, number, usual[step.name]))
                    times.append(of_all[step.name] / usual[step.name])
                    products = any(op.convolution for op in layers[-1].ops)
                    at_hand.append(step.name in given and products)
        costs = self._streamed.estimate(LayerGraph(tuple(layers)))(tiles)
        timed = list(zip(costs.layers, times, at_hand, strict=True))
        once = sum(cost.forward_s * n for cost, n, _ in timed)
        # Convolutions whose values are stored are not recomputed.
        again = sum(cost.forward_s * n for cost, n, kept in timed if not kept)
        return once, again + sum(cost.backward_s * n for cost, n, _ in timed)

    def _layer(self, step: Step, part: int, share: float) -> Layer:
        """Return the work of one box in a step, as a layer."""
        scale = share * math.prod(self._streamed.region.side) / self._streamed.side**2
        size = round(step.value_bytes * share)
        ops = self._streamed.ops.get(step.name, ())
        layer = Layer(f"{step.name}@{part}", "box", (), "", size, step.param_bytes, ops=ops)
        sides = (math.sqrt(scale),) * 2
        shapes = [None if op.convolution is None else convolved(op.convolution, sides) for op in ops]
        scaled = tuple(on_part(op, layer, scale, shape) for op, shape in zip(ops, shapes, strict=True))
        return dataclasses.replace(layer, ops=scaled)


def _moved(boxes: Boxes, here: frozenset[str]) -> float:
    """Bytes that are moved between device and host, where maps ``here`` stay on the device."""
    fetched = sum(boxes.fetched_bytes(phase, part, here) for phase, part in boxes.parts())
    return MAP_PASSES * fetched + STORED_PASSES * boxes.on_host(here)


def _key(strategy: Strategy, tiles: int) -> _Key:
    assert strategy.policy.stream is not None
    return strategy.policy.stream, tiles, strategy.policy.host_bytes, strategy.grid
