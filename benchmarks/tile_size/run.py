"""What a larger tile sees: held-out AUC over tile size on slides whose class is in the arrangement of glands.

Takes nothing (slides are made); gives ``bench-data/tile_size/result.json``, ``.md`` and ``.png``. Every tile size is
trained by ``app.train`` with the same number of steps and of tiles per step; slides of 40% of the patients are held
out and looked at once, after the last step. A U-Net on slides with gland masks follows.

    python -m benchmarks.tile_size.run [--tiles 256 512 1024 2048] [--seeds 3] [--steps 300]
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks.machine import measured_on
from benchmarks.results import parser_of
from benchmarks.tile_size import row_slides
from benchmarks.tile_size.picture import draw_picture

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "tile_size"

CLASSIFY_SLIDES, SEGMENT_SLIDES, SIZE = 96, 12, 4096

MOST_AT_256, LEAST_FROM_1024, LEAST_DICE = 0.70, 0.90, 0.85
"""What is asked."""

COMMON = ["--validate-every=1000000", "--warmup", "30", "--lr", "0.002"]
CLASSIFY = [*COMMON, "--model", "benchmarks.tile_size.model:CoarseResNet", "--batch", "16", "--weight-decay", "0.01"]
CLASSIFY += ["--min-tissue", "0.75", "--validation", "0.4", "--validation-tiles=16"]
SEGMENT = [*COMMON, "--model", "unet_w16", "--batch", "4", "--tile", "512", "--mpp", "1", "--steps", "60"]
SEGMENT += ["--validation", "0.34", "--validation-tiles=4"]


def make_slides() -> tuple[Path, Path]:
    """Slides of both tasks; those of an earlier call are kept (remove ``bench-data/tile_size`` to start anew)."""
    folders = OUT / "classify", OUT / "segment"
    row_slides.make_slides(folders[0], CLASSIFY_SLIDES, SIZE)
    command = [sys.executable, "-m", "app.synth", str(folders[1]), "--slides", str(SEGMENT_SLIDES), "--size", str(SIZE)]
    subprocess.run([*command, "--task", "segment"], cwd=ROOT, check=True)
    return folders


def train(slides: Path, out: Path, *arguments: str) -> dict[str, Any]:
    """The summary of one run of ``app.train``; one that an earlier call finished is kept, as its slides are."""
    if not _completed(out):
        shutil.rmtree(out, ignore_errors=True)
        command = [sys.executable, "-m", "app.train", "--slides", str(slides), "--out", str(out), *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        if not _completed(out):  # app.train exits with 0 when it is asked to stop
            raise SystemExit(f"{out} was interrupted; run the same command again")
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def _completed(out: Path) -> bool:
    summary = out / "summary.json"
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def classify(slides: Path, tile: int, seed: int, steps: int) -> dict[str, Any]:
    """Held-out scores of one tile size and seed. Tiles overlap from 1,024 px on, so that no size runs out of them."""
    stride = min(tile, 512)
    name = f"classify_{tile}_seed{seed}_steps{steps}"
    sizes = ("--tile", str(tile), "--stride", str(stride), "--microbatches", str(max(1, tile // 512)))
    result = train(slides, OUT / name, *CLASSIFY, *sizes, "--steps", str(steps), "--seed", str(seed))
    scores = {key: result["metrics"][key] for key in ("slide_auc", "tile_auc")}
    return {"tile_px": tile, "seed": seed, **scores, "images": result["images"], "wall_s": result["wall_s"]}


def table(rows: list[dict[str, Any]], dice: float, steps: int) -> str:
    lines = ["| tile px | slide AUC, mean (each seed) | tile AUC, mean | minutes per run |", "|---|---|---|---|"]
    for tile in sorted({row["tile_px"] for row in rows}):
        of_size = [row for row in rows if row["tile_px"] == tile]
        slide = [row["slide_auc"] for row in of_size]
        tiles_auc = statistics.mean(row["tile_auc"] for row in of_size)
        each = ", ".join(f"{auc:.2f}" for auc in slide)
        wall_s = statistics.mean(row["wall_s"] for row in of_size)
        lines.append(f"| {tile} | **{statistics.mean(slide):.2f}** ({each}) | {tiles_auc:.2f} | {wall_s / 60:.1f} |")
    lines += [
        "",
        f"U-Net, 512 px tiles at 1 um/px, 60 steps of 4: Dice of gland on held-out slides **{dice:.3f}**.",
        "",
    ]
    return "\n".join([*lines, f"{steps} steps of 16 tiles for every size. {measured_on()}."])


def main() -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--tiles", type=int, nargs="+", default=[256, 512, 1024, 2048], help="px")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every size up to 1024 px; larger ones: one run")
    parser.add_argument("--steps", type=int, default=300, help="of every run")
    asked = parser.parse_args()
    classify_slides, segment_slides = make_slides()
    rows = [
        classify(classify_slides, tile, seed, asked.steps)
        for tile in asked.tiles
        for seed in range(asked.seeds if tile <= 1024 else 1)
    ]
    dice = train(segment_slides, OUT / "segment_unet", *SEGMENT)["metrics"]["dice_gland"]
    (OUT / "result.json").write_text(
        json.dumps({"rows": rows, "dice": dice, "steps": asked.steps, "environment": measured_on()}, indent=2) + "\n"
    )
    text = table(rows, dice, asked.steps)
    (OUT / "result.md").write_text(text + "\n")
    draw_picture(rows, classify_slides, OUT / "result.png")
    print(text)
    met = [dice >= LEAST_DICE]
    met += [row["slide_auc"] <= MOST_AT_256 for row in rows if row["tile_px"] == 256]
    met += [row["slide_auc"] >= LEAST_FROM_1024 for row in rows if row["tile_px"] >= 1024]
    print(f"asked: AUC at most {MOST_AT_256} at 256 px and at least {LEAST_FROM_1024} from 1024 px, Dice {LEAST_DICE}:",
          "met by every run" if all(met) else "NOT met")  # fmt: skip
    return 0 if all(met) else 1


if __name__ == "__main__":
    sys.exit(main())
