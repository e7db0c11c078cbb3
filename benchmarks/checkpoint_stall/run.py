"""What checkpoints cost: periods of steps with one checkpoint, written at once or in two phases, or with none.

Takes nothing; gives the share of the time that a checkpoint adds to a period. The three take turns in one process, on
one rank with all cores and with the model split over two. Exit code 0 when what is asked was reached.

    python -m benchmarks.checkpoint_stall.run [--every 10] [--rounds 5] [--quick] [--write]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.checkpoint_stall.periods import KINDS, measure
from benchmarks.ranks import run_on_ranks
from benchmarks.results import markdown_table, results, write_results
from parallel.comm.local import LocalCommunicator

README = Path(__file__).with_name("README.md")
OUT = Path(__file__).parents[2] / "bench-data"
ASKED = 0.035


@dataclasses.dataclass(frozen=True)
class Case:
    """A training whose checkpoints are measured: a step of ``batch`` tiles of ``px`` in ``m`` microbatches."""

    strategy: str
    ranks: int
    model: str = "resnet50"
    px: int = 256
    batch: int = 8
    m: int = 4
    every: int = 10
    rounds: int = 5


def measured(case: Case) -> dict[str, Any]:
    """What the first rank measured."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:  # the disk that a run would write to, not one in memory
        argument = {**dataclasses.asdict(case), "folder": folder}
        if case.ranks > 1:
            found: dict[str, Any] = run_on_ranks(case.ranks, "benchmarks.checkpoint_stall.periods:measure", argument)[0]
            return found
        return measure(LocalCommunicator(), argument)


def lost(found: dict[str, Any], kind: str) -> list[float]:
    """In each round: the share of the time that the checkpoint of a period added."""
    return [with_s / none_s - 1 for with_s, none_s in zip(found[kind], found["none"], strict=True)]


def row(case: Case, found: dict[str, Any]) -> list[str]:
    def share(kind: str) -> str:
        shares = [100 * each for each in lost(found, kind)]
        return f"{statistics.median(shares):.1f} % ({min(shares):.1f} to {max(shares):.1f})"

    return [
        f"{case.strategy}, {case.ranks} x {found['threads']} thread{'s' if found['threads'] > 1 else ''}",
        f"{case.model}, {case.px} px, batch {case.batch}",
        f"{found['bytes'] / 2**20:.0f} MiB",
        f"{statistics.median(found['none']) / case.every:.2f} s",
        share("blocking"),
        share("two-phase"),
        f"{statistics.median(found['between_s']):.3f} s",
        f"{statistics.median(found['persist_s']):.2f} s",
        str(found["tuned"]),
    ]


HEADER = ("ranks", "training", "checkpoint", "step", "blocking", "two-phase", "between steps", "on the disk after")
HEADER += ("k for 3.5 %",)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=10, help="steps of a period")
    parser.add_argument("--rounds", type=int, default=5, help="periods of each kind")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs, not what it costs")
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    arguments = parser.parse_args()
    size = {"every": arguments.every, "rounds": arguments.rounds}
    if arguments.quick:
        size = {"model": "resnet18", "px": 64, "batch": 2, "m": 2, "every": 2, "rounds": 1}
    cases = [Case("single", 1, **size), Case("master", 2, **size)]
    found = [measured(case) for case in cases]
    table = markdown_table(HEADER, map(row, cases, found))
    about = (
        f"One checkpoint in {cases[0].every} steps, {cases[0].rounds} periods of each kind ({', '.join(KINDS)}) in "
        "turn: median share of the time that it added, and least to most.\n"
    )
    text = results("python -m benchmarks.checkpoint_stall.run --write", about, table)
    print(text)
    (OUT / "checkpoint_stall.json").write_text(
        json.dumps([{**dataclasses.asdict(case), **each} for case, each in zip(cases, found, strict=True)], indent=2)
    )
    if arguments.write:
        write_results(README, text)
    worst = max(statistics.median(lost(each, "two-phase")) for each in found)
    print(f"two-phase: {worst:.1%} at most (asked: {ASKED:.1%})")
    sys.exit(worst > ASKED)


if __name__ == "__main__":
    main()
