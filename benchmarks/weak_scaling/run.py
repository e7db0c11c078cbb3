"""Weak scaling of ResNet-1001-v2 to 1,024 V100, simulated: each group of ranks has the same number of tiles.

Takes nothing; gives ``bench-data/weak_scaling.json``, the tables of the README, and with ``--write`` its picture too.
``benchmarks.plan_accuracy.run --only 'scaling-*'`` compares the same forecast with 1, 2 and 4 real ranks.

    python -m benchmarks.weak_scaling.run [--group 8] [--write] [--quick]
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.results import OUT, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.weak_scaling.simulation import CHANGES, DEPTHS, Curve, simulated
from parallel.units import bytes_text

PUBLISHED = (1024, 0.9732)
"""Ranks and efficiency: Jain et al., GEMS, SC 2020, abstract; ResNet-1k on Volta V100."""
ASSUMED = CHANGES[0].name


def simulation_table(curves: Sequence[Curve]) -> str:
    """Return a row for each curve: efficiency at some numbers of ranks, the rest at the most of them."""
    shown = [n for n in (64, 256, 1024) if n <= curves[0].ranks[-1]]
    header = ["strategy", "tiles of a group", "ranks of a group", "fullest rank"]
    header += [*(f"{n} ranks" for n in shown), "images/s", "step, s", "of it for gradients, s"]
    return markdown_table(
        header,
        (
            [
                curve.name,
                str(curve.tiles),
                str(curve.strategy.depth),
                bytes_text(curve.peak_bytes),
                *(_percent(curve.efficiency[ASSUMED][curve.ranks.index(n)]) for n in shown),
                f"{curve.images_per_s[-1]:.0f}",
                f"{curve.step_s[-1]:.3f}",
                f"{curve.exchange_s[-1]:.4f}",
            ]
            for curve in curves
        ),
    )


def what_if_table(curves: Sequence[Curve]) -> str:
    """Return the efficiency at the most ranks under each assumption."""
    names = [change.name for change in CHANGES]
    rows = ([c.name, str(c.tiles), *(_percent(c.efficiency[name][-1]) for name in names)] for c in curves)
    return markdown_table(["strategy", "tiles of a group", *names], rows)


def _percent(part: float) -> str:
    return f"{100 * part:.2f} %"


def draw(curves: Sequence[Curve], title: str, path: Path) -> None:
    """Write efficiency and images/s over ranks, a line for each curve, next to the published figure."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "weak scaling"  # the same picture is the same file
    figure = Figure(figsize=(12, 5.6), layout="constrained", facecolor="white")
    efficiency, speed = figure.subplots(1, 2)
    for curve in curves:
        label, style = f"{curve.name}, {curve.tiles} tiles", "--" if curve.tiles == curves[0].tiles else "-"
        percent = [100 * part for part in curve.efficiency[ASSUMED]]
        efficiency.plot(curve.ranks, percent, style, marker="o", markersize=4, label=label)
        speed.plot(curve.ranks, curve.images_per_s, style, marker="o", markersize=4)
    if curves[0].ranks[-1] >= PUBLISHED[0]:
        at = PUBLISHED[0], 100 * PUBLISHED[1]
        efficiency.plot(*at, "*", color="#b8005c", markersize=15, label="measured: GEMS, SC'20")
        efficiency.annotate(f"published {at[1]:.2f} %", at, (-12, 10), textcoords="offset points", ha="right")
    efficiency.set_ylabel("efficiency: images/s over\nthose of one group times groups, %")
    speed.set_ylabel("images/s, log scale")
    speed.set_yscale("log")
    for chart in (efficiency, speed):
        chart.set_xscale("log", base=2)
        chart.set_xlabel("ranks (V100), log scale")
        chart.grid(axis="y", color="#dddddd", linewidth=0.8)
        chart.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=13, fontweight="bold")
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="a small model to 64 ranks: does it run?")
    parser.add_argument("--group", type=int, help="ranks of a group; default: the fewest that fit")
    arguments = parser.parse_args()
    model, tile, most = ("resnet110_v2", 128, 64) if arguments.quick else ("resnet1001_v2", 512, PUBLISHED[0])
    curves = simulated(model, tile, most, [arguments.group] if arguments.group else DEPTHS)
    name = f"weak_scaling_of_{arguments.group}" if arguments.group else "weak_scaling"
    write_json(name, {"curves": [dataclasses.asdict(c) for c in curves], "environment": measured_on()})
    title = f"Simulated weak scaling: {model}, {tile} px tiles, V100 (16 GB), NVLink, EDR InfiniBand"
    draw(curves, title, (Path(__file__).parent if arguments.write else OUT) / f"{name}.svg")
    part = f"groups of {arguments.group}" if arguments.group else ""
    parts = [
        f"Simulated, {model} on {tile} px: efficiency by number of ranks; images/s and seconds at {most} ranks.\n",
        simulation_table(curves),
        f"Simulated efficiency at {most} ranks, where another assumption holds.\n",
        what_if_table(curves),
    ]
    publish(__file__, results(*parts), arguments.write, part)


if __name__ == "__main__":
    main()
