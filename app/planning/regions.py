"""Memory of each way of training by tile size: which way is the first that fits a device, and pictures of it.

Takes a function that plans at any tile size; returns curves and regions, and writes them as SVG. All ways keep
everything on the device, without recomputation and offload, except one curve that shows recomputation. The map has the
sizes of models that fit one device in-core, by their branches.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from parallel.cost.cluster import GIB
from parallel.graph.blocks import heavy_positions
from parallel.graph.branches import find_branches
from parallel.graph.layers import LayerGraph
from parallel.graph.partition import Partition
from parallel.memory.rank_bytes import in_flight
from parallel.memory.windows import Windows
from parallel.plan.balance import partition_optimal
from parallel.plan.candidates import PLAIN, MemoryOptions, candidates, fewest_bytes
from parallel.plan.search import Planner
from parallel.plan.step_time import schedule_of
from parallel.strategy import Strategy
from parallel.units import bytes_text
from pipelines.catalog.table import counted

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
COLOURS = ("#1f66b1", "#c25a0a", "#157f64")
"""Of the families; they differ for colour-blind eyes, too."""
DASHES = ("-", "--", ":")
"""Of the curves of a family, in order."""
POINTS = 100
"""Of a curve that is drawn."""
PARAMETER_BYTES = 4
MOST_BRANCHES, SMALLEST, LARGEST = 32, 1e6, 1e11
"""Ends of the map: branches, and parameters."""


@dataclass(frozen=True)
class MemoryCurve:
    """Memory of a device by tile size.

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
    planners = [(side, planner) for side in SIDES if (planner := planner_at(side)) is not None]

    def curve(name: str, family: int, count: Callable[[Planner], int | None], faint: bool = False) -> MemoryCurve:
        counts = [(side, planner.cluster, count(planner)) for side, planner in planners]
        points = tuple((side, cluster.needed_bytes(size)) for side, cluster, size in counts if size is not None)
        return MemoryCurve(name, family, points, faint)

    curves = [
        curve(whole, 0, functools.partial(_row_bytes, whole, ranks, PLAIN)),
        curve(f"{whole}, recomputed by blocks", 0, functools.partial(_row_bytes, whole, ranks, RECOMPUTED), faint=True),
    ]
    if ranks > 1:
        curves += [curve(name, 1, functools.partial(_split_bytes, name, ranks, {})) for name in SPLITS]
        curves.append(curve("spatial", 1, functools.partial(_row_bytes, "spatial", ranks, PLAIN)))
    return [*curves, curve(f"{whole} in boxes of {BOX} px", 2, functools.partial(_box_bytes, whole, ranks))]


def _row_bytes(name: str, ranks: int, savings: MemoryOptions, planner: Planner) -> int | None:
    """Return the peak bytes of the smallest microbatches; None where the strategy cannot run."""
    row = planner.smallest_memory(name, ranks, savings)
    return max(row.peak_bytes) if row and row.peak_bytes else None


def _split_bytes(name: str, ranks: int, starts: dict[object, tuple[int, ...]], planner: Planner) -> int | None:
    """Return those of the number of stages that needs least, with cuts that balance what the ranks keep."""
    peaks = []
    for strategy in _leanest(name, ranks, planner):
        graph, _ = planner.stages.of(strategy)
        key = strategy.stages, len(graph.layers)
        if key not in starts:
            speeds = [1 / max(map(max, of_rank)) for of_rank in in_flight(*schedule_of(strategy))]
            kept = [float(size) for size in graph.freed_bytes]
            windows = Windows(graph, kept, [0, *planner.stages.places, len(graph.layers)])
            starts[key] = partition_optimal(windows, strategy.stages, speeds=speeds).starts
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


LIMITS = tuple(gib << 30 for gib in (16, 32, 80))
"""Bytes of the devices that are drawn."""


def write_regions(out: Path, planner_at: PlannerAt, *, model: str, tile: int, ranks: int) -> Iterator[str]:
    """Write ``memory.svg`` and ``map.svg`` into ``out``; yield what the first shows, a line for each device.

    Args:
        tile: side in px, of the map.
        ranks: that share the tiles of a step.
    """
    planner = planner_at(tile)
    assert planner is not None, tile  # a plan was made
    curves = memory_curves(planner_at, ranks)
    batch = f"{counted(planner.task.batch, 'tile')} a step on {counted(ranks, 'rank')}"
    _save(_memory(curves, f"{model}, {batch} in the smallest microbatches"), out / "memory.svg")
    for limit in LIMITS:
        words = [f"{FAMILIES[family]} to {end:.0f}" for family, _, end in regions(curves, limit)]
        yield f"{bytes_text(limit)} a device: {', '.join(words) or 'nothing up to 512'} px"
    peak = _row_bytes("ddp" if ranks > 1 else "single", ranks, PLAIN, planner)
    if peak is None:
        return
    parameters = sum(planner.task.graph.owned_bytes) / PARAMETER_BYTES
    each = PARAMETER_BYTES * (2 + planner.task.slots)
    activations = peak - each * parameters
    most = {}
    for limit in LIMITS:
        usable = dataclasses.replace(planner.cluster, memory_bytes=limit).usable_bytes
        most[limit] = max(0.0, usable - activations) / each
    title = f"one tile of {tile} px with {bytes_text(activations)} of activations, {each} bytes a parameter"
    _save(_map(model, parameters, branches(planner.task.graph), most, title), out / "map.svg")


def _memory(curves: Sequence[MemoryCurve], title: str) -> Figure:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 6.4), layout="constrained")
    axes, bars = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
    for number, curve in enumerate(curves):
        dash = DASHES[sum(other.family == curve.family for other in curves[:number])]
        if not curve.points:
            continue
        known = np.array(curve.points, float)
        sides = np.geomspace(known[0, 0], known[-1, 0], POINTS)
        sizes = np.interp(sides**2, known[:, 0] ** 2, known[:, 1])  # in proportion to the px
        label = f"{FAMILIES[curve.family]}: {curve.name}"
        colour, alpha = COLOURS[curve.family], 0.5 if curve.faint else 1.0
        axes.plot(sides, sizes / GIB, dash, color=colour, alpha=alpha, lw=2, label=label)
    for number, limit in enumerate(LIMITS):
        axes.axhline(limit / GIB, color="black", lw=1)
        axes.text(SIDES[-1], limit / GIB, f"{bytes_text(limit)} ", ha="right", va="bottom")
        for family, begin, end in regions(curves, limit):
            bars.barh(number, end - begin, left=begin, color=COLOURS[family], alpha=0.35)
            words = f"{FAMILIES[family]} to {end:.0f}" if end > 1.6 * begin else f"{end:.0f}"
            bars.text(math.sqrt(begin * end), number, words if end > 1.15 * begin else "", ha="center", va="center")
    axes.set(xscale="log", yscale="log", ylim=(None, 256), ylabel="memory of a device, GiB", title=title)
    axes.set_yticks(ticks := [2.0**k for k in range(-1, 9)], [f"{tick:g}" for tick in ticks], minor=False)
    axes.set_ylim(0.5)
    axes.grid(axis="y", alpha=0.3)
    axes.legend(loc="upper left", fontsize="small", framealpha=1)
    bars.set_yticks(range(len(LIMITS)), [bytes_text(limit) for limit in LIMITS])
    bars.set_xticks(places := [2**k for k in range(9, 15)], list(map(str, places)))
    bars.set(
        xlabel="side of the tiles, px; first that fits, with nothing recomputed or offloaded",
        xlim=(SIDES[0], SIDES[-1]),
    )
    for each in (axes, bars):
        each.minorticks_off()
        each.spines[["top", "right"]].set_visible(False)
    return figure


def _map(name: str, parameters: float, count: int, most: dict[int, float], title: str) -> Figure:
    """Draw the sizes of models that fit one device, by its memory, and this model's point."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    axes = figure.subplots()
    border, right = max(most.values()), math.sqrt(2)
    axes.axhspan(SMALLEST, LARGEST, color=COLOURS[1], alpha=0.2)
    for limit, size in most.items():
        for colour, ends in ((COLOURS[0], (0.7, right)), (COLOURS[2], (right, 1.4 * MOST_BRANCHES))):
            axes.fill_between(ends, SMALLEST, max(size, SMALLEST), color=colour, alpha=0.15, lw=0)
        if size > SMALLEST:
            axes.axhline(size, color="black", lw=1, ls="--")
            axes.text(1.35 * MOST_BRANCHES, 0.85 * size, f"fits {bytes_text(limit)} below", ha="right", va="top")
    axes.text(0.75, LARGEST / 2, "out-of-core\ndivide model or tile:\npipelines, fsdp, teams, boxes", va="top")
    if border > 4 * SMALLEST:
        axes.text(0.75, 1.3 * SMALLEST, "in-core\ndata parallelism", va="bottom")
        axes.text(1.1 * right, 1.3 * SMALLEST, "in-core, with branches\ndata parallelism, or subgraph", va="bottom")
    axes.plot([count], [parameters], "o", color="#b52c4b", markersize=10)
    axes.annotate(
        f"{name}: {parameters / 1e6:.3g} million, {count}", (count, parameters), (10, 6), textcoords="offset points"
    )
    axes.set(xscale="log", yscale="log", xlim=(0.7, 1.4 * MOST_BRANCHES), ylim=(SMALLEST, LARGEST), title=title)
    axes.set(xlabel="branches of a block that can be computed side by side", ylabel="parameters of the model")
    axes.set_xticks(ticks := [2**k for k in range(6)], map(str, ticks))
    axes.minorticks_off()
    return figure


def _save(figure: Figure, path: Path) -> None:
    from matplotlib import style

    with style.context(["default", {"svg.fonttype": "none", "svg.hashsalt": "megatile"}]):
        figure.savefig(path, format="svg", metadata={"Date": None})
