"""Images per second of ResNet-50 and U-Net over tile sizes, by strategy, compared with data-parallel baselines.

    python -m benchmarks.images_per_second.run [--models resnet50 unet] [--tiles 512 1024 2048] [--ranks 1 2 4]
        [--strategies NAME ...] [--steps N] [--repeats N] [--write]

Runs ``app.bench`` for each model and tile size; what was measured before is kept. Leaves, for each model, a report over
all tile sizes in ``bench-data/images_per_second``. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from app.benchmark.page import HEADERS, cells, write_page
from app.benchmark.row import compare
from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import ROOT, markdown_table, parser_of, publish, results
from benchmarks.timing import run_app
from demo.run import collect_slides

OUT = BENCH_DATA / "images_per_second"
MEMORY, BATCH = "2GiB", 4
CORES = os.cpu_count() or 1
WHOLE = ("single", "single+recompute", "single+recompute+offload", "ddp", "ddp+recompute", "fsdp")
SPLIT = ("gpipe", "1f1b", "pipedream", "master", "master+recompute", "bidirectional", "spatial", "spatial+recompute")
ON_MORE = ("ddp", "1f1b", "master", "bidirectional", "spatial")
"""On more ranks than there are cores: the baseline and the schedules."""
LENGTH = {512: (5, 3), 1024: (4, 2), 2048: (3, 1)}
"""By tile side: steps, runs. A step of the largest tiles takes minutes."""
LONGEST_S = "900"
"""Of one run: more, and it counts as failed."""
HEADER = ("model", "px", "ranks", *(header for header in HEADERS if header != "from memory"))
"""No step is measured from memory here."""


def slides_for(model: str) -> list[str]:
    """Arguments that name the slides."""
    if model != "unet":
        folder = OUT / "classify"
        if not (folder / "slides" / "labels.csv").exists():
            _label(collect_slides(folder))
        return ["--slides", str(folder / "slides")]
    folder = OUT / "segment"
    run_app("app.synth", str(folder), "--slides", "4", "--size", "4096", "--task", "segment", quiet=False)
    return ["--slides", str(folder), "--annotations", str(folder / "annotations")]


def _label(slides: Path) -> None:
    """Tell real slides from synthetic ones: both are there at every tile size."""
    names = [path.name for path in sorted(slides.iterdir()) if path.suffix not in (".csv", ".json")]
    rows = [(name, "synthetic" if name.startswith("slide_") else "real") for name in names]
    with (slides / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label"), *rows])


def measure(model: str, tile: int, asked: argparse.Namespace) -> None:
    """Run ``app.bench`` on ranks up to the number of cores, and on more."""
    steps, repeats = LENGTH.get(tile, LENGTH[2048])
    steps, repeats = asked.steps or steps, asked.repeats or repeats
    for name, ranks, default in (
        (f"{tile}", [n for n in asked.ranks if n <= CORES], (*WHOLE, *SPLIT)),
        (f"{tile}-more", [n for n in asked.ranks if n > CORES], ON_MORE),
    ):
        if not ranks:
            continue
        command = [
            *(sys.executable, "-m", "app.bench", *slides_for(model), "--model", model, "--tiles", str(tile)),
            *("--ranks", *map(str, ranks), "--batch", str(BATCH), "--microbatches", str(BATCH), "--memory", MEMORY),
            *("--strategies", *(asked.strategies or default), "--min-tissue", "0.1", "--steps", str(steps)),
            *("--repeats", str(repeats), "--resume", "--twin-steps=0", f"--trial-timeout-s={LONGEST_S}"),
            *("--out", str(OUT / model / name)),
        ]
        subprocess.run(command, cwd=ROOT, check=False)  # that nothing fits is a result, too


def joined(model: str) -> dict[str, Any] | None:
    """All tile sizes of ``model`` that were measured, as one benchmark; its page is written."""
    parts = []
    for folder in sorted((OUT / model).glob("[0-9]*"), key=lambda path: (int(path.name.split("-")[0]), path.name)):
        if (folder / "bench.json").exists():
            part = json.loads((folder / "bench.json").read_text())
            for row in part["rows"]:
                row["scaling"] = "strong"  # each file has some of the numbers of ranks; the batch is the same in all
                row["schedule_svg"] = row["schedule_svg"] and f"{folder.name}/{row['schedule_svg']}"
            parts.append(part)
    if not parts:
        return None
    rows = [row for part in parts for row in part["rows"]]
    compare(rows)
    whole = {
        **parts[-1],
        "command": "python -m benchmarks.images_per_second.run",
        "wall_s": sum(part["wall_s"] for part in parts),
        "settings": parts[-1]["settings"] | {"tiles": sorted({row["tile_px"] for row in rows})},
        "rows": rows,
    }
    (OUT / model / "bench.json").write_text(json.dumps(whole, indent=2) + "\n")
    print(write_page(OUT / model))
    return whole


def line(row: Mapping[str, Any]) -> list[str]:
    """Return what stands under ``HEADER``."""
    figures = (cell for header, cell in zip(HEADERS, cells(row), strict=True) if header in HEADER)
    return [row["model"], str(row["tile_px"]), str(row["ranks"]), *figures]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "unet"])
    parser.add_argument("--tiles", type=int, nargs="*", default=[512, 1024, 2048], help="none: only the tables")
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, help="of a run; default: by tile size")
    parser.add_argument("--repeats", type=int, help="runs of each case; default: by tile size")
    asked = parser.parse_args()
    for model in asked.models:
        for tile in asked.tiles:
            measure(model, tile, asked)
    found = [whole for model in ("resnet50", "unet") if (whole := joined(model))]
    rows = [row for whole in found for row in whole["rows"]]
    minutes = sum(whole["wall_s"] for whole in found) / 60
    text = results(
        "python -m benchmarks.images_per_second.run --write",
        markdown_table(HEADER, map(line, rows)),
        f"{BATCH} tiles a step, {MEMORY} a rank. All runs together: {minutes:.0f} min.\n",
    )
    publish(__file__, text, asked.write)


if __name__ == "__main__":
    main()
