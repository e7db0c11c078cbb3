"""Is the planner right? Step time and bytes of each rank that it predicts, and what it chooses, beside measurements.

Takes nothing; gives ``bench-data/plan_accuracy.json``, problem by problem as they come, and the tables of the README.
Wants an otherwise idle machine. Exit code 0 when everything asked was reached.

    python -m benchmarks.plan_accuracy.run [--only PROBLEM ...] [--steps N] [--tables] [--write] [--quick]
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.machine import measured_on
from benchmarks.plan_accuracy.predict import predicted
from benchmarks.plan_accuracy.problems import PROBLEMS, QUICK, TEAMS, Problem
from benchmarks.plan_accuracy.tables import Outcome, choices_table, errors_table, missed
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, parser_of, publish, results
from parallel.plan.plan import PlanRow

MEASURE = "benchmarks.plan_accuracy.measure:measure"


def compared(problem: Problem, steps: int) -> dict[str, Any]:
    """Predictions and measurements of ``problem``, as JSON can hold them.

    The machine is calibrated just before: on one that is shared, its speed of an hour ago is another.
    """
    with tempfile.TemporaryDirectory() as cache:
        os.environ["XDG_CACHE_HOME"] = cache
        rows, choice = predicted(problem)
    asked = [*rows, *([choice] if choice is not None and not _among(choice, rows) else [])]
    ranks = run_on_ranks(
        problem.ranks,
        MEASURE,
        {
            "problem": problem.name,
            "steps": steps,
            "rows": [row.to_json() for row in asked],
        },
    )
    return {
        "chosen": _name(choice, rows) if choice else None,
        "entries": [
            {
                "name": _name(row, rows),
                "listed": row in rows,
                "predicted_s": row.step_s,
                "predicted_bytes": list(row.peak_bytes),
                **_measured([told[number] for told in ranks]),
            }
            for number, row in enumerate(asked)
        ],
    }


def _among(choice: PlanRow, rows: Sequence[PlanRow]) -> bool:
    """It is measured anyway: the same way to train, cut at the same places."""
    return any(row.strategy == choice.strategy for row in rows)


def _name(row: PlanRow, rows: Sequence[PlanRow]) -> str:
    """The candidate; the planner's own may be one of the problem's, cut elsewhere to fit the memory."""
    same = any(str(row.strategy) == str(other.strategy) for other in rows)
    return f"{row.strategy}" + ", other cuts" * (same and not _among(row, rows))


def _measured(told: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One candidate, from what every rank told of it. A step lasts until its last rank is done."""
    of_steps = zip(*(rank["times"] for rank in told), strict=True)
    return {
        "steps_s": [max(end for _, end in step) - min(begin for begin, _ in step) for step in of_steps],
        "growth_bytes": [rank["growth_bytes"] for rank in told],
        "in_use_bytes": [rank["in_use_bytes"] for rank in told],
        "kept_bytes": [rank["kept_bytes"] for rank in told],
    }


def report(found: dict[str, Any]) -> str:
    """The tables of the README."""
    outcomes = _outcomes(found)
    return results(
        "python -m benchmarks.plan_accuracy.run --write",
        "Choices:",
        choices_table(outcomes),
        "Predictions:",
        errors_table(outcomes),
    )


def _outcomes(found: dict[str, Any]) -> list[Outcome]:
    """In the order of the problems."""
    names = [problem.name for problem in (*PROBLEMS, *TEAMS, QUICK)]
    return [Outcome.from_json(name, found[name]) for name in sorted(found, key=names.index)]


def main() -> None:
    parser = parser_of(__doc__)
    problems = (*PROBLEMS, *TEAMS)
    names = [problem.name for problem in problems]
    parser.add_argument("--only", nargs="+", default=names, choices=names, metavar="PROBLEM", help=", ".join(names))
    parser.add_argument("--steps", type=int, default=3, help="timed steps of each candidate")
    parser.add_argument("--tables", action="store_true", help="measure nothing, make the tables of what is there")
    parser.add_argument("--quick", action="store_true", help="one tiny problem, times by a data sheet: does it run?")
    arguments = parser.parse_args()
    OUT.mkdir(exist_ok=True)
    path = OUT / ("plan_accuracy_quick.json" if arguments.quick else "plan_accuracy.json")
    found: dict[str, Any] = {} if arguments.quick or not path.exists() else json.loads(path.read_text())
    asked = [QUICK] if arguments.quick else [problem for problem in problems if problem.name in arguments.only]
    for problem in [] if arguments.tables else asked:
        begun = time.perf_counter()
        found[problem.name] = compared(problem, arguments.steps) | {"environment": measured_on()}
        path.write_text(json.dumps(found, indent=2) + "\n")
        print(f"{problem.name}: {time.perf_counter() - begun:.0f} s", flush=True)
        print(errors_table(_outcomes({problem.name: found[problem.name]})), flush=True)
    text = report(found)
    publish(__file__, text, arguments.write)
    faults = missed(_outcomes(found))
    print("\n".join(["missed:", *faults] if faults else ["everything asked was reached"]))
    sys.exit(bool(faults))


if __name__ == "__main__":
    main()
