"""Workers of unequal and drifting speed that sleep instead of computing: fixed and rebalanced shares.

Takes nothing; gives step times of real ranks over Gloo next to the formulas, the steps at which shares change, and what
a step takes over the ideal one, in which all workers would end at once.

    python -m benchmarks.workers.run [--unit 0.1] [--write]
"""

from __future__ import annotations

import functools
import itertools
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from app.training.resharing import Resharing
from app.training.run_folder import RunFolder
from benchmarks.ranks import run_on_ranks
from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.schedules.sleeping_model import SHAPE, SleepingModel, mean
from benchmarks.whole_engine import whole_engine
from parallel.comm.communicator import Communicator
from parallel.engine.step import Microbatch, StepResult
from parallel.schedule.shares import WINDOW, best_counts, consecutive, step_seconds
from parallel.strategy import Strategy

WORLD, M = 3, 24
FORMULA_UNITS, DRIFT_UNITS = (0.5, 1.0, 2.0), (1, 2)
"""Of ``--unit``: what the engine adds to a step does not grow with what a microbatch takes."""

SLOWER_AT = 50
NOISE = 0.2
ASKED = {"formula": 0.03, "optimum": 1.05, "changes": 1}


class Workers:
    """One rank of ``WORLD``, which sleeps ``seconds`` for a microbatch.

    Args:
        kind: equal or auto; or counts of microbatches.
    """

    def __init__(self, communicator: Communicator, kind: str | Sequence[int], folder: Path, m: int = M) -> None:
        self.model = SleepingModel(1, 0.0, 0.0)
        self.communicator = communicator
        shares = () if isinstance(kind, str) else consecutive(kind)
        self.strategy = Strategy("ddp", WORLD, 1, m, shares=shares, rebalanced=kind == "auto")
        rule = functools.partial(torch.optim.SGD, lr=0.0)
        self.engine = whole_engine(self.model, mean, rule, communicator, batch=m, m=m, shape=SHAPE, shares=shares)
        self.resharing = Resharing(self.strategy, communicator, RunFolder(folder), 0, None)
        self.changes: list[tuple[int, list[int]]] = []

    def step(self, number: int, seconds: float) -> float:
        """Seconds that the step took."""
        stage = self.model.stages[0]
        stage.forward_s, stage.backward_s = seconds / 3, seconds * 2 / 3  # type: ignore[assignment]
        self.communicator.barrier()
        begun_s = time.perf_counter()
        tiles = Microbatch(torch.ones(SHAPE), torch.zeros(1), SHAPE)
        result: StepResult = self.engine.step(itertools.repeat(tiles), number, 0.0)
        took_s = time.perf_counter() - begun_s
        if self.resharing.after(number + 1, result):
            self.changes.append((number + 1, list(map(len, self.resharing.shares))))
            self.engine.reshare(self.resharing.shares)
        return took_s


def measure(communicator: Communicator, argument: dict[str, Any]) -> dict[str, Any]:
    """All parts, on each rank; those of rank 0 are reported."""
    unit_s, rank = argument["unit_s"], communicator.rank
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        return {
            "formula": [row for part in FORMULA_UNITS for row in _formula(communicator, unit_s * part, folder)],
            "slower": _slower(communicator, unit_s, rank, folder),
            "noise": _noise(communicator, unit_s / 5, argument["steps"], folder),
            "drift": [
                _drift(communicator, unit_s * times, argument["steps"] // (4 * times), folder) for times in DRIFT_UNITS
            ],
        }


def _formula(communicator: Communicator, unit_s: float, folder: Path) -> list[dict[str, Any]]:
    """Workers of t = 1 : 2 : 3 under equal and under the best shares, of 11 and 24 microbatches."""
    seconds, found = [unit_s, 2 * unit_s, 3 * unit_s], []
    for m in (11, M):
        for kind in ("equal", best_counts(m, seconds)):
            workers = Workers(communicator, kind, folder, m)
            counts = [len(workers.strategy.share_of(group)) for group in range(WORLD)]
            took = [workers.step(number, seconds[communicator.rank]) for number in range(6)][1:]
            formula_s = step_seconds(counts, seconds)
            measured_s = statistics.median(took)
            found.append({"unit_s": unit_s, "m": m, "counts": counts, "formula_s": formula_s, "measured_s": measured_s})
    return found


def _slower(communicator: Communicator, unit_s: float, rank: int, folder: Path) -> dict[str, Any]:
    """Three equal workers, of which the last takes twice as long from step ``SLOWER_AT`` on."""
    workers = Workers(communicator, "auto", folder)
    after = [unit_s, unit_s, 2 * unit_s]
    best = best_counts(M, after)
    at_best = Workers(communicator, best, folder)
    settled = SLOWER_AT + 2 * WINDOW
    took: list[tuple[float, float]] = []
    for number in range(settled + 2 * WINDOW):
        own_s = unit_s * (1 + (rank == WORLD - 1 and number >= SLOWER_AT))
        of_step = workers.step(number, own_s)
        if number >= settled:  # in turns, so that both meet the same machine
            took.append((of_step, at_best.step(number, own_s)))
    return {
        "unit_s": unit_s,
        "changes": workers.changes,
        "over_optimum": statistics.median(own / best_s for own, best_s in took),
        "over_formula": statistics.median(own for own, _ in took) / step_seconds(best, after),
    }


def _speeds(steps: int, seed: int) -> list[list[float]]:
    """Factors of each step and worker, lognormal, of mean 1 and the coefficient of variation ``NOISE``."""
    sigma = np.sqrt(np.log(1 + NOISE**2))
    drawn: list[list[float]] = np.random.default_rng(seed).lognormal(-(sigma**2) / 2, sigma, (steps, WORLD)).tolist()
    return drawn


def _noise(communicator: Communicator, unit_s: float, steps: int, folder: Path) -> dict[str, Any]:
    """Three equal workers whose speeds vary from step to step, under shares that follow them."""
    workers = Workers(communicator, "auto", folder)
    for number, factors in enumerate(_speeds(steps, 1)):
        workers.step(number, unit_s * factors[communicator.rank])
    return {"steps": steps, "changes": workers.changes}


def _drift(communicator: Communicator, unit_s: float, steps: int, folder: Path) -> dict[str, Any]:
    """A CPU at 0.67 of the speed of two GPUs, all of them varying: seconds of all steps over those of ideal ones, in
    which the workers end at once; equal shares and the best shares of the mean speeds, in turns."""
    seconds = [1.5 * unit_s, unit_s, unit_s]
    kinds = {"equal": "equal", "best shares": best_counts(M, seconds)}
    workers = {name: Workers(communicator, kind, folder) for name, kind in kinds.items()}
    took: dict[str, float] = dict.fromkeys(kinds, 0.0)
    ideal_s = 0.0
    for number, factors in enumerate(_speeds(steps, 2)):
        own = [t * factor for t, factor in zip(seconds, factors, strict=True)]
        ideal_s += M / sum(1 / t for t in own)
        for name, each in workers.items():
            took[name] += each.step(number, own[communicator.rank])
    counts = {name: [len(each.strategy.share_of(g)) for g in range(WORLD)] for name, each in workers.items()}
    rows = [{"name": name, "counts": counts[name], "over_ideal": took[name] / ideal_s} for name in kinds]
    return {"unit_s": unit_s, "steps": steps, "kinds": rows}


def report(found: dict[str, Any], unit_s: float) -> str:
    """The tables of the README."""
    formula = markdown_table(
        ("t, ms", "m", "shares", "max n t, s", "measured, s", "deviation", "added, ms"),
        [
            (
                ", ".join(f"{row['unit_s'] * k * 1000:g}" for k in (1, 2, 3)),
                str(row["m"]),
                ", ".join(map(str, row["counts"])),
                f"{row['formula_s']:.3f}",
                f"{row['measured_s']:.3f}",
                f"{row['measured_s'] / row['formula_s'] - 1:+.1%}",
                f"{(row['measured_s'] - row['formula_s']) * 1000:.0f}",
            )
            for row in found["formula"]
        ],
    )
    slower, noise = found["slower"], found["noise"]
    changed = "; ".join(f"{', '.join(map(str, counts))} after step {step}" for step, counts in slower["changes"])
    rebalanced = markdown_table(
        ("shares auto", "asked", "measured"),
        [
            (
                f"one of three workers 2x slower from step {SLOWER_AT} on",
                f"{ASKED['optimum']}x the new optimum within two windows of {WINDOW} steps",
                f"{slower['over_optimum']:.3f}x from step {SLOWER_AT + 2 * WINDOW} on; shares {changed or 'unchanged'}",
            ),
            (
                f"{noise['steps']} steps of three equal workers that vary by {NOISE:.0%}",
                f"at most {ASKED['changes']} change",
                f"{len(noise['changes'])} changes",
            ),
        ],
    )
    drift = markdown_table(
        (
            "a CPU and two GPUs, 1.5 : 1 : 1, varying by 20 %",
            *(f"{each['steps']} steps of {each['unit_s'] * 1000:g} ms a microbatch" for each in found["drift"]),
        ),
        [
            (
                f"{rows[0]['name']} {', '.join(map(str, rows[0]['counts']))}",
                *(f"{row['over_ideal']:.3f}x" for row in rows),
            )
            for rows in zip(*(each["kinds"] for each in found["drift"]), strict=True)
        ],
    )
    about = (
        f"{WORLD} ranks over Gloo. First table: medians of 5 steps. Then {M} microbatches a step, of "
        f"{slower['unit_s'] * 1000:g} ms (becoming slower) and {unit_s * 200:g} ms (noise).\n"
    )
    return results(about, formula, rebalanced, drift)


def missed(found: dict[str, Any]) -> list[str]:
    """Return the missed targets."""
    faults = [
        f"shares {row['counts']}, units of {row['unit_s'] * 1000:g} ms: "
        f"{row['measured_s'] / row['formula_s'] - 1:+.1%} off the formula"
        for row in found["formula"]
        if abs(row["measured_s"] / row["formula_s"] - 1) > ASKED["formula"]
    ]
    for name, against in (("over_optimum", "the best fixed shares"), ("over_formula", "the formula")):
        if found["slower"][name] > ASKED["optimum"]:
            faults.append(f"{found['slower'][name]:.3f}x {against} two windows after a worker became slower")
    if len(found["noise"]["changes"]) > ASKED["changes"]:
        faults.append(f"{len(found['noise']['changes'])} changes under noise")
    return faults


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--unit", type=float, default=0.1, help="seconds of a microbatch of the fastest worker")
    parser.add_argument("--steps", type=int, default=200, help="under noise; a quarter of them under drift")
    arguments = parser.parse_args()
    argument = {"unit_s": arguments.unit, "steps": arguments.steps}
    found = run_on_ranks(WORLD, "benchmarks.workers.run:measure", argument)[0]
    write_json("workers", {**found, **argument, "environment": measured_on()})
    publish(__file__, report(found, arguments.unit), arguments.write)
    finish(missed(found))


if __name__ == "__main__":
    main()
