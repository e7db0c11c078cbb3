"""Draw the picture of the README: how much of a slide tiles of some sizes see, and which sizes fit a device.

    PYTHONPATH=. python docs/picture.py

The bars are measured rows of benchmarks/out_of_core and benchmarks/streaming.
"""

from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from pipelines.backends.registry import open_slide
from pipelines.slides.geometry import Region

ROOT = Path(__file__).parents[1]
FILE = Path(__file__).with_suffix(".png")
SIDES = (256, 512, 1024, 2048)
BARS = (
    ("plain training, or ddp", 960),
    ("1 rank: --recompute block", 1856),
    ("2 ranks: --parallel master\n--recompute block --offload overlap", 2752),
    ("4 ranks: --parallel spatial\n--recompute block", 3584),
    ("1 rank: --stream 512 --norm frozen\n(in 0.8 GiB; no limit was met)", 8192),
)
"""What is typed, and the largest side of a tile that was trained, px."""
INK, PALE, ACCENT, BLUE = "#1f2733", "#8a94a3", "#c25a0a", "#1f66b1"


def draw(path: Path = FILE) -> None:
    """Write the picture to ``path``."""
    figure = Figure((11.5, 4.6), layout="constrained")
    tissue, bars = figure.subplots(1, 2, width_ratios=(1, 1.45))
    _draw_tissue(tissue)
    _draw_bars(bars)
    figure.savefig(path, dpi=100)


def _draw_tissue(axes: Axes) -> None:
    with open_slide(ROOT / "data" / "real" / "CMU-1-Small-Region.svs") as slide:
        level = slide.levels[0]
        pixels = slide.read(Region(0, 400, level.width, level.width, level.mpp))
        side_px = level.width
    axes.imshow(pixels, interpolation="antialiased")
    for side in SIDES:
        left, top = (side_px - side) / 2, (side_px - side) / 2 + 60
        axes.add_patch(Rectangle((left, top), side, side, fill=False, edgecolor=ACCENT, linewidth=2.2))
        label = {"boxstyle": "square,pad=0.15", "facecolor": "white", "edgecolor": "none"}
        axes.text(left + 14, top + 14, f"{side}", color=ACCENT, va="top", weight="bold", size=9, bbox=label)
    axes.set_title("What a tile of so many px sees at 0.5 um/px", color=INK, size=12)
    axes.set_xlim(0, side_px)
    axes.set_axis_off()


def _draw_bars(axes: Axes) -> None:
    names, sides = zip(*BARS, strict=True)
    places = range(len(BARS))[::-1]
    axes.barh(places, sides, color=[PALE, BLUE, BLUE, BLUE, BLUE], height=0.62)
    for place, side in zip(places, sides, strict=True):
        axes.text(side + 90, place, f"{side:,} px", va="center", color=INK, size=10)
    axes.set_yticks(places, names, size=9.5)
    axes.set_title("Largest tile for ResNet-50 with 2 GiB of memory a rank", color=INK, size=12)
    axes.set_xlim(0, 9600)
    axes.set_xticks([])
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.tick_params(length=0)


if __name__ == "__main__":
    draw()
