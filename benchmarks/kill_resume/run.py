"""kill -9 at random moments, then ``--resume``: are the final weights those of the uninterrupted run, bit for bit?

Takes nothing (slides are made); gives one line per kill: when, at which step, and whether the weights are identical.

    python -m benchmarks.kill_resume.run [--kills 10] [--steps 40]
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import time
from pathlib import Path

import torch

from app import synth
from benchmarks.machine import measured_on

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "kill_resume"


def command(slides: Path, out: Path, steps: int, *more: str) -> list[str]:
    settings = ["--model", "resnet18", "--tile", "128", "--batch", "4", "--microbatches", "2", "--steps", str(steps)]
    settings += ["--developer", "validate-every=15", "--developer", "validation-tiles=4", "--developer", "twin-steps=0"]
    settings += ["--checkpoint-every", "3", "--augment", "device", "--seed", "7"]
    return [sys.executable, "-m", "app.train", "--slides", str(slides), "--out", str(out), *settings, *more]


def weights(run: Path) -> dict[str, torch.Tensor]:
    state: dict[str, dict[str, torch.Tensor]] = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    return state["model"]


def steps_done(run: Path) -> int:
    path = run / "checkpoints" / "last.pt"
    return int(torch.load(path, weights_only=True)["step"]) if path.exists() else 0


def finish(slides: Path, out: Path, steps: int) -> None:
    """Run or resume to the end, whatever is there."""
    more = ["--resume"] if (out / "checkpoints" / "last.pt").exists() else []
    subprocess.run(command(slides, out, steps, *more), cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    arguments = parser.parse_args()
    shutil.rmtree(OUT, ignore_errors=True)
    slides = OUT / "slides"
    synth.main([str(slides), "--slides", "6", "--size", "2048", "--task", "classify"])
    start = time.monotonic()
    finish(slides, OUT / "whole", arguments.steps)
    whole_s = time.monotonic() - start
    expected = weights(OUT / "whole")
    moments = random.Random(arguments.seed)
    print(f"{measured_on()}; {arguments.steps} steps uninterrupted: {whole_s:.1f} s")
    identical = 0
    for kill in range(arguments.kills):
        out = OUT / f"killed-{kill}"
        after_s = moments.uniform(0.3, 1.0) * whole_s
        process = subprocess.Popen(command(slides, out, arguments.steps), cwd=ROOT, stdout=subprocess.DEVNULL)
        try:
            process.wait(after_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        step = steps_done(out)
        finish(slides, out, arguments.steps)
        found = weights(out)
        same = found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)
        identical += same
        print(f"kill {kill}: after {after_s:5.1f} s, last checkpoint at step {step:2}, weights identical: {same}")
        shutil.rmtree(out)
    print(f"{identical} of {arguments.kills} identical")
    sys.exit(identical < arguments.kills)


if __name__ == "__main__":
    main()
