"""Train the models of the GEMS papers on real tissue: ResNet-1001-v2 under MASTER, ResNet-110-v2 to one accuracy.

Tiles of 64 px are cut from ``data/nuclei``; their class says whether nuclei cover a fifth of them. Every rank has one
thread. ResNet-1001-v2 is trained with and without splitting: losses, seconds, planned and counted bytes. ResNet-110-v2
is trained on 1, 2 and 4 ranks: seconds and tiles until ``TARGET``. Next to that, the published hours on V100, and those
that ``simulation.py`` forecasts. What was measured before is kept in ``bench-data/trained.json``.

    python -m benchmarks.weak_scaling.trained [--deep-steps 12] [--steps 32] [--write] [--quick]
"""

from __future__ import annotations

import csv
import os
import shutil
import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from benchmarks.kept_runs import measured, planned_bytes, train
from benchmarks.results import OUT, ROOT, markdown_table, parser_of, publish, results
from benchmarks.weak_scaling.simulation import MORE, simulated
from parallel.memory.policy import ActivationPolicy
from parallel.strategy import Strategy
from parallel.units import bytes_text

TILE, BATCH, M, NEVER = 64, 16, 8, 1_000_000
NUCLEI, SCORE, TARGET = ROOT / "data" / "nuclei", "tile_balanced_accuracy", 0.90
TASK = ("--annotations", str(NUCLEI / "masks"), "--task", "classify", "--tile-label", "0.2", "--slide-mpp", "0.5")
TASK += ("--min-tissue", "0", "--tile", str(TILE), "--batch", str(BATCH), "--microbatches", str(M))
TASK += ("--validation", "0.25", "--lr", "0.001", "--warmup", "5")
RECOMPUTED = ActivationPolicy("block")
DEEP = [
    Strategy("single", 1, 1, M),
    Strategy("single", 1, 1, M, policy=RECOMPUTED),
    Strategy("master", 2, 2, M, policy=RECOMPUTED),
]
"""Ways to train ResNet-1001-v2."""
WIDER = [
    Strategy("single", 1, 1, M),
    Strategy("ddp", 2, 1, M),
    Strategy("master", 2, 2, M),
    Strategy("ddp", 4, 1, M),
    Strategy("master", 4, 2, M),
]
"""Ways to train ResNet-110-v2: groups of two ranks under MASTER, as ``benchmarks.plan_accuracy.run`` times them."""
HOURS, RANKS, PUBLISHED_MINUTES = 7.0, (4, 128), 28
"""Published for ResNet-110-v2 on pathology tiles of 1,024 px: hours on one node of four V100, minutes on 128."""


def run(name: str, model: str, steps: int, every: int, strategy: Strategy) -> dict[str, Any]:
    """Return losses, seconds of each step, (step, score) of validations, planned and counted bytes of one run."""
    out = OUT / name / f"{model}_{strategy}_{steps}".replace(" ", "_")
    way = ("--parallel", strategy.name, "--ranks", str(strategy.ranks), "--recompute", strategy.policy.recompute)
    way += ("--stages", str(strategy.depth)) if strategy.splits else ()
    given = (*TASK, *way, "--model", model, "--steps", str(steps), f"--validate-every={every}")
    summary = train(NUCLEI / "images", out, *given, env={**os.environ, "OMP_NUM_THREADS": "1"})
    with (out / "metrics.csv").open() as steps_file, (out / "validation.csv").open() as scores_file:
        log, scores = list(csv.DictReader(steps_file)), list(csv.DictReader(scores_file))
    return {
        "strategy": str(strategy),
        "losses": [float(row["loss"]) for row in log],
        "step_s": [float(row["step_s"]) for row in log],
        "scores": [(int(row["step"]), float(row[SCORE])) for row in scores if row[SCORE]],
        "planned": planned_bytes(model, TILE, BATCH, strategy),
        "counted": max(summary["device_bytes"]),
    }


def deep_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return losses, seconds and bytes of each way."""
    lines = []
    for row in rows:
        first, last = (statistics.mean(part) for part in (row["losses"][:3], row["losses"][-3:]))
        figures = (f"{first:.3f}", f"{last:.3f}", f"{statistics.median(row['step_s']):.1f}")
        lines.append((row["strategy"], *figures, bytes_text(row["planned"]), bytes_text(row["counted"])))
    header = ("strategy", "loss, first 3 steps", "last 3 steps", "s a step", "fullest rank, planned", "counted")
    return markdown_table(header, lines)


def wider_table(rows: Sequence[dict[str, Any]]) -> str:
    """Return seconds and tiles until ``TARGET`` of each way, at its median step: the first two also count bytes."""
    lines = []
    for row in rows:
        step_s = statistics.median(row["step_s"])
        step = next((step for step, score in row["scores"] if score >= TARGET), None)
        reached = ("not reached", "") if step is None else (f"{step * step_s:.0f}", f"{step * BATCH:,}")
        best = max((score for _, score in row["scores"]), default=0.0)
        lines.append((row["strategy"], f"{step_s:.2f}", *reached, f"{best:.3f}"))
    return markdown_table(("strategy", "s a step", f"s to {TARGET:.2f}", "tiles to it", "best accuracy"), lines)


def hours_table(model: str, tile: int) -> str:
    """Return simulated hours over ranks, for the tiles that mp-basic computes on four ranks in ``HOURS``."""
    curves = [curve for curve in simulated(model, tile, RANKS[1], [RANKS[0]]) if curve.tiles == MORE]
    tiles = HOURS * curves[0].images_per_s[0]
    published = {RANKS[0]: f"{HOURS:.1f}", RANKS[1]: f"{PUBLISHED_MINUTES / 60:.2f}"}
    lines = [("published", *(published.get(ranks, "") for ranks in curves[0].ranks))]
    lines += [(curve.name, *(f"{tiles / speed:.2f}" for speed in curve.images_per_s)) for curve in curves]
    return markdown_table(("hours", *(f"{ranks} ranks" for ranks in curves[0].ranks)), lines)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--deep-steps", type=int, default=12, help="of ResNet-1001-v2")
    parser.add_argument("--steps", type=int, default=32, help="of ResNet-110-v2")
    parser.add_argument("--quick", action="store_true", help="small models, two steps: does it run?")
    asked = parser.parse_args()
    deep, wider, side, name, ways, every = "resnet1001_v2", "resnet110_v2", 1024, "trained", WIDER, 4
    if asked.quick:
        deep, wider, side, name, ways, every = "resnet20_v2", "resnet20_v2", 64, "trained_quick", WIDER[:2], 1
        asked.deep_steps, asked.steps = 2, 1
        shutil.rmtree(OUT / name, ignore_errors=True)
        (OUT / f"{name}.json").unlink(missing_ok=True)
    runs = [(deep, asked.deep_steps, NEVER, way) for way in DEEP] + [(wider, asked.steps, every, way) for way in ways]
    rows = measured(name, {f"{case[0]} {case[3]} {case[1]} steps": partial(run, name, *case) for case in runs})
    text = results(
        f"{deep}, {asked.deep_steps} steps of {BATCH} tiles of {TILE} px in {M} microbatches:\n",
        deep_table(rows[: len(DEEP)]),
        f"{wider}, {asked.steps} steps, validated every {every}:\n",
        wider_table(rows[len(DEEP) :]),
        f"{wider} on tiles of {side:,} px, V100, simulated:\n",
        hours_table(wider, side),
    )
    publish(__file__, text, asked.write, "training")


if __name__ == "__main__":
    main()
