"""What checkpoints cost: periods of steps with one checkpoint, written at once or in two phases, or with none.

Takes nothing; gives the share of the time that a checkpoint adds to a period. The three take turns in one process, on
one rank with all cores and with the model split over two. What is compared is the median, over all periods of a kind,
of what comes before the first step, of the first step, of the second, and so on: a machine that is slow for a moment
makes one of them longer, and the median does not see it. Exit code 0 when what is asked was reached.

    python -m benchmarks.overlap.checkpoints [--every 10] [--rounds 5] [--px 256] [--quick] [--async-save] [--write]
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.overlap.checkpoint_periods import KINDS, measure
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, markdown_table, parser_of, results, write_results
from parallel.comm.local import LocalCommunicator

README = Path(__file__).with_name("README.md")
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
    kinds: tuple[str, ...] = KINDS


def measured(case: Case) -> dict[str, Any]:
    """What the first rank measured."""
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=OUT) as folder:  # the disk that a run would write to, not one in memory
        argument = {**dataclasses.asdict(case), "folder": folder}
        if case.ranks > 1:
            found: dict[str, Any] = run_on_ranks(case.ranks, "benchmarks.overlap.checkpoint_periods:measure", argument)[
                0
            ]
            return found
        return measure(LocalCommunicator(), argument)


def usual_s(found: dict[str, Any], kind: str) -> float:
    """Seconds of a period of ``kind``, each part of it the median of all periods."""
    return sum(statistics.median(part) for part in zip(*found[kind], strict=True))


def added(found: dict[str, Any], kind: str) -> float:
    """The share of the time that the checkpoint of a period adds."""
    return usual_s(found, kind) / usual_s(found, "none") - 1


def row(case: Case, found: dict[str, Any]) -> list[str]:
    def periods(kind: str) -> str:
        whole = [sum(parts) for parts in found[kind]]
        return f"{min(whole):.1f} to {max(whole):.1f} s"

    return [
        f"{case.strategy}, {case.ranks} x {found['threads']} thread{'s' if found['threads'] > 1 else ''}",
        f"{case.model}, {case.px} px, batch {case.batch}",
        f"{found['bytes'] / 2**20:.0f} MiB",
        f"{usual_s(found, 'none') / case.every:.2f} s",
        *(f"{100 * added(found, kind):.1f} %" for kind in ("blocking", "two-phase")),
        *(f"{statistics.median(parts[0] for parts in found[kind]):.3f} s" for kind in ("blocking", "two-phase")),
        f"{statistics.median(found['write_s']['two-phase']):.2f} s",
        str(found["tuned"]),
        *map(periods, KINDS),
    ]


def compare_async_save(case: Case) -> str:
    """A table of our checkpoints in two phases beside torch's ``async_save``, on one rank."""
    found = measured(dataclasses.replace(case, kinds=("none", "two-phase", "async-save")))
    rows = []
    for kind in ("two-phase", "async-save"):
        between_s, first_s, *_ = (statistics.median(part) for part in zip(*found[kind], strict=True))
        whole = [sum(parts) for parts in found[kind]]
        without = [sum(parts) for parts in found["none"]]
        each = sorted(one / other - 1 for one, other in zip(whole, without, strict=True))
        rows.append(
            (
                kind,
                f"{100 * added(found, kind):.1f} %",
                f"{100 * each[0]:.1f} to {100 * each[-1]:.1f} %",
                f"{between_s:.3f} s",
                f"{first_s:.2f} s",
                f"{statistics.median(found['write_s'][kind]):.2f} s",
            )
        )
    header = ("checkpoint", "adds", "period by period", "between steps", "step after it", "on the disk after")
    about = (
        f"{case.model}, {case.px} px, batch {case.batch}, {found['threads']} threads, "
        f"{found['bytes'] / 2**20:.0f} MiB, "
        f"step {usual_s(found, 'none') / case.every:.2f} s; {case.rounds} periods of {case.every} steps of each kind.\n"
    )
    return results("python -m benchmarks.overlap.checkpoints --async-save --write", about, markdown_table(header, rows))


HEADER = ("ranks", "training", "checkpoint", "step", "blocking adds", "two-phase adds", "blocking, between steps")
HEADER += ("two-phase, between steps", "on the disk after", "k for 3.5 %", "periods with none", "blocking", "two-phase")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--every", type=int, default=10, help="steps of a period")
    parser.add_argument("--rounds", type=int, default=5, help="periods of each kind")
    parser.add_argument("--px", type=int, default=256, help="side of the tiles")
    parser.add_argument("--quick", action="store_true", help="a small model: shows that it runs, not what it costs")
    parser.add_argument("--async-save", action="store_true", help="compare with torch's async_save instead")
    arguments = parser.parse_args()
    size = {"every": arguments.every, "rounds": arguments.rounds, "px": arguments.px}
    if arguments.quick:
        size = {"model": "resnet11_v2", "px": 64, "batch": 2, "m": 2, "every": 2, "rounds": 1}
    if arguments.async_save:
        text = compare_async_save(Case("single", 1, **size))
        print(text)
        if arguments.write:
            write_results(README, text, "async_save")
        return
    cases = [Case("single", 1, **size), Case("master", 2, **size)]
    found = [measured(case) for case in cases]
    table = markdown_table(HEADER, map(row, cases, found))
    about = (
        f"One checkpoint in {cases[0].every} steps, {cases[0].rounds} periods of each kind ({', '.join(KINDS)}) in "
        "turn; seconds are medians, of periods also the shortest and the longest.\n"
    )
    text = results("python -m benchmarks.overlap.checkpoints --write", about, table)
    print(text)
    (OUT / "checkpoint_stall.json").write_text(
        json.dumps([{**dataclasses.asdict(case), **each} for case, each in zip(cases, found, strict=True)], indent=2)
    )
    if arguments.write:
        write_results(README, text, "checkpoints")
    worst = max(added(each, "two-phase") for each in found)
    print(f"two-phase: {worst:.1%} at most (asked: {ASKED:.1%})")
    sys.exit(worst > ASKED)


if __name__ == "__main__":
    main()
