"""``make bench``: the project's budgets of speed, compared with this machine.

Takes nothing; runs the benchmarks one after the other in processes of their own and prints one line per budget. Wants
an otherwise idle machine.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from benchmarks.overlap.checkpoints import added
from benchmarks.plan_accuracy.activation_bytes import deviations
from benchmarks.results import ROOT, measured_on, read_json

LEAST, MOST = "at least", "at most"


@dataclass(frozen=True)
class Budget:
    """One line of the table: ``read`` takes the figure out of the benchmark's JSON."""

    what: str
    benchmark: str
    bound: str
    asked: float
    read: Callable[[Any], float]

    def line(self, results: dict[str, Any]) -> str:
        measured = self.read(results[self.benchmark])
        met = measured >= self.asked if self.bound == LEAST else measured <= self.asked
        return f"{self.what:62}{self.bound:>9}{self.asked:8.3g}{measured:10.3f}  {'ok' if met else 'MISSED'}"


def reading(reader: str, over: str) -> Callable[[Any], float]:
    """Return the speed of ``reader`` over that of ``over``, 2048 px, by the wall clock."""
    wanted = {"reader": reader, "over": over, "tile_px": 2048, "clock": "wall"}
    return lambda result: next(float(row["ratio"]) for row in result["ratios"] if row.items() >= wanted.items())


def compared(ours: str, theirs: str) -> Callable[[Any], float]:
    """Return the speed of a step of ``ours`` over that of ``theirs``, median over rounds."""
    wanted = {"ours": ours, "theirs": theirs}
    return lambda result: next(float(row["ratio"]) for row in result["comparisons"] if row.items() >= wanted.items())


def stall(kind: str, every: int | None = None) -> Callable[[Any], float]:
    """Return the largest share that a checkpoint adds to a period of ``every`` steps, by default as measured."""
    return lambda cases: max(added(case, kind) * case["every"] / (every or case["every"]) for case in cases)


RUNS = {
    "tile_reading": "tile_reading.run --rounds 0.5",
    "data_wait": "tile_reading.data_wait",
    "schedules": "schedules.run --rounds 3",
    "sleeping_stages": "schedules.sleeping --steps 3",
    "activation_bytes": "plan_accuracy.activation_bytes",
    "checkpoint_stall": "overlap.checkpoints --rounds 3",
    "plan_speed": "plan_accuracy.plan_speed",
    "workers": "workers.run --steps 100",
}
"""Name of a benchmark's JSON -> its module, and shortened arguments."""
BUDGETS = [
    Budget("tile reading, 2048 px, over OpenSlide", "tile_reading", LEAST, 4.5, reading("megatile", "openslide")),
    Budget(
        "tile reading, 2048 px, over the bare decoder", "tile_reading", LEAST, 0.80,
        reading("megatile into a given array", "bare decoder"),
    ),
    Budget("data wait in training, share of the step", "data_wait", MOST, 0.02, lambda r: r["data_wait_fraction"]),
    Budget("training fed from slides, over fed from memory", "data_wait", LEAST, 0.98, lambda r: r["ratio"]),
    *(
        Budget(what, "schedules", LEAST, asked, compared(ours, theirs))
        for what, asked, ours, theirs in (
            ("data parallelism over torch DDP, 2 ranks", 0.98, "engine ddp m=8", "ddp m=8"),
            ("gpipe over torch's, 2 ranks", 1.0, "gpipe m=8", "torch gpipe"),
            ("1f1b over torch's, 2 ranks", 1.0, "1f1b m=8", "torch 1f1b"),
            ("bidirectional over DDP, m=2, 2 ranks", 0.95, "bidirectional m=2", "ddp m=2"),
            ("bidirectional over DDP, m=8, 2 ranks", 0.95, "bidirectional m=8", "ddp m=8"),
            ("mast over DDP, m=2, 2 ranks", 0.95 * 6 / 11, "mast m=2", "ddp m=2"),  # its formula: 0.55 where B = 2F
            ("engine on one rank, over a plain microbatched loop", 0.97, "engine on one rank", "plain loop"),
        )
    ),
    Budget(
        "the schedule farthest from its simulation", "schedules", LEAST, 0.90,
        lambda r: min(row["ratio"] for row in r["simulated"]),
    ),
    Budget(
        "stages that sleep, largest deviation from the formula", "sleeping_stages", MOST, 0.02,
        lambda r: max(abs(row["deviation"]) for row in r["rows"]),
    ),
    Budget(
        "activation bytes, largest deviation", "activation_bytes", MOST, 0.10,
        lambda r: max(abs(each) for row in r["rows"] for each in deviations(row)),
    ),
    Budget("checkpoint stall in two phases, one per 10 steps", "checkpoint_stall", MOST, 0.035, stall("two-phase")),
    Budget("checkpoint stall, blocking, one per 100 steps", "checkpoint_stall", MOST, 0.035, stall("blocking", 100)),
    Budget(
        "shares auto after a worker slowed down, over the best ones", "workers", MOST, 1.05,
        lambda r: r["slower"]["over_optimum"],
    ),
    *(
        Budget(what, "plan_speed", MOST, asked, lambda r, name=name: float(r[name]["wall_s"]))
        for what, asked, name in (
            ("a plan of ResNet-1001-v2 for 1,024 ranks, s", 15, "1024-ranks"),
            ("the largest tile of ResNet-50 on 4 ranks, s", 10, "largest-tile"),
            ("the largest tile of ResNet-50 in 2 GiB here, s", 10, "largest-tile-here"),
        )
    ),
]  # fmt: skip


def main() -> None:
    print(measured_on())
    for name, words in RUNS.items():
        print(f"running benchmarks.{words}", flush=True)
        command = [sys.executable, "-m", *f"benchmarks.{words}".split()]
        # A benchmark that misses its own target exits with 1; the table says so.
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        if done.returncode not in (0, 1) or not read_json(name):
            sys.exit(f"{' '.join(command)} failed\n{done.stdout}\n{done.stderr}")
    results = {name: read_json(name) for name in RUNS}
    print(f"\n{'budget':62}{'asked':>17}{'measured':>10}")
    for budget in BUDGETS:
        print(budget.line(results))


if __name__ == "__main__":
    main()
