"""What a whole slide shows that no tile of it does: held-out slide AUC where the class is a relation over 6,000 px.

Takes nothing (slides are made); gives ``bench-data/slide_context/result.json`` and ``.md``. The same network is trained
by ``app.train`` on windows of 1,024 and of 4,096 level-0 px, whose scores are averaged for each slide, and on whole
slides: as many steps, and as many px in each. A third of the slides is held out and looked at once, after the last
step.

    python -m benchmarks.tile_size.context [--slides 96] [--steps 240] [--seeds 3]
"""

from __future__ import annotations

import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import cv2

from benchmarks.machine import measured_on
from benchmarks.results import parser_of
from benchmarks.tile_size.context_slides import make_slides

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "slide_context"

MPP, SHRUNK = 8, 16
"""um/px that windows are read at; level-0 px for each of theirs."""

WINDOWS = {
    "1,024 px": ("--tile", str(1024 // SHRUNK)),
    "4,096 px": ("--tile", str(4096 // SHRUNK), "--stride", str(2048 // SHRUNK)),
    "whole slide": ("--tile", "slide"),
}
"""How slides are cut, by what a window shows of level 0."""

BATCH, MICROBATCHES = {"1,024 px": 256, "4,096 px": 16, "whole slide": 8}, 8
"""Windows of a step: 1.05 million px of each, at 8 um/px."""

COMMON = ["--model", "benchmarks.tile_size.context_model:JoiningResNet", "--parallel", "single"]
COMMON += ["--lr", "0.003", "--warmup", "20", "--weight-decay", "0.01", "--validation", "0.33"]
COMMON += ["--stain-jitter=0", "--brightness=0"]
COMMON += ["--validate-every=1000000", "--twin-steps=0"]

LEAST_WHOLE, MOST_TILES = 0.90, 0.70
"""What is asked: of the mean over seeds."""


def make_index(out: Path, cut: tuple[str, ...]) -> None:
    """Find the tissue of all slides, once for all seeds."""
    if not (out / "done").exists():
        command = [sys.executable, "-m", "app.index", "--slides", str(OUT / "slides"), "--mpp", str(MPP), *cut]
        subprocess.run([*command, "--out", str(out), "--workers", "1"], cwd=ROOT, check=True)
        (out / "done").touch()


def train(out: Path, index: Path, *arguments: str) -> dict[str, Any]:
    """The summary of one run of ``app.train``; one that an earlier call finished is kept, as its slides are."""
    summary = out / "summary.json"
    if not _completed(summary):
        shutil.rmtree(out, ignore_errors=True)
        shutil.copytree(index, out, ignore=shutil.ignore_patterns("done", "*.log", "*.lock"))
        slides = str(OUT / "slides")
        command = [sys.executable, "-m", "app.train", "--slides", slides, "--out", str(out), *COMMON, *arguments]
        subprocess.run(command, cwd=ROOT, check=True)
        if not _completed(summary):  # app.train exits with 0 when it is asked to stop
            raise SystemExit(f"{out} was interrupted; run the same command again")
    loaded: dict[str, Any] = json.loads(summary.read_text())
    return loaded


def _completed(summary: Path) -> bool:
    return summary.exists() and json.loads(summary.read_text())["status"] == "completed"


def measure(window: str, seed: int, slides: int, steps: int) -> dict[str, Any]:
    """Held-out scores of one window and seed."""
    name, cut = f"{window.split(' ')[0].replace(',', '')}_of{slides}", WINDOWS[window]
    make_index(OUT / f"index_{name}", cut)
    more = [*cut, "--mpp", str(MPP), "--batch", str(BATCH[window]), "--microbatches", str(MICROBATCHES)]
    more += ["--steps", str(steps), "--seed", str(seed)]
    result = train(OUT / f"{name}_seed{seed}_steps{steps}", OUT / f"index_{name}", *more)
    sides = result["tile_sides_px"] or [[result["tile_px"]] * 2] * 3
    return {
        "window": window,
        "seed": seed,
        "slide_auc": result["metrics"]["slide_auc"],
        "tile_auc": result["metrics"]["tile_auc"],
        "final_loss": result["final_loss"],
        "tiles": result["images"],
        "sides_px": sides,
        "megapixels": result["images"] * result["pixels_per_second"] / result["images_per_second"] / 1e6,
        "wall_s": result["wall_s"],
    }


def table(rows: list[dict[str, Any]], slides: int, steps: int) -> str:
    lines = [
        "| window, level-0 px | slide AUC, mean (each seed) | last loss, mean | tiles seen | Mpx seen, at 8 um/px |",
        "|---|---|---|---|---|",
    ]
    for window in WINDOWS:
        own = [row for row in rows if row["window"] == window]
        if own:
            aucs = [row["slide_auc"] for row in own]
            loss = statistics.mean(row["final_loss"] for row in own)
            lines.append(
                f"| {window} | **{statistics.mean(aucs):.2f}** ({', '.join(f'{auc:.2f}' for auc in aucs)}) | "
                f"{loss:.3f} | {own[0]['tiles']:,} | {own[0]['megapixels']:.0f} |"
            )
    return "\n".join([*lines, "", f"{slides} slides, {steps} steps of each. {measured_on()}."])


def main() -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--slides", type=int, default=96, help="how many, a third of them held out")
    parser.add_argument("--steps", type=int, default=240, help="of every run")
    parser.add_argument("--seeds", type=int, default=3, help="runs of every window: of weights, order and split")
    asked = parser.parse_args()
    cv2.setNumThreads(1)
    make_slides(OUT / "slides", asked.slides)
    rows: list[dict[str, Any]] = []
    for seed in range(asked.seeds):
        for window in reversed(WINDOWS):
            rows.append(measure(window, seed, asked.slides, asked.steps))
            text = table(rows, asked.slides, asked.steps)
            written = {"rows": rows, "slides": asked.slides, "steps": asked.steps, "environment": measured_on()}
            (OUT / "result.json").write_text(json.dumps(written, indent=2) + "\n")
            (OUT / "result.md").write_text(text + "\n")
    print(text)
    means = {w: statistics.mean(row["slide_auc"] for row in rows if row["window"] == w) for w in WINDOWS}
    met = (
        means["whole slide"] >= LEAST_WHOLE and max(auc for w, auc in means.items() if w != "whole slide") <= MOST_TILES
    )
    print(
        f"asked: AUC at least {LEAST_WHOLE} of whole slides, at most {MOST_TILES} of tiles:",
        "met" if met else "NOT met",
    )
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
