"""Slides of which few tiles show the class: labels for every tile, bags, and whole slides, by held-out slide AUC.

Slides are noise, and positive ones have a few striped tiles among many. The same small network is trained by
``app.train`` in each way for as many steps and tiles; half of the slides are held out and scored once, at the end.

    python -m benchmarks.bags.run [--slides 40] [--steps 60] [--seeds 5] [--write]
"""

from __future__ import annotations

import csv
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from torch import nn

from benchmarks.results import markdown_table, parser_of, results, write_results

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "bags"
README = Path(__file__).with_name("README.md")
PX, SIDE, STRIPED = 32, 12, 2
"""Side of a tile in px and of a slide in tiles; striped tiles of a positive slide, of 144."""

TILES = SIDE * SIDE
WAYS = {
    "labels for every tile, mean": ("--tile", str(PX), "--slide-score", "mean"),
    "labels for every tile, maximum": ("--tile", str(PX), "--slide-score", "max"),
    "--bag 72": ("--tile", str(PX), "--bag", "72"),
    "--bag 144, all tiles": ("--tile", str(PX), "--bag", str(TILES)),
    "--tile slide --head attention": ("--tile", "slide", "--head", "attention"),
}
COMMON = ("--model", "benchmarks.bags.run:Network", "--parallel", "single", "--lr", "0.01", "--validation", "0.5")
COMMON += ("--min-tissue", "0", "--slide-mpp", "0.5", "--augment", "none", "--developer", "validate-every=100000")


class Network(nn.Sequential):
    """Three convolutions, global average pooling and a linear layer: (n, 3, h, w) -> (n, classes)."""

    def __init__(self, *, classes: int) -> None:
        layers: list[nn.Module] = []
        for channels, out in ((3, 12), (12, 16), (16, 16)):
            layers += [nn.Conv2d(channels, out, 3, 2, 1), nn.GroupNorm(4, out), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, classes))


def make_slides(folder: Path, count: int) -> None:
    """Write ``count`` slides, half of them positive, and ``labels.csv``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    rng, rows = np.random.default_rng(0), [("slide", "label", "patient")]
    for number in range(count):
        pixels = rng.normal(170, 25, (SIDE * PX, SIDE * PX, 3))
        for place in rng.choice(TILES, STRIPED * (number % 2), replace=False):
            top, left = (int(k) * PX for k in divmod(int(place), SIDE))
            pixels[top : top + PX : 4, left : left + PX] -= 60
        cv2.imwrite(str(folder / f"s{number:03d}.png"), pixels.clip(0, 255).astype(np.uint8))
        rows.append((f"s{number:03d}", ("plain", "striped")[number % 2], f"p{number}"))
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows(rows)


def measure(slides: Path, way: str, seed: int, steps: int) -> dict[str, Any]:
    """Return the summary of one run; a step has the tiles of two slides."""
    out = OUT / "run"
    shutil.rmtree(out, ignore_errors=True)
    whole = "slide" in WAYS[way]
    batch, microbatches = (2, 2) if whole else (2 * TILES, 4)
    command = [sys.executable, "-m", "app.train", "--slides", str(slides), "--out", str(out), *COMMON, *WAYS[way]]
    command += ["--batch", str(batch), "--microbatches", str(microbatches), "--steps", str(steps), "--seed", str(seed)]
    subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--slides", type=int, default=40, help="how many, half of them held out")
    parser.add_argument("--steps", type=int, default=60, help="of every run")
    parser.add_argument("--seeds", type=int, default=5, help="runs of every way: of weights, order and split")
    asked = parser.parse_args()
    slides = OUT / "slides"
    make_slides(slides, asked.slides)
    rows = []
    for way in WAYS:
        runs = [measure(slides, way, seed, asked.steps) for seed in range(asked.seeds)]
        aucs = [run["metrics"]["slide_auc"] for run in runs]
        each = ", ".join("-" if auc is None else f"{auc:.2f}" for auc in aucs)
        mean = statistics.mean(auc for auc in aucs if auc is not None) if any(auc is not None for auc in aucs) else 0.0
        seconds = statistics.median(run["wall_s"] for run in runs)
        rows.append([way, f"{mean:.2f}", each, f"{seconds:.0f}"])
        print(*rows[-1], sep="  ", flush=True)
    text = markdown_table(["trained with", "slide AUC, mean", "each seed", "s a run"], rows)
    print(text)
    if asked.write:
        write_results(README, results("python -m benchmarks.bags.run --write", text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
