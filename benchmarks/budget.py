"""``make bench``: the project's budgets of speed, compared with this machine.

Takes nothing; runs the benchmarks one after the other in processes of their own and prints one line per budget. Wants
an otherwise idle machine.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.overlap.checkpoints import added
from benchmarks.plan_accuracy.activation_bytes import deviations
from benchmarks.results import OUT, ROOT, measured_on


@dataclass(frozen=True)
class Budget:
    """One line of the table: ``read`` takes the figure out of the benchmark's JSON."""

    what: str
    benchmark: str
    read: Callable[[Any], float]
    asked: float
    at_least: bool

    def line(self, results: dict[str, Any]) -> str:
        measured = self.read(results[self.benchmark])
        met = measured >= self.asked if self.at_least else measured <= self.asked
        bound = "at least" if self.at_least else "at most"
        return f"{self.what:62}{bound:>9}{self.asked:8.3g}{measured:10.3f}  {'ok' if met else 'MISSED'}"


def ratio(reader: str, over: str) -> Callable[[Any], float]:
    """Return the speed of ``reader`` over that of ``over`` on tiles of 2048 px, by the wall clock."""

    def read(result: Any) -> float:
        rows = [r for r in result["ratios"] if (r["reader"], r["over"], r["tile_px"]) == (reader, over, 2048)]
        return float(next(r["ratio"] for r in rows if r["clock"] == "wall"))

    return read


def least(rows: str, key: str, where: Callable[[Any], bool] = lambda row: True) -> Callable[[Any], float]:
    """The smallest ``key`` of the rows that ``where`` is true of: the budget is met when all of them meet it."""

    def read(result: Any) -> float:
        return min(float(row[key]) for row in result[rows] if where(row))

    return read


def compared(ours: str, theirs: str) -> Callable[[Any], float]:
    """Return the speed of a step of ``ours`` over that of ``theirs``, median over rounds."""
    return least("comparisons", "ratio", lambda row: (row["ours"], row["theirs"]) == (ours, theirs))


def largest_deviation(result: Any) -> float:
    return max(abs(each) for row in result["rows"] for each in deviations(row))


def checkpoint_stall(result: Any) -> float:
    """Return the largest share that a checkpoint in two phases adds to a period of steps."""
    return max(added(case, "two-phase") for case in result)


def blocking_stall(result: Any) -> float:
    """Return what a blocking checkpoint adds to 100 steps, of those that it was measured in."""
    return max(added(case, "blocking") * case["every"] / 100 for case in result)


def planning(name: str) -> Callable[[Any], float]:
    """Seconds by the clock that a plan takes."""
    return lambda result: float(result[name]["wall_s"])


RUNS = {
    "tile_reading": ("tile_reading.run", "--rounds", "0.5"),
    "data_wait": ("tile_reading.data_wait",),
    "schedules": ("schedules.run", "--rounds", "3"),
    "sleeping_stages": ("schedules.sleeping", "--steps", "3"),
    "activation_bytes": ("plan_accuracy.activation_bytes",),
    "checkpoint_stall": ("overlap.checkpoints", "--rounds", "3"),
    "plan_speed": ("plan_accuracy.plan_speed",),
    "workers": ("workers.run", "--steps", "100"),
}
"""Name of a benchmark's JSON -> its module, and shortened arguments."""
GIVEN = "megatile into a given array"
BUDGETS = [
    Budget("tile reading, 2048 px, over OpenSlide", "tile_reading", ratio(GIVEN, "openslide"), 4.5, True),
    Budget("tile reading, 2048 px, over the bare decoder", "tile_reading", ratio(GIVEN, "bare decoder"), 0.80, True),
    Budget("data wait in training, share of the step", "data_wait", lambda r: r["data_wait_fraction"], 0.02, False),
    Budget("training fed from slides, over fed from memory", "data_wait", lambda r: r["ratio"], 0.98, True),
    Budget("data parallelism over torch DDP, 2 ranks", "schedules", compared("engine ddp m=8", "ddp m=8"), 0.98, True),
    Budget("gpipe over torch's, 2 ranks", "schedules", compared("gpipe m=8", "torch gpipe"), 1.0, True),
    Budget("1f1b over torch's, 2 ranks", "schedules", compared("1f1b m=8", "torch 1f1b"), 1.0, True),
    Budget("bidirectional over DDP, m=2, 2 ranks", "schedules", compared("bidirectional m=2", "ddp m=2"), 0.95, True),
    Budget("bidirectional over DDP, m=8, 2 ranks", "schedules", compared("bidirectional m=8", "ddp m=8"), 0.95, True),
    # Its formula allows 0.55 where B = 2F.
    Budget("mast over DDP, m=2, 2 ranks", "schedules", compared("mast m=2", "ddp m=2"), 0.95 * 6 / 11, True),
    Budget("the schedule farthest from its simulation", "schedules", least("simulated", "ratio"), 0.90, True),
    Budget(
        "stages that sleep, largest deviation from the formula",
        "sleeping_stages",
        lambda r: max(abs(row["deviation"]) for row in r["rows"]),
        0.02,
        False,
    ),
    Budget("activation bytes, largest deviation", "activation_bytes", largest_deviation, 0.10, False),
    Budget(
        "engine on one rank, over a plain microbatched loop",
        "schedules",
        compared("engine on one rank", "plain loop"),
        0.97,
        True,
    ),
    Budget("checkpoint stall in two phases, one per 10 steps", "checkpoint_stall", checkpoint_stall, 0.035, False),
    Budget("checkpoint stall, blocking, one per 100 steps", "checkpoint_stall", blocking_stall, 0.035, False),
    Budget(
        "shares auto after a worker slowed down, over the best ones",
        "workers",
        lambda r: r["slower"]["over_optimum"],
        1.05,
        False,
    ),
    Budget("a plan of ResNet-1001-v2 for 1,024 ranks, s", "plan_speed", planning("1024-ranks"), 15, False),
    Budget("the largest tile of ResNet-50 on 4 ranks, s", "plan_speed", planning("largest-tile"), 10, False),
    Budget("the largest tile of ResNet-50 in 2 GiB here, s", "plan_speed", planning("largest-tile-here"), 10, False),
]


def main() -> None:
    print(measured_on())
    for name, (module, *arguments) in RUNS.items():
        print(f"running benchmarks.{module}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
        # A benchmark that misses its own target exits with 1; the table says so.
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not (OUT / f"{name}.json").exists():
            sys.exit(f"{' '.join(command)} failed\n{done.stdout}\n{done.stderr}")
    results = {name: json.loads((OUT / f"{name}.json").read_text()) for name in RUNS}
    print(f"\n{'budget':62}{'asked':>17}{'measured':>10}")
    for budget in BUDGETS:
        print(budget.line(results))


if __name__ == "__main__":
    main()
