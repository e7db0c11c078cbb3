"""Show MegaTile on the shipped real slides and a few synthetic ones, on a CPU, in minutes (``make demo``).

1. Nuclei in real tissue: a U-Net, with predicted masks.
2. Images per second of data parallelism, and a plan for another machine.
3. A memory limit: plain training and ddp run out; recomputation, a spatial team and boxes train the same tile.
4. Context: classes that only a larger tile can distinguish.

All output is in ``demo-data/``.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

ROOT = Path(__file__).resolve().parents[1]

REAL_SLIDES = {
    # slide: (label, patient); the three files of the CMU slide have the same pixels and must stay in one split.
    "CMU-1-Small-Region.svs": ("brightfield", "CMU-1"),
    "cmu-small_pyramid_jpeg.tif": ("brightfield", "CMU-1"),
    "cmu-small.ome.tif": ("brightfield", "CMU-1"),
    "test3-DAPI-2-387.ndpi": ("fluorescence", "test3-DAPI"),
    "test3-TRITC-2-560.ndpi": ("fluorescence", "test3-TRITC"),
}
SYNTHETIC_SLIDES = 3
LIMIT = "480MiB"
PLAN = ("--model", "resnet50", "--tile", "2048", "--ranks", "4", "--device-spec", "v100-16gb")


@dataclass(frozen=True)
class Run:
    """One training run of the demo.

    Attributes:
        stops: it must run out of memory.
    """

    title: str
    name: str
    arguments: tuple[str, ...]
    stops: bool = False


def command(module: str, *arguments: str, stops: bool = False) -> None:
    """Print one of the project's commands as a user would type it, and run it."""
    print(f"\n$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=not stops)


def check_memory_ran_out(run: Run, out: Path) -> None:
    """Exit with the reason if the run in the folder ``out`` ended otherwise."""
    path = out / "summary.json"
    error = json.loads(path.read_text())["error"] if path.exists() else "it ended before the first step"
    if "out of memory" not in (error or ""):
        sys.exit(f"{run.title}: it was expected to run out of memory: {error or 'it did not'}")


def collect_slides(data: Path) -> Path:
    """Make a folder of real and synthetic slides with ``labels.csv``; real ones are linked, not copied."""
    slides = data / "slides"
    shutil.rmtree(slides, ignore_errors=True)
    command("app.synth", str(slides), "--slides", str(SYNTHETIC_SLIDES), "--size", "4096", "--task", "classify")
    rows = []
    for name, (label, patient) in REAL_SLIDES.items():
        (slides / name).symlink_to(ROOT / "data" / "real" / name)
        rows.append((name, label, patient))
    synthetic = sorted(path.stem for path in slides.glob("*.tif") if not path.is_symlink())
    rows += [(name, "brightfield", name) for name in synthetic]
    write_labels(slides, rows)
    return slides


def draw_borders(data: Path, count: int = 40, side: int = 256) -> Path:
    """Draw a folder of pictures with one tissue, or with two (pink and violet) and a border between them.

    A tile of 64 px shows one tissue, which both classes have; only a larger tile shows whether there are two.
    """
    folder, rng, rows = data / "borders", np.random.default_rng(0), []
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tissues = np.array([[205, 130, 165], [120, 80, 160]])
    for number in range(count):
        kinds = np.full((side, side), number // 2 % 2)
        if number % 2:
            kinds[:, side // 2 :] = 1 - kinds[0, 0]
        pixels = tissues[kinds] + rng.normal(0, 12, (side, side, 3))
        name = f"{number:02d}"
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{name}.png")
        rows.append((name, ("one tissue", "border")[number % 2], name))
    write_labels(folder, rows)
    return folder


def write_labels(folder: Path, rows: list[tuple[str, str, str]]) -> None:
    with (folder / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "patient"), *rows])


def runs(slides: Path, borders: Path, steps: int) -> Iterator[Run]:
    nuclei = ("--slides", "data/nuclei/images", "--annotations", "data/nuclei/masks")
    nuclei += ("--config", "configs/demo_segment.yaml", "--steps", str(3 * steps))
    yield Run("nuclei in real tissue, U-Net", "nuclei", nuclei)

    classify = ("--slides", str(slides), "--config", "configs/demo_classify.yaml", "--steps", str(steps))
    yield Run("512 px, 2 ranks, ddp", "ddp", (*classify, "--ranks", "2", "--parallel", "ddp"))

    large = ("--slides", str(slides), "--config", "configs/demo_large.yaml", "--memory", LIMIT)
    two = ("--ranks", "2", "--parallel")
    yield Run(f"1024 px in {LIMIT}, 1 process", "large-single", (*large, "--parallel", "single"), stops=True)
    yield Run(f"1024 px in {LIMIT}, ddp", "large-ddp", (*large, *two, "ddp"), stops=True)
    master = (*large, *two, "master", "--recompute", "block")
    yield Run(f"1024 px in {LIMIT}, MASTER, recompute", "large-master", master)
    spatial = (*large, *two, "spatial", "--recompute", "block")
    yield Run(f"1024 px in {LIMIT}, spatial, recompute", "large-spatial", spatial)
    yield Run(f"1024 px in {LIMIT}, boxes", "large-boxes", (*large, "--parallel", "single", "--stream", "512"))

    context = ("--slides", str(borders), "--config", "configs/demo_context.yaml")
    yield Run("border or one tissue, 64 px tiles", "context-64", (*context, "--tile", "64"))
    yield Run("border or one tissue, 256 px tiles", "context-256", (*context, "--tile", "256", "--batch", "4"))


def table(finished: list[tuple[Run, dict[str, Any] | None]]) -> str:
    """Return an aligned table of scores, speed and bytes of the runs."""
    lines = [("run", "score", "images/s", "MiB a rank", "wall")]
    for run, summary in finished:
        if summary is None:
            lines.append((run.title, "out of memory", "-", "-", "-"))
            continue
        metrics = summary["metrics"]
        name = "slide_auc" if summary["task"] == "classify" else "dice"
        score = f"{name} {number(metrics.get(name))}"
        speed = number(summary["images_per_second"])
        lines.append((run.title, score, speed, mebibytes(summary["device_bytes"]), f"{summary['wall_s']:.0f} s"))
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"


def mebibytes(of_ranks: list[int | None]) -> str:
    return " ".join("-" if size is None else str(round(size / (1 << 20))) for size in of_ranks)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train on the shipped slides and print scores and images/s.")
    parser.add_argument("--steps", type=int, default=5, help="optimiser steps of the first runs (default: 5)")
    parser.add_argument("--out", type=Path, default=ROOT / "demo-data", help="folder of all output")
    arguments = parser.parse_args(argv)
    data = arguments.out.absolute()
    slides, borders = collect_slides(data), draw_borders(data)
    finished: list[tuple[Run, dict[str, Any] | None]] = []
    for run in runs(slides, borders, arguments.steps):
        out = data / run.name
        shutil.rmtree(out, ignore_errors=True)
        command("app.train", *run.arguments, "--out", str(out), stops=run.stops)
        if run.stops:
            check_memory_ran_out(run, out)
        finished.append((run, None if run.stops else json.loads((out / "summary.json").read_text())))
    command("app.plan", *PLAN)
    print("\n" + table(finished))
    print("\nTwo ranks share the cores of one process here: splitting saves memory, but no time.")
    for run, summary in finished:
        if summary is not None:
            print(f"report: {os.path.relpath(data / run.name / 'report.html')}")


if __name__ == "__main__":
    main()
