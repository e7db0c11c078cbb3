"""The picture of weak scaling: efficiency over ranks, few tiles a group and more, beside the published figure.

Takes simulated curves; gives an SVG on a ground of its own, so that it reads the same on light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.weak_scaling.simulation import ASSUMED, NO_OVERLAP, SPREAD, Curve

STYLES = {
    "mp-basic": ("#5b5b5b", "o"),
    "mast": ("#0072b2", "s"),
    "master": ("#0072b2", "D"),
    "1f1b": ("#d55e00", "^"),
    "bidirectional": ("#009e73", "v"),
}
PUBLISHED_COLOUR = "#b8005c"
WHAT_IF = "what if:"


def draw_picture(curves: Sequence[Curve], published: tuple[int, float], title: str, path: Path) -> None:
    """Write the picture to ``path``.

    Args:
        published: ranks and efficiency; left out where the curves do not go so far.
    """
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "weak scaling"  # the same picture is the same file
    tiles = sorted({curve.tiles for curve in curves})
    figure = Figure(figsize=(12, 5.6), layout="constrained", facecolor="white")
    charts = figure.subplots(1, len(tiles), sharey=True, squeeze=False)[0]
    for chart, each in zip(charts, tiles, strict=True):
        own = [curve for curve in curves if curve.tiles == each]
        _efficiency(chart, own, published)
        chart.set_title(f"{each} tiles a step for each group of {_depths(own)} ranks", fontsize=11)
    charts[0].set_ylabel("efficiency: images/s over\nthose of one group times groups, %")
    entries = {label: line for chart in charts for line, label in zip(*chart.get_legend_handles_labels(), strict=True)}
    names = sorted(entries, key=lambda name: name.startswith(WHAT_IF))
    figure.legend([entries[name] for name in names], names, loc="outside lower center", ncols=4, frameon=False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path, metadata={"Date": None})


def _depths(curves: Sequence[Curve]) -> str:
    """Ranks of a group: the number most common, and whose is another."""
    depths = [curve.strategy.depth for curve in curves]
    common = max(depths, key=depths.count)
    others = [f"{curve.strategy.name} {curve.strategy.depth}" for curve in curves if curve.strategy.depth != common]
    return f"{common}" + (f" ({', '.join(others)})" if others else "")


def _efficiency(chart: Axes, curves: Sequence[Curve], published: tuple[int, float]) -> None:
    for curve in curves:
        candidate = curve.strategy
        colour, marker = STYLES[candidate.name]
        label = candidate.name + " with recomputation" * (candidate.policy.recompute != "none")
        percent = [100 * part for part in curve.efficiency[ASSUMED.name]]
        chart.plot(curve.ranks, percent, color=colour, marker=marker, markersize=5, linewidth=1.8, label=label)
    plain = curves[0]
    for change, dashes in ((NO_OVERLAP, (1, 2)), (SPREAD, (5, 3))):
        chart.plot(
            plain.ranks,
            [100 * part for part in plain.efficiency[change.name]],
            color=STYLES[plain.strategy.name][0],
            dashes=dashes,
            linewidth=1.4,
            label=f"{WHAT_IF} {plain.strategy.name}, {change.name}",
        )
    ranks = max(curves, key=lambda curve: len(curve.ranks)).ranks
    if ranks[-1] >= published[0]:
        at, percent_there = published[0], 100 * published[1]
        chart.plot(at, percent_there, "*", color=PUBLISHED_COLOUR, markersize=15, label="measured: GEMS, SC'20")
        chart.annotate(
            f"published {percent_there:.2f} %",
            (at, percent_there),
            xytext=(-12, 10),
            textcoords="offset points",
            ha="right",
            fontsize=10,
            fontweight="bold",
            color=PUBLISHED_COLOUR,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    chart.set_xscale("log", base=2)
    chart.set_xticks(ranks, [f"{n:,}" for n in ranks])
    chart.minorticks_off()
    chart.set_ylim(top=100.3)
    chart.set_xlabel("ranks (V100), log scale")
    chart.grid(axis="y", color="#dddddd", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.spines[["top", "right"]].set_visible(False)
