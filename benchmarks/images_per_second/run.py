"""Images per second of ResNet-50 and U-Net over tile sizes, by strategy, compared with ways that split nothing.

    python -m benchmarks.images_per_second.run [--models resnet50 unet] [--tiles 512 1024 2048 4096] [--ranks 1 2 4]
        [--strategies NAME ...] [--steps N] [--repeats N] [--write]

Runs ``app.bench`` for each model and tile size: on ranks up to the number of cores, then on more. Keeps what was
measured before. Leaves folders with ``report.html`` in ``bench-data/images_per_second``; ``--write`` replaces only the
tables of what was asked for. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from app.benchmark.page import HEADERS, cells
from app.benchmark.row import speed_beside
from app.launch.host import usable_cores
from benchmarks.results import OUT as BENCH_DATA
from benchmarks.results import ROOT, markdown_table, parser_of, publish, results, spread
from benchmarks.timing import run_app
from demo.run import collect_slides
from parallel.strategy import WHOLE

OUT = BENCH_DATA / "images_per_second"
MEMORY = "2GiB"
WHOLE_MODEL = (
    *("single", "single+recompute", "single+recompute+offload", "single+stream"),
    *("ddp", "ddp+recompute", "fsdp", "async"),
)
SPLIT = ("gpipe", "1f1b", "pipedream", "master", "master+recompute", "bidirectional", "spatial", "spatial+recompute")
ON_MORE = (
    *("single", "single+recompute", "ddp", "ddp+recompute", "fsdp", "async"),
    *("1f1b", "master", "bidirectional", "spatial"),
)
"""On more ranks than there are cores: baselines, schedules also in groups of two ranks, and teams."""
PLANNED = "auto"
LENGTH = {512: (5, 3), 1024: (4, 3)}
"""By tile side: steps, runs. A step of the largest tiles takes minutes."""
USUAL = (3, 1)
TILES_A_STEP = {4096: 2}
"""By tile side, where it is not four."""
LONGEST_S = "3600"
"""Of one run: more, and it counts as failed."""
FIGURES = [header for header in HEADERS if header != "from memory"]
"""No step is measured from memory here."""
BESIDE = "beside the fastest way that computes the whole model"


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
    """Give slides one of two classes in turn: synthetic ones have both, and alone hold tiles of 4,096 px."""
    names = [path.name for path in sorted(slides.iterdir()) if path.suffix not in (".csv", ".json")]
    rows = [(name, ("even", "odd")[k % 2]) for k, name in enumerate(names)]
    with (slides / "labels.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("slide", "label"), *rows])


def measure(model: str, tile: int, ranks: Sequence[int], strategies: Sequence[str], asked: argparse.Namespace) -> Path:
    """Run ``app.bench``; return its folder, which is named after the tile size and the most ranks."""
    (steps, repeats), batch = LENGTH.get(tile, USUAL), str(TILES_A_STEP.get(tile, 4))
    folder = OUT / model / part_of(tile, ranks)
    command = [
        *(sys.executable, "-m", "app.bench", *slides_for(model), "--model", model, "--tiles", str(tile)),
        *("--ranks", *map(str, ranks), "--batch", batch, "--microbatches", batch, "--memory", MEMORY),
        *("--strategies", *strategies, "--min-tissue", "0.1", "--steps", str(asked.steps or steps)),
        *("--repeats", str(asked.repeats or repeats), "--resume", "--twin-steps=0", f"--trial-timeout-s={LONGEST_S}"),
        *("--out", str(folder)),
    ]
    if depths := {2, *ranks} - {1} if max(ranks) > 1 else ():
        command += ["--stages", *map(str, sorted(depths))]
    if subprocess.run(command, cwd=ROOT, check=False).returncode > 1:  # 1: nothing fits, which is a result, too
        sys.exit(f"app.bench does not go on with {folder}")
    return folder


def part_of(tile: int, ranks: Sequence[int]) -> str:
    return f"{tile}" if max(ranks) <= usable_cores() else f"{tile}-more"


def line(row: Mapping[str, Any], best: Mapping[str, Any] | None) -> list[str]:
    """Return the figures of a row, and its speed next to ``best``."""
    figures = [cell for header, cell in zip(HEADERS, cells(row), strict=True) if header in FIGURES]
    if row["status"] != "ok":
        figures[-1] = figures[-1].partition(": ")[0]  # not what to do about it
    beside = "" if best is None or not usable(row) else "the fastest" if row is best else speed_beside(row, best)
    return [str(row["ranks"]), *figures, beside]


def usable(row: Mapping[str, Any]) -> bool:
    """Return whether a row was measured and did the work of the plain step."""
    return row["status"] == "ok" and row["loss_matches"] is not False and not row["delayed"]


def fastest(rows: Iterable[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the fastest row that is usable."""
    return max(filter(usable, rows), key=lambda row: float(row["images_per_second"]), default=None)


def fastest_whole(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """Return the fastest row that computes the whole model on each rank; all ranks share the same cores."""
    return fastest(row for row in rows if row["parallel"] in WHOLE)


def verdict(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return which splits of the model or the tile are faster than all that computes the whole model, the fastest of
    both for each number of ranks, and how fast the plan's choices are."""
    named = [row for row in rows if row["parallel"] != PLANNED]
    splits = [row for row in named if row["parallel"] not in WHOLE]
    best = fastest_whole(rows)
    faster = [row for row in filter(usable, splits) if not best or row["images_per_second"] > best["images_per_second"]]
    lines = [
        f"Splits faster than every way that computes the whole model: {', '.join(map(_name, faster)) or 'none'}.",
        f"Fastest way that computes the whole model: {_speed(best)}. Fastest split: {_speed(fastest(splits))}.",
    ]
    for ranks in sorted({row["ranks"] for row in rows}):
        alike = [row for row in named if row["ranks"] == ranks]
        whole, split = fastest_whole(alike), fastest(row for row in alike if row in splits)
        if whole and split:
            lines.append(f"On {ranks} ranks: {split['strategy']}, {speed_beside(split, whole)}.")
        planned, usual = fastest(row for row in rows if row["ranks"] == ranks and row not in named), fastest(alike)
        if planned and usual:
            lines.append(
                f"The plan's choice with --ranks {ranks}: {planned['chosen']}, {speed_beside(planned, usual)}."
            )
    return "\n".join(f"- {text}" for text in lines) + "\n"


def _name(row: Mapping[str, Any]) -> str:
    return row["strategy"] + (f" on {row['ranks']} ranks" if row["ranks"] > 1 else "")


def _speed(row: Mapping[str, Any] | None) -> str:
    return f"{_name(row)}, {spread(row['images_per_second_repeats'], 3)} images/s" if row else f"none fits in {MEMORY}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", default=["resnet50", "unet"])
    parser.add_argument("--tiles", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--ranks", nargs="+", type=int, default=[1, 2, 4])
    parser.add_argument("--strategies", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, help="of a run; default: by tile size")
    parser.add_argument("--repeats", type=int, help="runs of each case; default: by tile size")
    asked = parser.parse_args()
    few = [n for n in asked.ranks if n <= usable_cores()]
    more = [n for n in asked.ranks if n > usable_cores()]
    parts = [(few, (*WHOLE_MODEL, *SPLIT, PLANNED))] if few else []
    if more:  # with one rank, for the baseline: rows of a table are measured in turns
        parts.append(([1, *more], (*ON_MORE, PLANNED)))
    for model in asked.models:
        for tile in asked.tiles:
            for ranks, strategies in parts:
                folder = measure(model, tile, ranks, asked.strategies or strategies, asked)
                bench = json.loads((folder / "bench.json").read_text())
                rows, best, batch = bench["rows"], fastest_whole(bench["rows"]), bench["settings"]["batch"]
                text = results(
                    verdict(rows),
                    markdown_table(("ranks", *FIGURES, BESIDE), [line(row, best) for row in rows]),
                    f"{batch} tiles a step, {MEMORY} a rank. All runs together: {bench['wall_s'] / 60:.0f} min.\n",
                )
                publish(__file__, text, asked.write, f"{model} {part_of(tile, ranks)}")


if __name__ == "__main__":
    main()
