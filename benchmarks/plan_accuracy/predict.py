"""What the planner says of a problem: of each candidate that will be measured, and what it would choose itself.

Takes a problem; gives ``PlanRow``s. Candidates are forecast as they are, whatever they take; the search has the
problem's memory.
"""

from __future__ import annotations

import dataclasses

from app.planning.machine import Machine, named_machine, this_machine
from app.planning.workload import Workload
from benchmarks.plan_accuracy.problems import CLASSES, QUICK, Problem
from parallel.plan.plan import PlanRow, best_of
from parallel.plan.search import Planner
from parallel.schedule.registry import SCHEDULES, SPATIAL
from parallel.strategy import WHOLE

NAMES = (*WHOLE, SPATIAL.name, *SCHEDULES)


def predicted(problem: Problem) -> tuple[list[PlanRow], PlanRow | None]:
    """Rows of the problem's candidates, in order; and the best of all that the planner knows, within the memory."""
    machine = _machine(problem)
    work = Workload(problem.model, problem.tile, CLASSES, segments=problem.segments, optimizer=problem.optimizer)
    task = work.task(problem.batch, machine.estimate)
    planner = Planner(task, dataclasses.replace(machine.cluster, memory_bytes=problem.memory_bytes))
    rows = [planner.forecast(candidate) for candidate in problem.candidates]
    return [row for row in rows if row is not None], best_of(planner.search(NAMES, ranks=problem.ranks))


def _machine(problem: Problem) -> Machine:
    if problem == QUICK:  # a calibration would take longer than all the rest
        return named_machine("v100-16gb", problem.ranks)
    return this_machine(problem.ranks)
