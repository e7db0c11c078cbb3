"""The picture of the sweep: seconds of a sum over its bytes, measured and by the formula, for each way.

Takes measured seconds and the fitted machine; gives an SVG on a ground of its own, so that it reads the same on light
and dark pages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from benchmarks.workers.all_reduce_model import WAYS, Machine

STYLES = {"flat": ("#5b5b5b", "o"), "host": ("#0072b2", "s"), "device": ("#d55e00", "^")}
NAMED = {"flat": "flat: Gloo over all ranks", "host": "host: in shared memory", "device": "device: by proxies"}


def draw_picture(
    sizes: Sequence[int], measured: Mapping[str, Sequence[float]], fitted: Machine, title: str, path: Path
) -> None:
    """Write the picture to ``path``.

    Args:
        measured: seconds at each of ``sizes`` bytes, by way.
    """
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "all_reduce ways"  # the same picture is the same file
    figure = Figure(figsize=(9, 5.4), layout="constrained", facecolor="white")
    chart = figure.subplots()
    between = np.geomspace(sizes[0], sizes[-1], 60)
    for way in WAYS:
        colour, marker = STYLES[way]
        milliseconds = [1e3 * seconds for seconds in measured[way]]
        chart.plot(sizes, milliseconds, marker, color=colour, markersize=7, label=f"{NAMED[way]}, measured")
        model = [1e3 * fitted.seconds(way, size) for size in between]
        chart.plot(between, model, color=colour, linewidth=1.6, label="by the formula")
    chart.set_xscale("log", base=2)
    chart.set_yscale("log")
    chart.set_xticks(sizes, [in_words(size) for size in sizes])
    chart.minorticks_off()
    chart.set_xlabel("gradients of a rank, log scale")
    chart.set_ylabel("one sum, ms, log scale")
    chart.grid(axis="y", color="#dddddd", linewidth=0.8)
    chart.set_axisbelow(True)
    chart.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", frameon=False, ncols=3)
    figure.suptitle(title, fontsize=12, fontweight="bold")
    figure.savefig(path, metadata={"Date": None})


def in_words(size: int) -> str:
    """``size`` bytes as people say it.

    >>> in_words(4096), in_words(1 << 28)
    ('4 KiB', '256 MiB')
    """
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"
