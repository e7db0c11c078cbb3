"""Delayed gradients on real data: held-out loss over seconds and over tiles of pipedream and async next to plain ways.

Takes images of nuclei with masks, and makes slides whose class is how dense their glands are; gives a table for
each. ``app.train`` trains in every way on as many tiles, at the learning rate of ``RATES`` that is best for the way on
a seed of its own, then with other seeds.

    python -m benchmarks.workers.delayed [nuclei glands] [--seeds 5] [--rates 0.0005 0.002 0.008] [--steps 60] [--write]
"""

from __future__ import annotations

import csv
import json
import os
import shutil
import statistics
import subprocess
import sys
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import OUT, ROOT, markdown_table, parser_of, results, write_json, write_results

NUCLEI = ROOT / "data" / "nuclei"
README = Path(__file__).with_name("README.md")
BATCH, M = 16, 4
"""Tiles of a step, and its minibatches in the ways that update after each."""
LOOKS = 4
"""Times that the held-out loss is looked at."""
RATES = ("0.0005", "0.002", "0.008")
TUNING_SEED = 100
TWO = ("--ranks", "2", "--batch", str(BATCH), "--microbatches", str(M))


class Way(NamedTuple):
    """One way to train; ``updates`` of a step of ``BATCH`` tiles."""

    updates: int
    arguments: tuple[str, ...]


WAYS = {
    "single, an update a minibatch": Way(
        M, ("--parallel", "single", "--batch", str(BATCH // M), "--microbatches", "1")
    ),
    "1f1b, an update a step": Way(1, ("--parallel", "1f1b", *TWO)),
    "ddp, an update a step": Way(1, ("--parallel", "ddp", *TWO)),
    "pipedream, an update a minibatch": Way(M, ("--parallel", "pipedream", *TWO)),
    "async, an update a minibatch": Way(M, ("--parallel", "async", *TWO)),
}
TASKS = {
    "nuclei": ("--model", "unet_w8", "--norm", "group", "--tile", "128", "--mpp", "0.5", "--slide-mpp", "0.5"),
    "glands": ("--model", "resnet18", "--norm", "group", "--tile", "256", "--min-tissue", "0.75"),
}
COMMON = ("--warmup", "5", "--min-tissue", "0", "--validation", "0.3", "--checkpoint-every", "100000")
COMMON += ("--twin-steps=0",)


class Run(NamedTuple):
    """Seconds of training before each look at the held-out loss, and these losses."""

    seconds: list[float]
    losses: list[float]


def slides_of(task: str) -> list[str]:
    """Return the arguments that name the slides of ``task`` and their labels."""
    if task == "nuclei":
        return ["--slides", str(NUCLEI / "images"), "--annotations", str(NUCLEI / "masks")]
    folder = OUT / "delayed" / "slides"
    made = [sys.executable, "-m", "app.synth", str(folder), "--slides", "24", "--size", "2048", "--task", "classify"]
    subprocess.run(made, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    return ["--slides", str(folder)]


def train(task: str, slides: list[str], way: Way, rate: str, seed: int, steps: int) -> Run:
    """Train once; the plain way makes ``M`` steps of a minibatch for each of the others."""
    out = OUT / "delayed" / "run"
    shutil.rmtree(out, ignore_errors=True)
    times = M if way.arguments[1] == "single" else 1
    every = max(1, steps // LOOKS) * times
    arguments = [*slides, "--out", str(out), *COMMON, *TASKS[task], *way.arguments, "--lr", rate, "--seed", str(seed)]
    arguments += ["--steps", str(steps * times), f"--validate-every={every}"]
    # A single rank has all cores, whatever this shell says.
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    command = [sys.executable, "-m", "app.train", *arguments]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)
    trained_s = list(accumulate(float(row["step_s"]) for row in _rows(out / "metrics.csv")))
    looks = _rows(out / "validation.csv")
    return Run([trained_s[int(row["step"]) - 1] for row in looks], [float(row["loss"]) for row in looks])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table(runs: dict[str, tuple[str, list[Run]]], steps: int) -> str:
    """The table of one task, losses as median and range over seeds."""
    seconds = max(statistics.median(run.seconds[-1] for run in own) for _, own in runs.values())
    parts = (0.5, 1.0)
    header = ["", "lr", "s a step", *(f"after {part * seconds:.0f} s" for part in parts)]
    looks = len(next(iter(runs.values()))[1][0].losses)
    header += [f"after {round(part * looks) * max(1, steps // LOOKS) * BATCH} tiles" for part in parts]
    lines = []
    for name, (rate, own) in runs.items():
        step_s = statistics.median(run.seconds[-1] for run in own) / steps
        by_time = [[_last(run, part * seconds) for run in own] for part in parts]
        by_tiles = [[run.losses[round(part * looks) - 1] for run in own] for part in parts]
        lines.append([name, rate, f"{step_s:.2f}", *map(_cell, by_time), *map(_cell, by_tiles)])
    return markdown_table(header, lines)


def _last(run: Run, seconds: float) -> float | None:
    """Return the last loss that was known after ``seconds`` of training."""
    known = [loss for at, loss in zip(run.seconds, run.losses, strict=True) if at <= seconds]
    return known[-1] if known else None


def _cell(losses: Sequence[float | None]) -> str:
    known = [loss for loss in losses if loss is not None]
    return f"{statistics.median(known):.3f} ({min(known):.3f}-{max(known):.3f})" if known else "no look yet"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("tasks", nargs="*", default=list(TASKS), help=f"of {', '.join(TASKS)}")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rates", nargs="+", default=RATES, help="learning rates to choose from")
    parser.add_argument("--steps", type=int, default=60, help=f"of {BATCH} tiles")
    asked = parser.parse_args()
    for task in asked.tasks:
        slides = slides_of(task)
        runs: dict[str, tuple[str, list[Run]]] = {}
        for name, way in WAYS.items():
            rate = asked.rates[0]
            if asked.rates[1:]:
                tuned = [train(task, slides, way, each, TUNING_SEED, asked.steps).losses[-1] for each in asked.rates]
                rate = asked.rates[tuned.index(min(tuned))]
            runs[name] = rate, [train(task, slides, way, rate, seed, asked.steps) for seed in range(asked.seeds)]
            print(json.dumps({"task": task, "way": name, "rate": rate, "last": runs[name][1][-1]}), flush=True)
        write_json(f"delayed_{task}", {name: {"lr": rate, "runs": own} for name, (rate, own) in runs.items()})
        about = (
            f"{task}: {asked.steps} steps of {BATCH} tiles; held-out loss, median and range of {asked.seeds} seeds.\n"
        )
        text = results(f"python -m benchmarks.workers.delayed {task} --write", about, table(runs, asked.steps))
        print(text)
        if asked.write:
            write_results(README, text, f"delayed {task}")


if __name__ == "__main__":
    main()
