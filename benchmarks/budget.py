"""``make bench``: what is asked of the project's speed, beside what this machine measures now.

Takes nothing; runs the benchmarks one after the other in processes of their own and prints one line per budget. Wants
an otherwise idle machine: a figure taken beside other work says nothing.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.machine import measured_on

ROOT = Path(__file__).parents[1]
OUT = ROOT / "bench-data"


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
    """How many times as fast as ``over`` tiles of 2048 px were read, by the wall clock."""

    def read(result: Any) -> float:
        rows = [r for r in result["ratios"] if (r["reader"], r["over"], r["tile_px"]) == (reader, over, 2048)]
        return float(next(r["ratio"] for r in rows if r["clock"] == "wall"))

    return read


RUNS = {
    "tile_reading": ("--rounds", "0.5"),
    "data_wait": (),
    "engine": (),
}
GIVEN = "megatile into a given array"
BUDGETS = [
    Budget("tile reading, 2048 px, over OpenSlide", "tile_reading", ratio(GIVEN, "openslide"), 4.5, True),
    Budget("tile reading, 2048 px, over the bare decoder", "tile_reading", ratio(GIVEN, "bare decoder"), 0.80, True),
    Budget("data wait in training, share of the step", "data_wait", lambda r: r["data_wait_fraction"], 0.02, False),
    Budget("training fed from slides, over fed from memory", "data_wait", lambda r: r["ratio"], 0.98, True),
    Budget(
        "engine on one rank, over a plain microbatched loop", "engine", lambda r: r["engine_over_plain"], 0.97, True
    ),
    Budget(
        "checkpoint stall, one per 100 steps (the default)", "engine", lambda r: r["checkpoint_stall"], 0.035, False
    ),
]


def main() -> None:
    print(measured_on())
    for name, arguments in RUNS.items():
        print(f"running benchmarks.{name}", flush=True)
        command = [sys.executable, "-m", f"benchmarks.{name}.run", *arguments]
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
