"""Measure held-out slide AUC over tile size, on slides whose class is an arrangement of glands.

Takes a study; slides are made. ``rows``: the class is in how rows of glands are spaced over 1,536 px. ``bands``: the
same over 3,072 px. ``rooms``: the class is a relation of two places 6,000 px apart. Studies of ResNet-18 also have bags
of tiles and whole slides. Every window is trained by ``app.train`` with as many steps and px in each; a part of the
slides is held out and looked at once, after the last step. Runs that an earlier call finished are kept (remove
``bench-data/tile_size`` to start anew). Exit code 1 if a target was missed.

    python -m benchmarks.tile_size.run [rows] [--slides N] [--steps N] [--seeds N] [--windows NAME ...] [--write]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kept_runs import completed, train
from benchmarks.results import OUT, finish, markdown_table, measured_on, parser_of, publish, results, write_json
from benchmarks.tile_size import context_slides, row_slides

FOLDER = OUT / "tile_size"
SIDE = 4096
"""Px of the slides of ``rows``."""


@dataclass(frozen=True)
class Study:
    """Slides, and windows that a network is trained on.

    Attributes:
        make: writes so many slides into a folder.
        windows: name -> its own settings of ``app.train``.
        common: settings of all windows.
        asked: name of a window -> (least, most) mean slide AUC.
    """

    make: Callable[[Path, int], object]
    windows: dict[str, tuple[str, ...]]
    common: tuple[str, ...]
    asked: dict[str, tuple[float, float]]
    slides: int = 96
    steps: int = 300
    seeds: int = 3


def _rows(tile: int) -> tuple[str, ...]:
    """Return settings of 16 tiles a step; large ones overlap, so that no size runs out of them."""
    return ("--tile", str(tile), "--stride", str(min(tile, 512)), "--microbatches", str(max(1, tile // 512)))


def _resnet18(make: Callable[[Path, int], object], bag: int) -> Study:
    """Return a study of ResNet-18 with its usual stem at 8 um/px: 0.26 million px in each step, all normed together.

    Args:
        bag: tiles of 1,024 level-0 px that a slide has. Whole slides are computed, and normed, one by one.
    """
    windows: dict[str, tuple[str, ...]] = {}
    for tile in (16, 32, 64, 128, 256):
        stride, batch = min(tile, 128), 4 * (256 // tile) ** 2
        windows[f"{16 * tile:,} px"] = ("--tile", str(tile), "--stride", str(stride), "--batch", str(batch))
    windows["bag"] = ("--tile", "64", "--batch", "64", "--bag", str(bag))
    windows["whole slide"] = ("--tile", "slide", "--batch", str(64 // bag), "--microbatches", str(64 // bag))
    common = ("--model", "resnet18", "--parallel", "single", "--mpp", "8", "--lr", "0.001", "--warmup", "20")
    common += ("--validation", "0.4", "--stain-jitter=0", "--brightness=0")
    return Study(make, windows, (*COMMON, *common), {}, steps=100, seeds=5)


COMMON = ("--validate-every=1000000", "--twin-steps=0", "--weight-decay", "0.01")
STUDIES = {
    "rows": Study(
        lambda folder, count: row_slides.make_slides(folder, count, SIDE),
        {f"{tile:,} px": _rows(tile) for tile in (256, 512, 1024, 2048)},
        (
            *COMMON, "--model", "benchmarks.tile_size.model:coarse", "--batch", "16", "--lr", "0.002", "--warmup", "30",
            "--min-tissue", "0.75", "--validation", "0.4", "--validation-tiles=16",
        ),
        {"256 px": (0.0, 0.70), "1,024 px": (0.90, 1.0), "2,048 px": (0.90, 1.0)},
    ),
    "rooms": Study(
        context_slides.make_slides,
        {
            # Px at 8 um/px, a sixteenth of those of level 0: 1.05 million of each step.
            "1,024 px": ("--tile", "64", "--batch", "256"),
            "4,096 px": ("--tile", "256", "--stride", "128", "--batch", "16"),
            "whole slide": ("--tile", "slide", "--batch", "8"),
        },
        (
            *COMMON, "--model", "benchmarks.tile_size.model:joining", "--parallel", "single", "--microbatches", "8",
            "--mpp", "8", "--lr", "0.003", "--warmup", "20", "--validation", "0.33",
            "--stain-jitter=0", "--brightness=0",
        ),
        {"1,024 px": (0.0, 0.70), "4,096 px": (0.0, 0.70), "whole slide": (0.90, 1.0)},
        steps=240,
    ),
    "rows-resnet18": _resnet18(partial(row_slides.make_slides, side=SIDE), 16),
    "bands-resnet18": _resnet18(partial(row_slides.make_slides, side=SIDE, arrangements=row_slides.BANDS), 16),
    "rooms-resnet18": _resnet18(context_slides.make_slides, 32),
}  # fmt: skip


def measure(name: str, windows: Sequence[str], slides: int, steps: int, seeds: int) -> Iterator[dict[str, Any]]:
    """Yield the held-out scores of each seed and window; a seed is of weights, order and split.

    Args:
        windows: to train; others are yielded where an earlier call finished them.
    """
    study, folder = STUDIES[name], FOLDER / f"{name.removesuffix('-resnet18')}_of{slides}"
    study.make(folder, slides)
    for seed in range(seeds):
        for window in study.windows:
            run = FOLDER / f"{name}_of{slides}_{window.replace(' ', '_').replace(',', '')}_seed{seed}_steps{steps}"
            if window not in windows and not completed(run):
                continue
            more = (*study.common, *study.windows[window], "--steps", str(steps), "--seed", str(seed))
            summary = train(folder, run, *more)
            scores = {key: summary["metrics"].get(key) for key in ("slide_auc", "tile_auc")}  # bags have none of tiles
            kept = {key: summary[key] for key in ("strategy", "final_loss", "images", "wall_s")}
            yield {"window": window, "seed": seed, **scores, **kept}


def table(rows: Sequence[dict[str, Any]], about: str) -> str:
    """Return a line for each window."""
    lines = []
    for window in dict.fromkeys(row["window"] for row in rows):
        own = [row for row in rows if row["window"] == window]
        slide_auc, loss, wall_s = (
            statistics.mean(row[key] for row in own) for key in ("slide_auc", "final_loss", "wall_s")
        )
        tiles = [row["tile_auc"] for row in own if row["tile_auc"] is not None]
        each = ", ".join(f"{row['slide_auc']:.2f}" for row in own)
        of_tiles = f"{statistics.mean(tiles):.2f}" if tiles else ""
        figures = (own[0]["strategy"], of_tiles, f"{loss:.3f}", f"{own[0]['images']:,}", f"{wall_s / 60:.1f}")
        lines.append((window, f"**{slide_auc:.2f}** ({each})", *figures))
    header = (
        "window, px",
        "slide AUC, mean (each seed)",
        "strategy",
        "tile AUC",
        "last loss",
        "tiles seen",
        "min a run",
    )
    return f"{about}\n\n{markdown_table(header, lines)}"


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("study", nargs="?", choices=STUDIES, default="rows")
    parser.add_argument("--slides", type=int, help="how many; default: 96")
    parser.add_argument("--steps", type=int, help="of every run; default: of rows 300, of rooms 240, of ResNet-18 100")
    parser.add_argument("--seeds", type=int, help="runs of every window; default: 3, of ResNet-18 5")
    parser.add_argument("--windows", nargs="+", metavar="NAME", help="of the study, such as '256 px'; default: all")
    asked = parser.parse_args()
    study = STUDIES[asked.study]
    slides, steps, seeds = asked.slides or study.slides, asked.steps or study.steps, asked.seeds or study.seeds
    windows = asked.windows or list(study.windows)
    if unknown := [window for window in windows if window not in study.windows]:
        parser.error(f"--windows of {asked.study} are {', '.join(map(repr, study.windows))}; got {unknown[0]!r}")
    rows = []
    for row in measure(asked.study, windows, slides, steps, seeds):
        rows.append(row)
        write_json(f"tile_size_{asked.study}", {"rows": rows, "environment": measured_on()})
    text = results(table(rows, f"{slides} slides, {steps} steps."))
    publish(__file__, text, asked.write, asked.study)
    means = {w: statistics.mean(row["slide_auc"] for row in rows if row["window"] == w) for w in windows}
    bounds = {window: study.asked[window] for window in windows if window in study.asked}
    finish(
        f"{window}: slide AUC {means[window]:.2f}, asked {least} to {most}"
        for window, (least, most) in bounds.items()
        if not least <= means[window] <= most
    )


if __name__ == "__main__":
    main()
