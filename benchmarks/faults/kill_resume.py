"""kill -9 at random moments, then ``--resume``: are the final weights those of the uninterrupted run, bit for bit?

Takes nothing (slides are made); gives one line per kill: when, at which step, and whether the weights are identical.
Of a run over several ranks it is rank 1 that is killed. Its first checkpoint is also gone on from under every other
way of computing the model: how far are the weights from those of the uninterrupted run, in parts of the largest of
their tensor? The yardstick is one process that goes on twice, on one thread and on two: its sums, too, are made in two
orders, and no strategy is in between. Under ``async`` the weights are compared with a replay of the run's own log.

    python -m benchmarks.faults.kill_resume [--kills 10] [--steps 40] [--under "spatial 2x1"]
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from app import synth
from benchmarks.faults.starts import rank_of
from benchmarks.machine import measured_on
from benchmarks.results import parser_of

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "kill_resume"

WAYS = {
    "single": (),
    "spatial 2x1": ("--parallel", "spatial", "--grid", "2x1", "--ranks", "2"),
    "spatial 1x2": ("--parallel", "spatial", "--grid", "1x2", "--ranks", "2"),
    "1f1b of 2x1": ("--parallel", "1f1b", "--grid", "2x1", "--ranks", "4"),
    "1f1b": ("--parallel", "1f1b", "--ranks", "2"),
    "pipedream": ("--parallel", "pipedream", "--ranks", "2"),
    "async": ("--parallel", "async", "--ranks", "2"),
}
OTHER_NUMBERS = {"pipedream", "async"}
"""Ways whose weights differ from those of all others."""
Weights = dict[str, torch.Tensor]
ENDS_WITHIN_S = 300.0
THREADS = "OMP_NUM_THREADS"


def command(slides: Path, out: Path, steps: int, *more: str) -> list[str]:
    settings = ["--model", "resnet18", "--tile", "128", "--batch", "4", "--microbatches", "2", "--steps", str(steps)]
    settings += ["--validate-every=15", "--validation-tiles=4", "--twin-steps=0"]
    settings += ["--checkpoint-every", "3", "--augment", "device", "--device", "cpu", "--seed", "7"]
    return [sys.executable, "-m", "app.train", "--slides", str(slides), "--out", str(out), *settings, *more]


def weights(run: Path) -> Weights:
    state: dict[str, Weights] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state["model"]


def steps_done(run: Path) -> int:
    path = run / "checkpoints" / "last.pt"
    return int(torch.load(path, weights_only=True)["step"]) if path.exists() else 0


def finish(slides: Path, out: Path, steps: int, settings: tuple[str, ...], threads: int = 1) -> None:
    """Run or resume to the end, whatever is there."""
    more = ["--resume"] if (out / "checkpoints" / "last.pt").exists() else []
    begun = command(slides, out, steps, *settings, *more)
    environment = os.environ | {THREADS: str(threads)}
    subprocess.run(begun, cwd=ROOT, env=environment, check=True, stdout=subprocess.DEVNULL)


def gone_on(slides: Path, killed_run: Path, steps: int, settings: tuple[str, ...], threads: int = 1) -> Weights:
    """The weights at the end of a copy of a run that was killed."""
    copy = OUT / "other"
    shutil.copytree(killed_run, copy)
    finish(slides, copy, steps, settings, threads)
    end = weights(copy)
    shutil.rmtree(copy)
    return end


def killed(slides: Path, out: Path, steps: int, settings: tuple[str, ...], after_s: float) -> None:
    """Begin a run, and kill it or its rank 1 after so many seconds."""
    begun = command(slides, out, steps, *settings)
    process = subprocess.Popen(begun, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(LookupError):  # its ranks have ended already
            (rank_of(out, 1) if "--ranks" in settings else process).kill()
        process.wait(ENDS_WITHIN_S)


def replayed(slides: Path, run: Path, steps: int, rule: tuple[str, ...]) -> Weights:
    """The weights that the log of an asynchronous run gives in one process."""
    copy = OUT / "replayed"
    finish(slides, copy, steps, ("--parallel", "async", "--ranks", "1", f"--replay={run / 'pushes.csv'}", *rule))
    end = weights(copy)
    shutil.rmtree(copy)
    return end


def off_by(found: Weights, expected: Weights) -> str:
    """The largest difference, in parts of the largest value of its tensor: of all tensors, and of the kernels."""
    assert found.keys() == expected.keys()
    errors = {
        name: float((found[name] - value).abs().max() / value.abs().max())
        for name, value in expected.items()
        if value.is_floating_point()
    }
    kernels = max(value for name, value in errors.items() if expected[name].ndim > 1)
    name = max(errors, key=lambda name: errors[name])
    return f"kernels off by {kernels:.1e}, all by {errors[name]:.1e} ({name})"


def main() -> None:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--under", choices=WAYS, default="single", help="how the killed run computes the model")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    arguments = parser.parse_args()
    way, rule = arguments.under, ("--optimizer", arguments.optimizer)
    shutil.rmtree(OUT, ignore_errors=True)
    slides = OUT / "slides"
    synth.main([str(slides), "--slides", "6", "--size", "2048", "--task", "classify"])
    start = time.monotonic()
    finish(slides, OUT / "whole", arguments.steps, WAYS[way] + rule)
    whole_s = time.monotonic() - start
    expected = weights(OUT / "whole")
    moments = random.Random(arguments.seed)
    print(f"{measured_on()}; {way}, {arguments.optimizer}, {arguments.steps} steps uninterrupted: {whole_s:.1f} s")
    identical, went_on = 0, not WAYS[way] or way in OTHER_NUMBERS
    for kill in range(arguments.kills):
        out = OUT / f"killed-{kill}"
        after_s = moments.uniform(0.3, 1.0) * whole_s
        killed(slides, out, arguments.steps, WAYS[way] + rule, after_s)
        step = steps_done(out)
        if 0 < step < arguments.steps and not went_on:
            single = gone_on(slides, out, arguments.steps, WAYS["single"] + rule)
            two_threads = gone_on(slides, out, arguments.steps, WAYS["single"] + rule, threads=2)
            print(f"from step {step}, single on two threads against one: {off_by(two_threads, single)}", flush=True)
            for other in (name for name in WAYS if name not in {way, *OTHER_NUMBERS}):
                end = single if other == "single" else gone_on(slides, out, arguments.steps, WAYS[other] + rule)
                print(f"from step {step} of {way} under {other}: {off_by(end, expected)}", flush=True)
            went_on = True
        finish(slides, out, arguments.steps, WAYS[way] + rule)
        found = weights(out)
        if way == "async":  # updates come in another order each time
            expected = replayed(slides, out, arguments.steps, rule)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        identical += same
        at = f"after {after_s:5.1f} s, last checkpoint at step {step:2}"
        print(f"kill {kill}: {at}, weights identical: {same}", flush=True)
        shutil.rmtree(out)
    print(f"{identical} of {arguments.kills} identical")
    sys.exit(identical < arguments.kills)


if __name__ == "__main__":
    main()
