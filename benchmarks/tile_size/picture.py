"""The picture of the tile size benchmark: AUC over tile size, beside what tiles of two sizes show of each class.

Takes the rows of the result and the folder of slides; gives a PNG.
"""

from __future__ import annotations

import csv
import statistics
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region
from pipelines.slides.slide import Pixels

LARGE, SMALL = 2048, 256


def draw_picture(rows: list[dict[str, Any]], slides: Path, path: Path) -> None:
    """Write the picture to ``path``.

    Args:
        rows: with keys tile_px, seed, slide_auc.
        slides: folder made by ``row_slides``.
    """
    mpl.use("agg")
    figure = Figure(figsize=(13, 5.6), layout="constrained")
    chart, *pictures = figure.subplot_mosaic([["auc", "a", "b"], ["auc", "c", "d"]], width_ratios=[1.35, 1, 1]).values()
    _auc(chart, rows)
    for (label, slide), axes in zip(_first_of_each_class(slides), (pictures[:2], pictures[2:]), strict=True):
        large, x, y = _tiles(slide)
        axes[0].imshow(large, interpolation="antialiased")
        axes[0].add_patch(Rectangle((x, y), SMALL, SMALL, fill=False, edgecolor="black", linewidth=1.5))
        axes[0].set_title(f"{label}: {LARGE} px", fontsize=10)
        axes[1].imshow(large[y : y + SMALL, x : x + SMALL])
        axes[1].set_title(f"{label}: {SMALL} px of it", fontsize=10)
        for axis in axes:
            axis.set_axis_off()
    figure.savefig(path, dpi=100)


def _auc(chart: Axes, rows: list[dict[str, Any]]) -> None:
    sizes = sorted({row["tile_px"] for row in rows})
    means = [statistics.mean(row["slide_auc"] for row in rows if row["tile_px"] == size) for size in sizes]
    chart.plot(sizes, means, color="#6a3d9a", linewidth=2)
    chart.scatter([row["tile_px"] for row in rows], [row["slide_auc"] for row in rows], color="#6a3d9a", alpha=0.6)
    chart.axhline(0.5, color="grey", linestyle=":", linewidth=1)
    chart.set_xscale("log", base=2)
    chart.set_xticks(sizes, [str(size) for size in sizes])
    chart.set_ylim(0.2, 1.03)
    chart.set_xlabel("tile, px at 0.5 um/px")
    chart.set_ylabel("AUC of held-out slides (points: seeds)")
    chart.set_title("Same slides, same steps: only the tile grows", fontsize=11)
    chart.spines[["top", "right"]].set_visible(False)


def _first_of_each_class(slides: Path) -> list[tuple[str, Path]]:
    found: dict[str, Path] = {}
    with (slides / "labels.csv").open() as lines:
        for row in csv.DictReader(lines):
            found.setdefault(row["label"], slides / f"{row['slide']}.tif")
    return sorted(found.items())


def _tiles(path: Path) -> tuple[Pixels, int, int]:
    """The middle of a slide, and the corner of a small tile in it that holds some gland."""
    with open_slide(path) as slide:
        x, y = ((n - LARGE) // 2 for n in (slide.levels[0].width, slide.levels[0].height))
        large = slide.read(Region(x, y, LARGE, LARGE, slide.mpp))
    dark = large[..., 0] < 150
    corners = [(x, y) for x in range(640, 1408, 64) for y in range(640, 1408, 64)]
    best = max(corners, key=lambda corner: np.count_nonzero(dark[corner[1] :, corner[0] :][:SMALL, :SMALL]))
    return large, *best
