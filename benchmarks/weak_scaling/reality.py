"""The simulator beside real runs: step times of hybrids of a smaller ResNet, predicted and measured on this machine.

Takes nothing; gives ``Compared`` for 1, 2 and 4 ranks. They are predicted by the same functions as the large machine,
from a calibration in place of a data sheet, and measured by processes that train as ``app.train`` does.
"""

from __future__ import annotations

import dataclasses
import statistics
from dataclasses import dataclass
from typing import Any

import torch

from app.launch.machine import usable_cores
from app.planning.machine import this_machine
from app.planning.workload import Workload
from benchmarks.plan_accuracy.measure import Contender, trim
from benchmarks.plan_accuracy.problems import CLASSES, Problem
from benchmarks.ranks import run_on_ranks
from parallel.comm.communicator import Communicator
from parallel.plan.search import Planner
from parallel.strategy import Strategy

MODEL, TILE, TILES, DEPTH = "resnet110_v2", 128, 4, 2
"""Four tiles for each group of two ranks, in every step."""


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


def problems() -> list[Problem]:
    """On 1 rank without a split, on 2 as one group, on 4 as two."""
    found = [Problem("1", MODEL, TILE, 1, TILES, "sgd", (Strategy("single", 1, 1, TILES),))]
    for groups in (1, 2):
        candidates = tuple(
            Strategy(name, groups * DEPTH, DEPTH, groups * microbatches)
            for name, microbatches in (("mp-basic", TILES), ("mast", 2), ("master", TILES))
        )
        found.append(Problem(f"{groups} x {DEPTH}", MODEL, TILE, groups * DEPTH, groups * TILES, "sgd", candidates))
    return found


def compared(steps: int) -> list[Compared]:
    """Of all problems; the median of ``steps`` steps, after one that is dropped, counts as measured."""
    found = []
    for problem in problems():
        machine = this_machine(problem.ranks)
        task = Workload(problem.model, problem.tile, CLASSES, optimizer="sgd").task(problem.batch, machine.estimate)
        planner = Planner(task, machine.cluster)
        rows = [row for candidate in problem.candidates if (row := planner.forecast(candidate)) is not None]
        told = run_on_ranks(
            problem.ranks,
            "benchmarks.weak_scaling.reality:measure",
            {"problem": problem.name, "steps": steps, "cuts": [row.strategy.cuts for row in rows]},
        )
        for row, *ranks in zip(rows, *told, strict=True):
            spans = [[rank[step] for rank in ranks] for step in range(steps)]
            seconds = [max(end for _, end in step) - min(begin for begin, _ in step) for step in spans]
            found.append(Compared(row.strategy, row.step_s or 0.0, statistics.median(seconds)))
    return found


def measure(communicator: Communicator, argument: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """When the steps of each candidate began and ended on this rank; candidates take turns."""
    problem = next(one for one in problems() if one.name == argument["problem"])
    torch.set_num_threads(max(1, usable_cores() // communicator.world))  # as app.train starts its ranks
    contenders = []
    for candidate, cuts in zip(problem.candidates, argument["cuts"], strict=True):
        trim()
        contenders.append(Contender(problem, dataclasses.replace(candidate, cuts=tuple(cuts)), communicator))
        contenders[-1].grow()
    for _ in range(argument["steps"]):
        for contender in contenders:
            contender.timed()
    told = [contender.told()["times"] for contender in contenders]
    for contender in contenders:
        contender.close()
    return told
