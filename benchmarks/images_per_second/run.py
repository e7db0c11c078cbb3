"""Images per second of ResNet-50 and U-Net over tile sizes, by strategy, beside data-parallel baselines.

    python -m benchmarks.images_per_second.run [--models resnet50 unet] [--tiles 512 1024 2048] [--ranks 1 2 4]
        [--strategies NAME ...] [--steps N] [--repeats N] [--write]

Runs ``app.bench`` for each model and tile size; what was measured before is kept. Leaves, for each model, a report over
all tile sizes in ``bench-data/images_per_second``. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.benchmark.page import write_page
from app.benchmark.row import compare
from app.settings.fields import bytes_of
from benchmarks.images_per_second.torch_pipelines import measured
from benchmarks.results import markdown_table, parser_of, publish, results
from demo.run import collect_slides
from parallel.units import bytes_text

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "images_per_second"
MEMORY, BATCH = "2GiB", 4
CORES = os.cpu_count() or 1
WHOLE = ("single", "single+recompute", "single+recompute+offload", "ddp", "ddp+recompute", "fsdp")
SPLIT = ("gpipe", "1f1b", "master", "master+recompute", "master+recompute+offload", "bidirectional")
THEIRS = {"torch-gpipe": "gpipe", "torch-1f1b": "1f1b"}
"""Pipelines of torch.distributed.pipelining, fed from memory, and the schedule of ours with the same order."""
ON_MORE = ("ddp", "1f1b", "master", "master+recompute+offload", "bidirectional", "torch-1f1b")
"""On more ranks than there are cores: the baseline and the schedules."""
LENGTH = {512: (5, 2, 3), 1024: (4, 0, 2), 2048: (3, 0, 1)}
"""By tile side: steps, steps from memory, runs. A step of the largest tiles takes minutes."""
LONGEST_S = "900"
"""Of one run: more, and it counts as failed."""
HEADER = (
    *("model", "px", "ranks", "strategy", "images/s", "range", "from memory", "Mpx/s", "data wait"),
    *("bubble", "sent", "fullest rank", "claim"),
)
THEIR_HEADER = ("model", "px", "ranks", "strategy", "images/s from memory", "ours", "ours / theirs", "fullest rank")


def slides_for(model: str) -> list[str]:
    """Arguments that name the slides."""
    if model != "unet":
        folder = OUT / "classify"
        if not (folder / "slides" / "labels.csv").exists():
            _label(collect_slides(folder))
        return ["--slides", str(folder / "slides")]
    folder = OUT / "segment"
    synth = [sys.executable, "-m", "app.synth", str(folder), "--slides", "4", "--size", "4096", "--task", "segment"]
    subprocess.run(synth, cwd=ROOT, check=True)
    return ["--slides", str(folder), "--annotations", str(folder / "annotations")]


def _label(slides: Path) -> None:
    """Tell real slides from synthetic ones: both are there at every tile size."""
    names = [path.name for path in sorted(slides.iterdir()) if path.suffix not in (".csv", ".json")]
    rows = [(name, "synthetic" if name.startswith("slide_") else "real") for name in names]
    with (slides / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label"), *rows])


def measure(model: str, tile: int, asked: argparse.Namespace) -> None:
    """Ours and torch's pipelines, on ranks up to the number of cores, and on more."""
    steps, twin_steps, repeats = LENGTH.get(tile, LENGTH[2048])
    steps, repeats = asked.steps or steps, asked.repeats or repeats
    for name, ranks, default in (
        (f"{tile}", [n for n in asked.ranks if n <= CORES], (*WHOLE, *SPLIT, *THEIRS)),
        (f"{tile}-more", [n for n in asked.ranks if n > CORES], ON_MORE),
    ):
        strategies = asked.strategies or default
        ours = [strategy for strategy in strategies if strategy not in THEIRS]
        if ranks and ours:
            measure_ours(model, tile, name, ranks, ours, (steps, twin_steps, repeats))
        for theirs, n in itertools.product((name for name in strategies if name in THEIRS), ranks):
            kept = OUT / model / f"{theirs}-{tile}-{n}.json"
            if n > 1 and not kept.exists():
                row = measured(THEIRS[theirs], model, tile, BATCH, n, steps, bytes_of(MEMORY) or 0)
                kept.parent.mkdir(parents=True, exist_ok=True)
                kept.write_text(json.dumps(row, indent=2) + "\n")


def measure_ours(
    model: str, tile: int, name: str, ranks: list[int], strategies: list[str], length: tuple[int, int, int]
) -> None:
    """One ``app.bench``, into the folder ``name``; ``length`` as in ``LENGTH``."""
    steps, twin_steps, repeats = map(str, length)
    command = [
        *(sys.executable, "-m", "app.bench", *slides_for(model), "--model", model, "--tiles", str(tile)),
        *("--ranks", *map(str, ranks), "--batch", str(BATCH), "--microbatches", str(BATCH), "--memory", MEMORY),
        *("--strategies", *strategies, "--min-tissue", "0.1", "--steps", steps, "--repeats", repeats, "--resume"),
        *(f"--twin-steps={twin_steps}", f"--trial-timeout-s={LONGEST_S}"),
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


def line(row: Mapping[str, Any]) -> tuple[str, ...]:
    name = (row["model"], str(row["tile_px"]), str(row["ranks"]), row["strategy"])
    if row["status"] != "ok":
        told = row["reason"].splitlines()[0] if row["status"] in ("cannot", "killed") else row["claim"]
        return (*name, *[""] * (len(HEADER) - len(name) - 1), told)
    low, high = row["images_per_second_range"]
    fed = row["images_per_second_no_data"]
    return (
        *name,
        f"{row['images_per_second']:.3g}",
        f"{low:.3g}-{high:.3g}",
        "" if fed is None else f"{fed:.3g}",
        f"{row['pixels_per_second'] / 1e6:.3g}",
        f"{row['data_wait_fraction']:.1%}",
        "" if row["bubble"] is None else f"{row['bubble']:.0%} ({row['bubble_predicted']:.0%})",
        bytes_text(max(row["bytes_sent"])) if row["bytes_sent"] else "",
        bytes_text(max(row["device_bytes"])),
        row["claim"],
    )


def their_lines(model: str, rows: Sequence[Mapping[str, Any]]) -> Iterator[tuple[str, ...]]:
    """Torch's pipelines beside what ours of the same order did from memory.

    Args:
        rows: of ours, of all models.
    """
    speeds = {
        (row["tile_px"], row["ranks"], row["strategy"]): row["images_per_second_no_data"]
        for row in rows
        if row["model"] == model
    }
    for path in sorted((OUT / model).glob("torch-*.json")):
        row = json.loads(path.read_text())
        name = (model, str(row["tile_px"]), str(row["ranks"]), row["strategy"])
        if "reason" in row:
            yield (*name, "", "", "", row["reason"])
            continue
        theirs, ours = row["images_per_second_no_data"], speeds.get((row["tile_px"], row["ranks"], row["schedule"]))
        beside = ("", "") if ours is None else (f"{ours:.3g}", f"{ours / theirs:.2f}")
        yield (*name, f"{theirs:.3g}", *beside, bytes_text(max(row["device_bytes"])))


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
    theirs = [each for model in ("resnet50", "unet") for each in their_lines(model, rows)]
    minutes = sum(whole["wall_s"] for whole in found) / 60
    text = results(
        "python -m benchmarks.images_per_second.run --write",
        markdown_table(HEADER, map(line, rows)),
        *([markdown_table(THEIR_HEADER, theirs)] if theirs else []),
        f"{BATCH} tiles a step, {MEMORY} a rank. All runs together: {minutes:.0f} min.\n",
    )
    publish(__file__, text, asked.write)


if __name__ == "__main__":
    main()
