"""Weak scaling of teams x MASTER x data parallelism, simulated: tiles that no single device could compute.

Takes nothing; prints the smallest groups that fit and their efficiency up to 1,024 ranks, how much
faster they are than layers and pipelines on as many ranks, and steps of teams on 2 and 4 real ranks of this machine
beside their forecast, which want it idle; with ``--write`` puts the tables into README.md and the picture, which names
the error of the forecast, beside it. What the simulation leaves out stands there. Exit code 0.

    python -m benchmarks.weak_scaling.teams [--steps N] [--write] [--quick]
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from app.planning.machine import named_machine
from app.planning.workload import Workload
from benchmarks.results import markdown_table, parser_of, results, write_results
from benchmarks.weak_scaling.reality import TEAMS_MODEL, TEAMS_TILE, Compared, compared, reality_table, teams
from benchmarks.weak_scaling.simulation import DEVICE, LINK, NETWORK, PER_NODE
from parallel.plan.candidates import ON_DEVICE
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.plan.step_time import StepTime, links_between, step_time
from parallel.space.team import Grid
from parallel.strategy import Strategy
from parallel.units import bytes_text

MODEL, TILES = "resnet50", 8
"""Trained, and tiles of a group in each step, each a microbatch."""
SIDES, MOST = (8192, 16384), 1024
NAMES = (("spatial", 1), ("master", 2), ("1f1b", 2))
"""Strategy, and teams of a group."""
GRIDS = (Grid(2, 1), Grid(4, 1), Grid(4, 2), Grid(4, 4), Grid(8, 4))
"""Of a team, from the fewest ranks on."""
PUBLISHED = (2.67, 1.68)
"""Times the speed of layer and of pipeline parallelism, at most: Jain et al., Hy-Fi, ISC 2022, abstract."""
COMMAND = "python -m benchmarks.weak_scaling.teams --write"
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class TeamCurve:
    """One strategy at one size of tile.

    Attributes:
        row: of a single group, the smallest that fits.
        ranks: of the group, and that times 2, 4, ...
        steps: by number of ranks.
        layers_s, pipeline_s: a step of the same tiles on the ranks of a group with as many stages, one microbatch at a
            time and as gpipe, with as much recomputed, whatever memory that takes.
    """

    tile: int
    row: PlanRow
    ranks: tuple[int, ...]
    steps: tuple[StepTime, ...]
    layers_s: float
    pipeline_s: float

    @property
    def efficiency(self) -> list[float]:
        """By number of ranks, images/s over those of one group times the number of groups."""
        return [self.steps[0].step_s / step.step_s for step in self.steps]


def simulated(model: str, tile: int, most: int) -> list[TeamCurve]:
    """Curves up to ``most`` ranks; strategies that no grid makes fit are left out."""
    machine = named_machine(DEVICE, most, per_node=PER_NODE, link=LINK, network=NETWORK)
    planner = Planner(Workload(model, tile, 2, optimizer="sgd").task(TILES, machine.estimate), machine.cluster)
    curves = []
    for name, depth in NAMES:
        candidates = (Strategy(name, g.members * depth, depth, TILES, grid=g) for g in GRIDS)
        row = next((row for each in candidates if (row := planner.evaluate(each, ON_DEVICE)).fits), None)
        if row is not None:
            group = row.strategy.ranks
            ranks = tuple(group * 2**k for k in range(int(math.log2(most // group)) + 1))
            split = [_split_s(planner, row, name) for name in ("mp-basic", "gpipe")]
            curves.append(TeamCurve(tile, row, ranks, tuple(_step(planner, row, n) for n in ranks), *split))
    return curves


def _split_s(planner: Planner, row: PlanRow, name: str) -> float:
    """Seconds of a step of the schedule ``name`` on the ranks of a group, each with a stage of its own."""
    own = row.strategy
    other = planner.forecast(Strategy(name, own.ranks, own.ranks, own.m, policy=own.policy))
    assert other is not None
    assert other.step_s is not None
    return other.step_s


def _step(planner: Planner, row: PlanRow, ranks: int) -> StepTime:
    """The step of as many groups as ``ranks`` make."""
    own, groups, cluster = row.strategy, ranks // row.strategy.group_ranks, planner.cluster
    partition = planner.partition_of(row)
    candidate = dataclasses.replace(own, ranks=ranks, m=own.m * groups)
    return step_time(
        candidate,
        candidate.m,
        planner.stages.stage_costs(own, partition),
        links_between(candidate, partition, cluster),
        [sum(layer.param_bytes for layer in partition.layers_of(stage)) for stage in range(partition.depth)],
        planner.task.slots,
        cluster,
    )


def table(curves: Sequence[TeamCurve]) -> str:
    """A row for each curve."""
    most = curves[0].ranks[-1]
    header = ["tile px", "strategy", "a group", "fullest rank", f"efficiency at {most} ranks", "images/s", "step, s"]
    return markdown_table(
        [*header, "times layers' speed", "times gpipe's"],
        (
            [
                str(curve.tile),
                f"{curve.row.strategy.name} {curve.row.strategy.savings}".rstrip(),
                f"{curve.row.strategy.depth} of {curve.row.strategy.grid}",
                bytes_text(max(curve.row.peak_bytes)),
                f"{100 * curve.efficiency[-1]:.2f} %",
                f"{TILES * curve.ranks[-1] / curve.ranks[0] / curve.steps[-1].step_s:.1f}",
                f"{curve.steps[-1].step_s:.2f}",
                f"{curve.layers_s / curve.steps[0].step_s:.2f}",
                f"{curve.pipeline_s / curve.steps[0].step_s:.2f}",
            ]
            for curve in curves
        ),
    )


def draw(curves: Sequence[TeamCurve], real: Sequence[Compared], path: Path) -> None:
    """Write efficiency over ranks, a line for each curve, and how far forecasts were from ``real`` steps, to
    ``path``."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "weak scaling of teams"  # the same picture is the same file
    figure = Figure(figsize=(9, 5), layout="constrained", facecolor="white")
    chart = figure.subplots()
    for curve in curves:
        own = curve.row.strategy
        label = f"{curve.tile:,} px, {own.name}, {own.depth} of {own.grid}"
        chart.plot(curve.ranks, [100 * part for part in curve.efficiency], marker="o", markersize=4, label=label)
    chart.set_xscale("log", base=2)
    chart.set_xlabel("ranks (V100), log scale")
    chart.set_ylabel("efficiency: images/s over those of\none group times groups, %")
    chart.set_title("Simulated, nothing ran on a GPU: teams x data parallelism, ResNet-50")
    chart.legend(frameon=False)
    layers = [curve.layers_s / curve.steps[0].step_s for curve in curves]
    pipelines = [curve.pipeline_s / curve.steps[0].step_s for curve in curves]
    text = "Times the speed of layers, of gpipe on as many ranks:\n"
    text += f"here {min(layers):.1f} to {max(layers):.1f}, {min(pipelines):.1f} to {max(pipelines):.1f}\n"
    text += "Hy-Fi (ISC 2022, abstract), other models: up to {:.2f}, {:.2f}".format(*PUBLISHED)
    chart.text(0.28, 0.64, text, transform=chart.transAxes, fontsize=8, va="top")
    if real:
        lines = [f"{each.strategy.ranks} ranks, {each.strategy}: {100 * (each.ratio - 1):+.0f} %" for each in real]
        text = f"Forecast of a step, off from real ones\n({TEAMS_MODEL}, {TEAMS_TILE} px, CPU, Gloo):\n"
        chart.text(0.02, 0.03, text + "\n".join(lines), transform=chart.transAxes, fontsize=8, va="bottom")
    chart.grid(axis="y", color="#dddddd", linewidth=0.8)
    chart.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each real run")
    parser.add_argument("--write", action="store_true", help="put table and picture into this folder")
    parser.add_argument("--quick", action="store_true", help="tiles of 2048 px to 64 ranks, no real runs")
    arguments = parser.parse_args()
    sides, most = ((2048,), 64) if arguments.quick else (SIDES, MOST)
    curves = [curve for side in sides for curve in simulated(MODEL, side, most)]
    real = [] if arguments.quick else compared(teams(), arguments.steps)
    parts = [f"Simulated, {MODEL}, {TILES} tiles a step for each group, to {most} ranks.", table(curves)]
    if real:
        what = f"{TEAMS_MODEL}, {TEAMS_TILE} px; medians of {arguments.steps} steps."
        parts += [f"Predicted and measured on this machine, {what}", reality_table(real)]
    text = results(COMMAND, *parts)
    print(text)
    if arguments.write:
        write_results(FOLDER / "README.md", text, "teams")
        draw(curves, real, FOLDER / "teams.svg")


if __name__ == "__main__":
    main()
