"""kill -9 at random moments, then ``--resume``: are the final weights those of the uninterrupted run, bit for bit?

Takes nothing (slides are made); gives one line per kill: when, at which step, and whether the weights are identical.
Of a run over several ranks it is rank 1 that is killed. Under ``async`` the weights are compared with a replay of the
run's own log. Exit code 1 if the weights of a run differ.

    python -m benchmarks.faults.kill_resume [--kills 10] [--steps 40] [--under "spatial 2x1"]
"""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import torch

from app import synth
from benchmarks.results import OUT, ROOT, measured_on, parser_of
from benchmarks.timing import run_app

FOLDER = OUT / "kill_resume"
WAYS = {
    "single": (),
    "spatial 2x1": ("--parallel", "spatial", "--grid", "2x1", "--ranks", "2"),
    "spatial 1x2": ("--parallel", "spatial", "--grid", "1x2", "--ranks", "2"),
    "1f1b of 2x1": ("--parallel", "1f1b", "--grid", "2x1", "--ranks", "4"),
    "1f1b": ("--parallel", "1f1b", "--ranks", "2"),
    "pipedream": ("--parallel", "pipedream", "--ranks", "2"),
    "async": ("--parallel", "async", "--ranks", "2"),
}
SETTINGS = ("--model", "resnet18", "--tile", "128", "--batch", "4", "--microbatches", "2", "--checkpoint-every", "3")
SETTINGS += ("--validate-every=15", "--validation-tiles=4", "--twin-steps=0", "--augment", "device")
SETTINGS += ("--device", "cpu", "--seed", "7")
ENDS_WITHIN_S = 300.0
Weights = dict[str, torch.Tensor]


def command(out: Path, *more: str) -> list[str]:
    """Return the command of a run, which goes on from the last checkpoint in ``out``."""
    resume = ["--resume"] if (out / "checkpoints" / "last.pt").exists() else []
    return ["app.train", "--slides", str(FOLDER / "slides"), "--out", str(out), *SETTINGS, *more, *resume]


def finish(out: Path, *more: str) -> Weights:
    """Run to the end, from the beginning or from the last checkpoint; return the weights."""
    run_app(*command(out, *more))
    weights: Weights = torch.load(out / "checkpoints" / "last.pt", weights_only=True)["model"]
    return weights


def kill_after(seconds: float, out: Path, *more: str) -> int:
    """Begin a run, kill it or its rank 1 after so many seconds, and return the step of its last checkpoint."""
    words, null = [sys.executable, "-m", *command(out, *more)], subprocess.DEVNULL
    process = subprocess.Popen(words, cwd=ROOT, stdout=null, stderr=null)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        if "--ranks" in more:
            ranks = psutil.Process(process.pid).children(recursive=True)
            next((rank for rank in ranks if rank.name() == "rank 1"), process).kill()
        else:
            process.kill()
        process.wait(ENDS_WITHIN_S)
    last = out / "checkpoints" / "last.pt"
    return int(torch.load(last, weights_only=True)["step"]) if last.exists() else 0


def replayed(run: Path, *more: str) -> Weights:
    """Return the weights that the log of an asynchronous run gives in one process."""
    copy = FOLDER / "replayed"
    shutil.rmtree(copy, ignore_errors=True)
    return finish(copy, "--parallel", "async", "--ranks", "1", f"--replay={run / 'pushes.csv'}", *more)


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--under", choices=WAYS, default="single", help="how the killed run computes the model")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    arguments = parser.parse_args()
    rule = ("--steps", str(arguments.steps), "--optimizer", arguments.optimizer)
    settings = (*WAYS[arguments.under], *rule)
    shutil.rmtree(FOLDER, ignore_errors=True)
    synth.main([str(FOLDER / "slides"), "--slides", "6", "--size", "2048", "--task", "classify"])
    start = time.monotonic()
    expected = finish(FOLDER / "whole", *settings)
    whole_s = time.monotonic() - start
    print(f"{measured_on()}; {' '.join(settings)}, uninterrupted: {whole_s:.1f} s", flush=True)
    moments, identical = random.Random(arguments.seed), 0
    for kill in range(arguments.kills):
        out, after_s = FOLDER / f"killed-{kill}", moments.uniform(0.3, 1.0) * whole_s
        step = kill_after(after_s, out, *settings)
        found = finish(out, *settings)
        if arguments.under == "async":  # updates come in another order each time
            expected = replayed(out, *rule)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        identical += same
        at = f"after {after_s:5.1f} s, last checkpoint at step {step:2}"
        print(f"kill {kill}: {at}, weights identical: {same}", flush=True)
        shutil.rmtree(out)
    print(f"{identical} of {arguments.kills} identical")
    sys.exit(identical < arguments.kills)


if __name__ == "__main__":
    main()
