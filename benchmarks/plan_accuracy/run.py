"""Compare a plan with measurements: step time and bytes of each rank, and the planner's choice.

Takes nothing; gives ``bench-data/plan_accuracy.json``, problem by problem as they come, and the tables of the README.
The machine is calibrated before each problem, as a shared one has another speed each hour. Wants an otherwise idle
machine. Exit code 1 if a target was missed.

    python -m benchmarks.plan_accuracy.run [--steps N] [--tables] [--write | --only PROBLEM ... | --quick]
"""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from app.planning.machine import named_machine, this_machine
from app.planning.workload import Workload
from benchmarks.plan_accuracy.problems import ALL, CLASSES, PROBLEMS, QUICK, Problem
from benchmarks.plan_accuracy.tables import Row, choices_table, errors_table, missed
from benchmarks.ranks import run_on_ranks
from benchmarks.results import finish, measured_on, parser_of, publish, read_json, results, write_json
from parallel.plan.plan import PlanRow, best_of
from parallel.plan.search import Planner
from parallel.schedule.registry import SCHEDULES, SPATIAL
from parallel.strategy import WHOLE

NAMES = (*WHOLE, SPATIAL.name, *SCHEDULES)
"""Strategies that the planner chooses from."""
FIXED = ("boxes-", "scaling-")
"""Problems in which the planner chooses nothing."""


def predicted(problem: Problem) -> tuple[list[PlanRow], PlanRow | None]:
    """Return a plan's row for each strategy of the problem, whatever it takes, and the planner's choice of all that it
    knows, within the memory."""
    # A calibration would take longer than all the rest of the quick problem.
    machine = named_machine("v100-16gb", problem.ranks) if problem is QUICK else this_machine(problem.ranks)
    work = Workload(problem.model, problem.tile, CLASSES, problem.norm, problem.segments, problem.optimizer)
    task = work.task(problem.batch, machine.estimate)
    planner = Planner(task, dataclasses.replace(machine.cluster, memory_bytes=problem.memory_bytes))
    rows = [planner.forecast(candidate) for candidate in problem.candidates]
    choice = None if problem.name.startswith(FIXED) else best_of(planner.search(NAMES, ranks=problem.ranks))
    return [row for row in rows if row is not None], choice


def compared(problem: Problem, steps: int) -> list[Row]:
    """Return a row for each strategy of ``problem`` and for the planner's choice: predicted and measured."""
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        plans, choice = predicted(problem)
    new = choice is not None and all(row.strategy != choice.strategy for row in plans)
    every = [*plans, *([choice] if choice is not None and new else [])]
    argument = {"problem": problem.name, "steps": steps, "rows": [row.to_json() for row in every]}
    ranks = run_on_ranks(problem.ranks, "benchmarks.plan_accuracy.measure:measure", argument)
    return [
        {
            "problem": problem.name,
            "name": _name(row, plans),
            "listed": row in plans,
            "chosen": choice is not None and row.strategy == choice.strategy,
            "predicted_s": row.step_s,
            "predicted_bytes": list(row.peak_bytes),
            **_measured([rank[number] for rank in ranks]),
        }
        for number, row in enumerate(every)
    ]


def _name(row: PlanRow, plans: Sequence[PlanRow]) -> str:
    """Return the strategy; the planner's may be one of the problem's, cut elsewhere to fit the memory."""
    same = any(str(row.strategy) == str(other.strategy) for other in plans)
    return f"{row.strategy}" + ", other cuts" * (same and row not in plans)


def _measured(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return one strategy's figures from those of every rank. A step lasts until its last rank is done."""
    of_steps = zip(*(rank["times"] for rank in ranks), strict=True)
    steps_s = [max(end for _, end in step) - min(begin for begin, _ in step) for step in of_steps]
    keys = ("growth_bytes", "in_use_bytes", "kept_bytes")
    return {"steps_s": steps_s, **{key: [rank[key] for rank in ranks] for key in keys}}


def main() -> None:
    parser = parser_of(__doc__)
    usual = [problem.name for problem in PROBLEMS]
    parser.add_argument(
        "--only", nargs="+", default=usual, metavar="PROBLEM", help=f"patterns such as 'teams-*', of {', '.join(ALL)}"
    )
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each strategy")
    parser.add_argument("--tables", action="store_true", help="measure nothing, make the tables of what is there")
    parser.add_argument("--quick", action="store_true", help="one tiny problem, times by a data sheet: does it run?")
    arguments = parser.parse_args()
    only = [QUICK.name] if arguments.quick else arguments.only
    if arguments.write and only is not usual:
        parser.error("--write replaces the whole table: leave out --only and --quick")
    asked = [name for name in ALL if any(fnmatch.fnmatchcase(name, pattern) for pattern in only)]
    if not asked:
        parser.error(f"--only names no problem; got {' '.join(only)}, and there are {', '.join(ALL)}")
    found = {} if arguments.quick else read_json("plan_accuracy")
    for name in () if arguments.tables else asked:
        begun = time.perf_counter()
        found[name] = {"rows": compared(ALL[name], arguments.steps), "environment": measured_on()}
        if not arguments.quick:
            write_json("plan_accuracy", found)
        print(f"{name}: {time.perf_counter() - begun:.0f} s\n{errors_table(found[name]['rows'])}", flush=True)
    rows = [row for name in asked if name in found for row in found[name]["rows"]]
    choices = [row for row in rows if not row["problem"].startswith(FIXED)]
    tables = [*(["Choices:", choices_table(choices)] if choices else []), "Predictions:", errors_table(rows)]
    text = results(*tables)
    publish(__file__, text, arguments.write)
    finish(missed(rows))


if __name__ == "__main__":
    main()
