"""``make demo``: the main job on the shipped real slides and a few synthetic ones, on a CPU, in minutes.

Trains the same classifier in one process, on two data-parallel ranks and split over two ranks with GEMS-MASTER, then a
U-Net on real annotated tissue, and prints scores, images per second and where the reports are. Everything it makes is
under ``demo-data/``.
"""

from __future__ import annotations

import argparse
import csv
import json
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

REAL_SLIDES = {
    # slide: (label, patient); the three files of the CMU slide hold the same pixels and must stay on one side.
    "CMU-1-Small-Region.svs": ("brightfield", "CMU-1"),
    "cmu-small_pyramid_jpeg.tif": ("brightfield", "CMU-1"),
    "cmu-small.ome.tif": ("brightfield", "CMU-1"),
    "test3-DAPI-2-387.ndpi": ("fluorescence", "test3-DAPI"),
    "test3-TRITC-2-560.ndpi": ("fluorescence", "test3-TRITC"),
}
SYNTHETIC_SLIDES = 3


@dataclass(frozen=True)
class Run:
    """One training run of the demo."""

    title: str
    name: str
    arguments: tuple[str, ...]


def command(module: str, *arguments: str) -> None:
    """Run one of the project's commands, showing it first as a user would type it."""
    print(f"\n$ python -m {module} {' '.join(arguments)}", flush=True)
    subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, check=True)


def collect_slides(data: Path) -> Path:
    """A folder of real and synthetic slides with ``labels.csv``; real ones are linked, not copied."""
    slides = data / "slides"
    shutil.rmtree(slides, ignore_errors=True)
    command("app.synth", str(slides), "--slides", str(SYNTHETIC_SLIDES), "--size", "4096", "--task", "classify")
    rows = []
    for name, (label, patient) in REAL_SLIDES.items():
        (slides / name).symlink_to(ROOT / "data" / "real" / name)
        rows.append((name, label, patient))
    synthetic = sorted(path.stem for path in slides.glob("*.tif") if not path.is_symlink())
    rows += [(name, "brightfield", name) for name in synthetic]
    with (slides / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label", "patient"), *rows])
    return slides


def runs(slides: Path, steps: int) -> list[Run]:
    classify = ("--slides", str(slides), "--config", "configs/demo_classify.yaml", "--steps", str(steps))
    segment = ("--slides", "data/nuclei/images", "--annotations", "data/nuclei/masks")
    return [
        Run("brightfield or fluorescence, 1 process", "classify-1", classify),
        Run("brightfield or fluorescence, 2 ranks as planned", "classify-2", (*classify, "--ranks", "2")),
        Run(
            "brightfield or fluorescence, MASTER on 2 ranks",
            "classify-master",
            (*classify, "--ranks", "2", "--parallel", "master"),
        ),
        Run(
            "nuclei in real tissue, U-Net",
            "segment-1",
            (*segment, "--config", "configs/demo_segment.yaml", "--steps", str(3 * steps)),
        ),
    ]


def table(finished: list[tuple[Run, dict[str, object]]]) -> str:
    """Scores and speed of the finished runs, aligned."""
    lines = [("run", "score", "images/s", "waiting", "tiles", "wall")]
    for run, summary in finished:
        metrics = summary["metrics"]
        name = "slide_auc" if summary["task"] == "classify" else "dice"
        lines.append(
            (
                run.title,
                f"{name} {number(metrics[name])}",
                number(summary["images_per_second"]),
                f"{100 * summary['data_wait_fraction']:.1f} %",
                str(summary["images"]),
                f"{summary['wall_s']:.0f} s",
            )
        )
    widths = [max(len(line[k]) for line in lines) for k in range(len(lines[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def number(value: object) -> str:
    return f"{value:.2f}" if isinstance(value, float) else "-"


def main() -> None:
    parser = argparse.ArgumentParser(description="Train on the shipped slides and print scores and images/s.")
    parser.add_argument("--steps", type=int, default=10, help="optimiser steps of the classifiers (default: 10)")
    arguments = parser.parse_args()
    data = ROOT / "demo-data"
    slides = collect_slides(data)
    finished = []
    for run in runs(slides, arguments.steps):
        out = data / run.name
        shutil.rmtree(out, ignore_errors=True)
        command("app.train", *run.arguments, "--out", str(out))
        finished.append((run, json.loads((out / "summary.json").read_text())))
    print("\n" + table(finished))
    for run, _ in finished:
        print(f"report: {(data / run.name / 'report.html').relative_to(ROOT)}")


if __name__ == "__main__":
    main()
