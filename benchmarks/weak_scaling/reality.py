"""The simulator beside real runs: step times of hybrids and of teams, predicted and measured on this machine.

Takes lists of problems; gives ``Compared`` for 1, 2 and 4 ranks. They are predicted by the same functions as the large
machine, from a calibration in place of a data sheet, and measured by processes that train as ``app.train`` does.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from app.launch.host import usable_cores
from app.planning.machine import this_machine
from app.planning.workload import Workload
from benchmarks.plan_accuracy.measure import WARM_UP, Contender, trim
from benchmarks.plan_accuracy.problems import CLASSES, Problem
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table
from parallel.comm.communicator import Communicator
from parallel.plan.plan import PlanRow
from parallel.plan.search import Planner
from parallel.profile.malloc import keep_freed_memory
from parallel.space.team import Grid
from parallel.strategy import Strategy

MODEL, TILE, TILES, DEPTH = "resnet110_v2", 128, 4, 2
"""Four tiles for each group of two ranks, in every step."""
TEAMS_MODEL, TEAMS_TILE = "resnet50", 512
"""As many tiles for each group of teams, each a microbatch."""


@dataclass(frozen=True)
class Compared:
    """Seconds of one step of ``strategy``."""

    strategy: Strategy
    predicted_s: float
    measured_s: float

    @property
    def ratio(self) -> float:
        return self.predicted_s / self.measured_s

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)


def hybrids() -> list[Problem]:
    """On 1 rank without a split, on 2 as one group, on 4 as two."""
    found = [Problem("1", MODEL, TILE, 1, TILES, "sgd", (Strategy("single", 1, 1, TILES),))]
    for groups in (1, 2):
        candidates = tuple(
            Strategy(name, groups * DEPTH, DEPTH, groups * microbatches)
            for name, microbatches in (("mp-basic", TILES), ("mast", 2), ("master", TILES))
        )
        found.append(Problem(f"{groups} x {DEPTH}", MODEL, TILE, groups * DEPTH, groups * TILES, "sgd", candidates))
    return found


def teams() -> list[Problem]:
    """A team on 2 ranks; on 4 two of them as groups, as stages and as inverted replicas. A group has as many tiles
    whatever its ranks, so that two problems are of 4 ranks."""
    two = Grid(2, 1)
    seats = tuple(Strategy(name, 4, 2, TILES, grid=two) for name in ("master", "1f1b"))
    return [
        _of_teams("a team", 2, TILES, (Strategy("spatial", 2, 1, TILES, grid=two),)),
        _of_teams("two groups", 4, 2 * TILES, (Strategy("spatial", 4, 1, 2 * TILES, grid=two),)),
        _of_teams("teams on seats", 4, TILES, (Strategy("spatial", 4, 1, TILES, grid=Grid(4, 1)), *seats)),
    ]


def _of_teams(name: str, ranks: int, tiles: int, candidates: tuple[Strategy, ...]) -> Problem:
    return Problem(name, TEAMS_MODEL, TEAMS_TILE, ranks, tiles, "sgd", candidates)


def compared(problems: Sequence[Problem], steps: int) -> list[Compared]:
    """Of all problems; the median of ``steps`` steps, after those of a warm-up, counts as measured."""
    found = []
    for problem in problems:
        machine = this_machine(problem.ranks)
        task = Workload(problem.model, problem.tile, CLASSES, optimizer="sgd").task(problem.batch, machine.estimate)
        planner = Planner(task, machine.cluster)
        rows = [row for candidate in problem.candidates if (row := planner.forecast(candidate)) is not None]
        told = run_on_ranks(
            problem.ranks,
            "benchmarks.weak_scaling.reality:measure",
            {"problem": problem.name, "steps": steps, "rows": [row.to_json() for row in rows]},
        )
        for row, *ranks in zip(rows, *told, strict=True):
            spans = [[rank[step] for rank in ranks] for step in range(steps)]
            seconds = [max(end for _, end in step) - min(begin for begin, _ in step) for step in spans]
            found.append(Compared(row.strategy, row.step_s or 0.0, statistics.median(seconds)))
    return found


def measure(communicator: Communicator, argument: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """When the steps of each candidate began and ended on this rank; candidates take turns."""
    problem = next(each for each in (*hybrids(), *teams()) if each.name == argument["problem"])
    torch.set_num_threads(max(1, usable_cores() // communicator.world))  # as app.train starts its ranks
    keep_freed_memory()
    contenders = []
    for row in argument["rows"]:
        trim()
        contenders.append(Contender(problem, PlanRow.from_json(row).strategy, communicator))
        contenders[-1].grow(WARM_UP)
    for _ in range(argument["steps"]):
        for contender in contenders:
            contender.timed(counts=True)
    told = [contender.times() for contender in contenders]
    for contender in contenders:
        contender.close()
    return told


def reality_table(found: Sequence[Compared]) -> str:
    """Return a row for each strategy: predicted beside measured."""
    return markdown_table(
        ["ranks", "strategy", "predicted, s", "measured, s", "predicted / measured"],
        (
            [
                str(one.strategy.ranks),
                str(one.strategy),
                f"{one.predicted_s:.3f}",
                f"{one.measured_s:.3f}",
                f"{one.ratio:.3f}",
            ]
            for one in found
        ),
    )
