"""Schedules on stages that sleep: the step of the real engine against the papers' formulas and against `simulate`.

Takes nothing; gives step times in units of the forward pass of a stage, for F = 1 and B = 2 on four ranks, a picture
of three schedules simulated next to measured, and a trace of all of them for ui.perfetto.dev.

    python -m benchmarks.schedules.sleeping [--steps 5] [--unit 0.05] [--write]
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, ROOT, finish, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.schedules.sleeping_model import SHAPE, SleepingModel, mean
from benchmarks.whole_engine import cpu_engine
from parallel.comm.communicator import Communicator
from parallel.draw.schedule_svg import schedule_svg
from parallel.engine.recorded import gather_timeline
from parallel.engine.step import Microbatch
from parallel.schedule.action import Action
from parallel.schedule.mesh import Mesh
from parallel.schedule.registry import build_schedule
from parallel.schedule.simulate import simulate
from parallel.schedule.timeline import Span, StageCost, Timeline, chrome_trace
from parallel.strategy import Strategy

PICTURES = ROOT / "docs" / "pictures"
DEPTH, FORWARD, BACKWARD = 4, 1, 2
WARM_UP = 1
DEVIATION = 0.02
PICTURED = ("1f1b", "master", "bidirectional", "pipedream")

Spans = Mapping[str, list[tuple[str, float, float]]]
"""Rank -> action, start and end of each span, as JSON holds it."""


@dataclass(frozen=True)
class Case:
    """A schedule with m microbatches.

    Attributes:
        formula: of the step time, as text.
        units: what it gives; None where there is only the simulation.
    """

    schedule: str
    m: int
    formula: str
    units: float | None

    @property
    def chunks(self) -> int:
        return 2 if self.schedule == "interleaved" else 1

    def strategy(self, cuts: tuple[str, ...]) -> Strategy:
        return Strategy(self.schedule, DEPTH, DEPTH, self.m, chunks=self.chunks, cuts=cuts)

    def simulated(self, unit_s: float) -> Timeline:
        """The step on paper, messages and everything but sleep left out."""
        mesh: Mesh = self.strategy(()).mesh
        cost = StageCost(FORWARD * unit_s / self.chunks, BACKWARD * unit_s / self.chunks, 0, 0, 0)
        return simulate(build_schedule(self.schedule, mesh, self.m), mesh, [cost] * mesh.stages)


CASES = (
    Case("mp-basic", 2, "m D (F + B)", 24),
    Case("mast", 2, "D (F + 2B) + F", 21),
    Case("master", 4, "m (D B + F) + (D - 1) F", 39),
    Case("gpipe", 8, "(m + D - 1)(F + B)", 33),
    Case("1f1b", 8, "(m + D - 1)(F + B)", 33),
    Case("interleaved", 8, "m (F + B) + (D - 1)(F + B) / 2", 28.5),
    Case("bidirectional", 8, "simulated only", None),
    Case("pipedream", 16, "m (F + B) + (D - 1)(F + B)", 57),
)


def measure(communicator: Communicator, argument: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the makespans of every case's steps, and the spans of the median one; on rank 0 alone."""
    measured = []
    for case in CASES:
        unit_s = argument["unit_s"] / case.chunks
        model = SleepingModel(DEPTH * case.chunks, FORWARD * unit_s, BACKWARD * unit_s)
        rule = partial(torch.optim.SGD, lr=0.0)
        engine = cpu_engine(model, mean, rule, communicator, case.strategy(model.cuts), SHAPE, case.m)
        timelines = []
        for step in range(WARM_UP + argument["steps"]):
            engine.step([Microbatch(torch.ones(SHAPE), torch.zeros(1), SHAPE) for _ in engine.share], step, 0.0)
            timeline = gather_timeline(communicator, engine.spans())
            if timeline and step >= WARM_UP:
                timelines.append(timeline)
        timelines.sort(key=lambda timeline: timeline.makespan_s)
        if timelines:
            measured.append(
                {
                    "makespans_s": [timeline.makespan_s for timeline in timelines],
                    "spans": _spans(timelines[len(timelines) // 2]),
                }
            )
    return measured


def _spans(timeline: Timeline) -> Spans:
    return {str(rank): [(str(s.action), s.start_s, s.end_s) for s in spans] for rank, spans in timeline.spans.items()}


def _timeline(spans: Spans) -> Timeline:
    return Timeline({int(r): tuple(Span(Action.parse(text), a, b) for text, a, b in own) for r, own in spans.items()})


def rows(unit_s: float, measured: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each case, times in units."""
    found = []
    for case, of_case in zip(CASES, measured, strict=True):
        simulated = case.simulated(unit_s).makespan_s / unit_s
        units = statistics.median(of_case["makespans_s"]) / unit_s
        found.append(
            {
                "schedule": case.schedule,
                "m": case.m,
                "formula": case.formula,
                "formula_units": case.units,
                "simulated_units": simulated,
                "measured_units": units,
                "deviation": units / (simulated if case.units is None else case.units) - 1,
            }
        )
    return found


def report(unit_s: float, steps: int, table: list[dict[str, Any]]) -> str:
    """The table of the README."""
    text = markdown_table(
        ("schedule", "m", "formula", "gives", "simulated", "measured", "deviation"),
        [
            (
                row["schedule"],
                str(row["m"]),
                row["formula"],
                "" if row["formula_units"] is None else f"{row['formula_units']:g}",
                f"{row['simulated_units']:.4g}",
                f"{row['measured_units']:.2f}",
                f"{row['deviation']:+.1%}",
            )
            for row in table
        ],
    )
    about = (
        f"D = {DEPTH} ranks, F = {FORWARD}, B = {BACKWARD} units of {unit_s * 1000:g} ms, medians of {steps} steps.\n"
    )
    return results(about, text)


def draw(case: Case, unit_s: float, measured: Timeline) -> str:
    """The picture of a case, simulated next to measured."""
    title = f"{case.schedule}, {DEPTH} ranks, {case.m} microbatches, stages that sleep"
    return schedule_svg(case.simulated(unit_s), title=title, compare=measured)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--unit", type=float, default=0.05, help="seconds of a forward pass")
    parser.add_argument("--steps", type=int, default=5, help="after one that is dropped")
    parser.add_argument("--write", action="store_true", help="put the table into README.md and pictures into docs/")
    arguments = parser.parse_args()
    unit_s, steps = arguments.unit, arguments.steps
    argument = {"unit_s": unit_s, "steps": steps}
    measured = run_on_ranks(DEPTH, "benchmarks.schedules.sleeping:measure", argument)[0]
    table = rows(unit_s, measured)
    timelines = {case: _timeline(of_case["spans"]) for case, of_case in zip(CASES, measured, strict=True)}
    trace = chrome_trace(
        {
            f"{case.schedule} m={case.m} {kind}": timeline
            for case, timeline in timelines.items()
            for kind, timeline in (("simulated", case.simulated(unit_s)), ("measured", timeline))
        }
    )
    result = {"unit_s": unit_s, "steps": steps, "rows": table, "environment": measured_on()}
    write_json("sleeping_stages", result)
    (OUT / "sleeping_stages.trace.json").write_text(json.dumps(trace))
    text = report(unit_s, steps, table)
    publish(__file__, text, arguments.write, "sleeping")
    if arguments.write:
        PICTURES.mkdir(exist_ok=True)
        for case, timeline in timelines.items():
            if case.schedule in PICTURED:
                (PICTURES / f"{case.schedule}.svg").write_text(draw(case, unit_s, timeline))
    far = [row for row in table if abs(row["deviation"]) > DEVIATION]
    finish(f"{row['schedule']} m={row['m']} deviates by {row['deviation']:+.1%}" for row in far)


if __name__ == "__main__":
    main()
