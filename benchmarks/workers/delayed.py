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
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from benchmarks.results import OUT, ROOT, parser_of, publish, results, write_json
from benchmarks.timing import run_app
from benchmarks.workers.looks import Run, loss_table

NUCLEI = ROOT / "data" / "nuclei"
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


def slides_of(task: str) -> list[str]:
    """Return the arguments that name the slides of ``task`` and their labels."""
    if task == "nuclei":
        return ["--slides", str(NUCLEI / "images"), "--annotations", str(NUCLEI / "masks")]
    folder = OUT / "delayed" / "slides"
    run_app("app.synth", str(folder), "--slides", "24", "--size", "2048", "--task", "classify")
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
    run_app("app.train", *arguments, env=environment)
    trained_s = list(accumulate(float(row["step_s"]) for row in _rows(out / "metrics.csv")))
    looks = _rows(out / "validation.csv")
    return Run([trained_s[int(row["step"]) - 1] for row in looks], [float(row["loss"]) for row in looks])


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


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
        looks = len(next(iter(runs.values()))[1][0].losses)
        table = loss_table(runs, (0.5, 1.0), looks, max(1, asked.steps // LOOKS) * BATCH, "tiles")
        text = results(about, table)
        publish(__file__, text, asked.write, f"delayed {task}")


if __name__ == "__main__":
    main()
