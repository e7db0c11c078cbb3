"""Pictures of which way of training is needed: memory over the side of tiles, and model size over branches.

Takes curves and figures; writes SVG by matplotlib. Below the curves, a bar for each device shows from which side on
which way is the first that fits. The map has the sizes of models that fit one device in-core, by their branches.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from app.planning.regions import FAMILIES, SIDES, MemoryCurve, PlannerAt, branches, memory_curves, regions
from parallel.plan.candidates import PLAIN
from parallel.units import bytes_text
from pipelines.catalog.table import counted

if TYPE_CHECKING:  # half a second, and only needed to draw
    from matplotlib.figure import Figure

LIMITS = tuple(gib << 30 for gib in (16, 32, 80))
"""Bytes of the devices that are drawn."""
GIB = 1 << 30
COLOURS = ("#1f66b1", "#c25a0a", "#157f64")
"""Of the families; they differ for colour-blind eyes, too."""
DASHES = ("-", "--", ":")
"""Of the curves of a family, in order."""
POINTS = 100
"""Of a curve that is drawn."""
PARAMETER_BYTES = 4
MOST_BRANCHES, SMALLEST, LARGEST = 32, 1e6, 1e11
"""Ends of the map: branches, and parameters."""


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
    row = planner.smallest_memory("ddp" if ranks > 1 else "single", ranks, PLAIN)
    if row is None or not row.peak_bytes:
        return
    parameters = sum(planner.task.graph.owned_bytes) / PARAMETER_BYTES
    each = PARAMETER_BYTES * (2 + planner.task.slots)
    activations = max(row.peak_bytes) - each * parameters
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
        axes.fill_between((0.7, right), SMALLEST, max(size, SMALLEST), color=COLOURS[0], alpha=0.15, lw=0)
        axes.fill_between(
            (right, 1.4 * MOST_BRANCHES), SMALLEST, max(size, SMALLEST), color=COLOURS[2], alpha=0.15, lw=0
        )
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
