"""A run folder as ``app.train`` leaves it, with numbers made up by a formula."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import yaml

CLASSES = ("normal", "tumour <3>")
"""The second one would break a page that does not escape it."""

METRICS = ("step", "epoch", "images", "loss", "lr", "step_s", "data_wait_s", "images_per_second")
VALIDATION = ("step", "loss", "tile_auc", "slide_auc", "slide_balanced_accuracy", "tile_balanced_accuracy", "dice")


def write_run(run: Path, *, steps: int = 30, validations: int = 3, pictures: int = 2) -> Path:
    """A finished classification run with all its files."""
    (run / "tissue").mkdir(parents=True)
    (run / "config.yaml").write_text(yaml.safe_dump({"slides": "slides", "model": "resnet18", "out": "runs/demo"}))
    (run / "env.json").write_text(json.dumps({"python": "3.11.7", "packages": {"torch": "2.15.0"}, "gpus": []}))
    (run / "run.log").write_text("one line\nthe last line of the log\n")
    (run / "failed_slides.csv").write_text('slide,step,error\nbroken-7,open,"cut short, at 50 %"\n')
    steps_done = range(1, steps + 1)
    write_csv(run / "metrics.csv", METRICS, [[s, s / 10, 8 * s, 1 / s, 1e-3, 0.5, 0.01, 16] for s in steps_done])
    rows = [[steps * (i + 1) // validations, 0.5, 0.7 + i / 10, "", 0.75, 0.7, ""] for i in range(validations)]
    write_csv(run / "validation.csv", VALIDATION, rows)
    scores = [f"score_{name}" for name in CLASSES]
    write_csv(
        run / "predictions.csv",
        ("slide", "split", "label", "prediction", *scores, "tiles"),
        [
            ("slide-a", "val", CLASSES[0], CLASSES[0], 0.9, 0.1, 12),
            ("slide-b", "val", CLASSES[1], CLASSES[0], 0.6, 0.4, 7),
            ("slide-c", "val", CLASSES[1], CLASSES[1], 0.2, 0.8, 9),
        ],
    )
    splits = [(f"s{i}", f"p{i // 2}", i % 2, "val" if i < 2 else "train") for i in range(10)]
    write_csv(run / "splits.csv", ("slide", "patient", "label", "split"), splits)
    for i in range(pictures):
        cv2.imwrite(str(run / "tissue" / f"slide-{i:02d}.png"), np.full((900, 700, 3), 40 + i, np.uint8))
    write_summary(run)
    return run


def write_summary(run: Path, **changed: Any) -> None:
    summary = {
        "status": "completed",
        "task": "classify",
        "model": "resnet18",
        "strategy": "ddp",
        "ranks": 2,
        "global_batch": 8,
        "microbatches": 2,
        "tile_px": 1024,
        "mpp": 0.5,
        "steps": 30,
        "images": 240,
        "images_per_second": 15.87,
        "images_per_second_no_data": 16.02,
        "pixels_per_second": 16640901.0,
        "data_wait_fraction": 0.0123,
        "peak_memory_bytes": [3 << 30, 2 << 30],
        "final_loss": 0.0333,
        "metrics": {"loss": 0.5, "tile_auc": 0.9123, "slide_auc": None},
        "best": {"step": 20, "metric": "tile_auc", "value": 0.9456},
        "classes": list(CLASSES),
        "checkpoint": "checkpoints/best.pt",
        "error": None,
        "wall_s": 4000.0,
    }
    (run / "summary.json").write_text(json.dumps(summary | changed))


def write_csv(path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    with path.open("w", newline="") as file:
        csv.writer(file).writerows([columns, *rows])


def add_examples(run: Path) -> None:
    """Tiles of the last validation: a wrong one, a right one and one with masks."""
    (run / "examples").mkdir()
    examples = []
    for number, (truth, prediction) in enumerate([CLASSES, CLASSES[:1] * 2, (None, None)]):
        picture = np.full((192, 588 if truth is None else 192, 3), 90 + 40 * number, np.uint8)
        cv2.imwrite(str(run / "examples" / f"{number}.jpg"), picture)
        place = {"slide": f"slide-{number}", "l0_x": 512 * number, "l0_y": 0}
        said = {"truth": truth, "prediction": prediction, "score": 0.875}
        examples.append({"picture": f"examples/{number}.jpg", **place, **said})
    write_summary(run, examples=examples)
