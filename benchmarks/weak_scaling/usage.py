"""Computation and memory of each rank over one step of MP-Basic, MAST and MASTER, simulated for four V100.

Takes nothing; draws ``usage.svg`` and prints how much of the step each schedule computes, and the bytes of its fullest
rank. ResNet-110-v2 on tiles of 1,024 px, as GEMS trains it (Jain et al., SC 2020, section 6).

    python -m benchmarks.weak_scaling.usage [--write]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from app.planning.machine import named_machine
from app.planning.workload import Workload
from benchmarks.results import OUT, markdown_table, parser_of, publish, results
from benchmarks.weak_scaling.simulation import DEVICE, LINK, NETWORK, PER_NODE
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.schedule.action import Held, held
from parallel.schedule.timeline import Timeline
from parallel.strategy import Strategy
from parallel.units import bytes_text

MODEL, TILE, RANKS = "resnet110_v2", 1024, 4
BATCHES = {"mp-basic": 4, "mast": 2, "master": 4}
"""Tiles of a step, each a microbatch. mast takes two by definition."""
PICTURE = "usage.svg"
COLORS = ("#1b6ca8", "#e07b39", "#3a9d5d", "#8a4fbf")
GIB = 1 << 30


def activation_bytes(timeline: Timeline, rank: int, sizes: Sequence[int]) -> tuple[list[float], list[float]]:
    """Return seconds and the bytes that ``rank`` holds for backward passes from each of these on.

    Args:
        sizes: of what a stage saves for one microbatch.
    """
    times, kept = [0.0], [0.0]
    spans = timeline.compute(rank)
    for span, (action, before, after) in zip(spans, held(span.action for span in spans), strict=True):
        change = sizes[action.stage] * ((after is Held.ACTIVATIONS) - (before is Held.ACTIVATIONS))
        times.append(span.start_s if change > 0 else span.end_s)
        kept.append(kept[-1] + change)
    return [*times, timeline.makespan_s], [*kept, kept[-1]]


def draw(planners: dict[str, tuple[Planner, PlanRow]], path: Path) -> None:
    """Write a column for each schedule: when its ranks compute, and what they hold for backward passes."""
    mpl.use("agg")
    mpl.rcParams["svg.hashsalt"] = "usage"  # the same picture is the same file
    figure = Figure(figsize=(12, 5.2), layout="constrained", facecolor="white")
    charts = figure.subplots(2, len(planners), sharex=True, sharey="row")
    for (name, (planner, row)), (computing, memory) in zip(planners.items(), charts.T, strict=True):
        timeline = planner.timeline(row)
        costs = planner.stages.stage_costs(row.strategy, planner.partition_of(row))
        computing.set_title(f"{name}, {BATCHES[name]} tiles: {1 - timeline.bubble:.0%} of the time computing")
        for rank in timeline.spans:
            _bars(computing, timeline, rank)
            times, kept = activation_bytes(timeline, rank, [cost.activation_bytes for cost in costs])
            gib = [each / GIB for each in kept]
            memory.step(times, gib, where="post", color=COLORS[rank], label=f"rank {rank}")
        memory.set_xlabel("seconds")
    charts[0, 0].set_yticks(range(RANKS), [f"rank {rank}" for rank in range(RANKS)])
    charts[0, 0].invert_yaxis()
    charts[1, 0].set_ylabel("saved for backward, GiB")
    charts[1, 0].legend(frameon=False, ncols=2)
    for chart in charts.flat:
        chart.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"Simulated: {MODEL}, {TILE} px, {RANKS} V100; dark: forward, light: backward, outlined: inverted replica",
        fontsize=12,
    )
    figure.savefig(path, metadata={"Date": None})


def _bars(chart: Axes, timeline: Timeline, rank: int) -> None:
    for span in timeline.compute(rank):
        forward = span.action.kind.value == "F"
        edge = "#222222" if span.action.replica else "white"
        chart.barh(
            rank, span.duration_s, left=span.start_s, color=COLORS[rank], alpha=1 if forward else 0.45, edgecolor=edge
        )


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    machine = named_machine(DEVICE, RANKS, per_node=PER_NODE, link=LINK, network=NETWORK)
    found, lines = {}, []
    for name, batch in BATCHES.items():
        task = Workload(MODEL, TILE, 2, optimizer="sgd").task(batch, machine.estimate)
        planner = Planner(task, machine.cluster)
        row = planner.evaluate(Strategy(name, RANKS, RANKS, batch))
        found[name] = planner, row
        step_s = row.step_s or 0.0
        computing = 1 - planner.timeline(row).bubble
        peak = bytes_text(max(row.peak_bytes))
        lines.append([name, str(batch), f"{batch / step_s:.2f}", f"{computing:.0%}", peak])
    OUT.mkdir(exist_ok=True)
    draw(found, (Path(__file__).parent if arguments.write else OUT) / PICTURE)
    header = ["schedule", "tiles a step", "images/s", "of the time computing", "fullest rank"]
    text = results(markdown_table(header, lines))
    publish(__file__, text, arguments.write, "usage")


if __name__ == "__main__":
    main()
