"""Memory that each way of training takes over the side of the tiles, and which way is the first that fits a device.

Takes a way to plan at any side; returns curves and regions. All ways keep everything on the device, without
recomputation and offload, but for one curve that shows what recomputation gives data parallelism.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from parallel.graph.blocks import heavy_positions
from parallel.graph.branches import find_branches
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.rank_bytes import in_flight
from parallel.plan.balance import partition_optimal
from parallel.plan.candidates import PLAIN, MemoryOptions, candidates, fewest_bytes
from parallel.plan.search import Planner
from parallel.plan.step_time import schedule_of
from parallel.strategy import Strategy

SIDES = (512, 1024, 4096, 16384)
"""Of tiles, in px, at which bytes are counted."""
FAMILIES = ("data parallelism", "splitting", "streaming")
SPLITS = ("1f1b", "master")
BOX = 512
"""px of the boxes."""
MANY_LAYERS = 1000
"""Of a model: boxes of more take minutes to plan, and have no curve."""
RECOMPUTED = MemoryOptions(("block",), (False,), stream=False)

PlannerAt = Callable[[int], Planner | None]
"""Side of the tiles in px -> their planner; None where the model does not run on such tiles."""


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a device over the side of tiles.

    Attributes:
        family: place in ``FAMILIES``.
        points: (side in px, bytes that a device needs), rising; sides that cannot be trained so are left out.
        faint: shown for comparison, and in no region.
    """

    name: str
    family: int
    points: tuple[tuple[int, int], ...]
    faint: bool = False

    def reach(self, limit: int) -> float:
        """Return the largest side that fits ``limit`` bytes, in px; 0 where none does. Bytes between two known sides
        are in proportion to the px."""
        for (side, size), (larger, more) in pairwise(self.points):
            if size <= limit < more:
                return math.sqrt(side**2 + (larger**2 - side**2) * (limit - size) / (more - size))
        return float(max((side for side, size in self.points if size <= limit), default=0))


def regions(curves: Sequence[MemoryCurve], limit: int) -> list[tuple[int, float, float]]:
    """Return (family, first side, last side) for a device of ``limit`` bytes: data parallelism where it fits, then
    splitting, then streaming."""
    begin, found = float(SIDES[0]), []
    for family in range(len(FAMILIES)):
        own = [curve.reach(limit) for curve in curves if curve.family == family and not curve.faint]
        if (end := max(own, default=0.0)) > begin:
            found.append((family, begin, end))
            begin = end
    return found


def memory_curves(planner_at: PlannerAt, ranks: int) -> list[MemoryCurve]:
    """Return the curves of data parallelism, then of splits, then of boxes; one rank has no splits."""
    whole = "ddp" if ranks > 1 else "single"
    ways: list[tuple[str, int, Callable[[Planner], int | None]]] = [
        (whole, 0, functools.partial(_row_bytes, whole, ranks, PLAIN)),
        (f"{whole}, recomputed by blocks", 0, functools.partial(_row_bytes, whole, ranks, RECOMPUTED)),
    ]
    if ranks > 1:
        ways += [(name, 1, functools.partial(_split_bytes, name, ranks, {})) for name in SPLITS]
        ways.append(("spatial", 1, functools.partial(_row_bytes, "spatial", ranks, PLAIN)))
    ways.append((f"{whole} in boxes of {BOX} px", 2, functools.partial(_box_bytes, whole, ranks)))
    planners = [(side, planner) for side in SIDES if (planner := planner_at(side)) is not None]

    def points(count: Callable[[Planner], int | None]) -> tuple[tuple[int, int], ...]:
        counts = [(side, planner.cluster, count(planner)) for side, planner in planners]
        return tuple((side, cluster.needed_bytes(size)) for side, cluster, size in counts if size is not None)

    return [MemoryCurve(name, family, points(count), "recomputed" in name) for name, family, count in ways]


def _row_bytes(name: str, ranks: int, savings: MemoryOptions, planner: Planner) -> int | None:
    """Return the peak bytes of the smallest microbatches; None where the strategy cannot run."""
    row = planner.smallest_memory(name, ranks, savings)
    return max(row.peak_bytes) if row and row.peak_bytes else None


def _split_bytes(name: str, ranks: int, starts: dict[object, tuple[int, ...]], planner: Planner) -> int | None:
    """Return those of the number of stages that needs least, with cuts that balance what the ranks keep.

    Args:
        starts: by numbers of stages and layers, positions of the cuts that were found at another side.
    """
    peaks = []
    for strategy in _leanest(name, ranks, planner):
        graph, _ = planner.stages.of(strategy)
        key = strategy.stages, len(graph.layers)
        if key not in starts:
            speeds = [1 / max(map(max, of_rank)) for of_rank in in_flight(*schedule_of(strategy))]
            kept = [float(size) for size in graph.freed_bytes]
            places = planner.stages.places
            starts[key] = partition_optimal(graph, strategy.stages, kept, speeds=speeds, positions=places).starts
        check = planner.check_memory(strategy, partition=Partition(graph, starts[key]))
        peaks += [] if check is None else [max(check.peak_bytes)]
    return min(peaks, default=None)


def _box_bytes(name: str, ranks: int, planner: Planner) -> int | None:
    """Return those of tiles in boxes of ``BOX`` px; None where their maps do not fit the host."""
    whole = _leanest(name, ranks, planner)
    many = len(planner.task.graph.layers) > MANY_LAYERS
    if many or not whole or BOX not in planner.stages.box_sides(whole[0]):
        return None
    check = planner.check_memory(planner.stages.within_host(whole[0].under(stream=BOX)))
    assert check is not None
    on_host = planner.stages.host_bytes(check.strategy, check.partition)
    return max(check.peak_bytes) if on_host <= planner.cluster.host_bytes else None


def _leanest(name: str, ranks: int, planner: Planner) -> list[Strategy]:
    """Return the candidates with the smallest microbatches, of each number of stages."""
    task = planner.task
    given = candidates(ranks, task.batch, names=[name], most_stages=planner.stages.most_stages)
    tried = fewest_bytes(each for each in given if each.copies == 1 or not task.one_copy)
    return [each for each in tried if each.m == tried[0].m]


def branches(graph: LayerGraph) -> int:
    """Return the most branches of a block that multiply matrices; 1 of a model that sub-graph parallelism refuses."""
    try:
        regions_of_blocks = find_branches(graph, members=2).regions
    except ValueError:
        return 1
    heavy = heavy_positions(graph)
    return max(sum(not heavy.isdisjoint(branch) for branch in region.branches) for region in regions_of_blocks)
