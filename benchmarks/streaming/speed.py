"""Seconds per px of a tile computed box by box, beside the plain step at 1,024 px.

Takes nothing; with ``--write`` gives ``results/speed.json`` beside it and the table of the README, in which models of
other calls stay. Both compute one tile of random px, forward and backward, in alternating rounds in one process, so
that a busy machine slows them alike; figures are of processor time, one thread; the ratio is the median of the rounds',
with the range.

    python -m benchmarks.streaming.speed [--tile 1024] [--boxes 256 512] [--rounds 5] [--only NAME ...] [--write]
"""

from __future__ import annotations

import copy
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.in_boxes import streamed
from benchmarks.machine import measured_on
from benchmarks.results import markdown_table, parser_of, results, write_results
from models.registry import build_model

OUT = Path(__file__).with_name("results")
README = Path(__file__).with_name("README.md")
COMMAND = "python -m benchmarks.streaming.speed --write"

MODELS = ("resnet18", "resnet50", "unet")
ASKED = 1.45


def seconds(module: nn.Module, images: torch.Tensor) -> float:
    """Return the processor seconds of one forward and backward pass."""
    module.zero_grad()
    start = time.process_time()
    module(images).mean().backward()
    return time.process_time() - start


def measure(model: str, tile: int, boxes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each box side: all sides and the plain step take turns."""
    torch.manual_seed(0)
    plain = build_model(model, classes=2, norm="frozen").train()
    images = torch.randn(1, 3, tile, tile)
    ways = {0: plain} | {box: streamed(copy.deepcopy(plain), box, (1, 3, tile, tile)) for box in boxes}
    took: dict[int, list[float]] = {box: [] for box in ways}
    for k in range(rounds + 1):
        for box in sorted(ways, reverse=bool(k % 2)):
            spent = seconds(ways[box], images)
            if k:  # the first round warms up
                took[box].append(spent)
    rows = []
    for box in boxes:
        ratios = [ours / theirs for ours, theirs in zip(took[box], took[0], strict=True)]
        row = {"model": model, "tile_px": tile, "box_px": box, "rounds": rounds, "ratio": statistics.median(ratios)}
        row |= {"lowest": min(ratios), "highest": max(ratios)}
        row |= {"plain_s_per_mpx": statistics.median(took[0]) / tile**2 * 1e6}
        row |= {"streamed_s_per_mpx": statistics.median(took[box]) / tile**2 * 1e6}
        rows.append(row)
        print(
            f"{model:10} {tile} px, boxes {box}: {row['ratio']:.2f} ({row['lowest']:.2f}-{row['highest']:.2f})",
            flush=True,
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each model and box side."""
    lines = [
        [
            row["model"],
            f"{row['tile_px']:,}",
            str(row["box_px"]),
            f"{row['plain_s_per_mpx']:.1f}",
            f"{row['streamed_s_per_mpx']:.1f}",
            f"**{row['ratio']:.2f}** ({row['lowest']:.2f}-{row['highest']:.2f})",
        ]
        for row in rows
    ]
    header = ["model, frozen norm", "tile px", "boxes px", "plain, s per Mpx", "in boxes, s per Mpx", "ratio (range)"]
    return markdown_table(header, lines)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of(__doc__, writes=False)
    parser.add_argument("--tile", type=int, default=1024, help="px")
    parser.add_argument("--boxes", type=int, nargs="+", default=[256, 512], help="px")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--only", nargs="+", default=MODELS, metavar="NAME", help="as for --model")
    parser.add_argument("--write", action="store_true", help="into the README, beside what is there of other models")
    asked = parser.parse_args(argv)
    torch.set_flush_denormal(True)  # as app.train does
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if asked.write and (OUT / "speed.json").exists():
        earlier = json.loads((OUT / "speed.json").read_text())["rows"]
        rows = [row for row in earlier if row["model"] not in asked.only]
    for model in asked.only:
        rows += measure(model, asked.tile, asked.boxes, asked.rounds)
        rows.sort(key=lambda row: (row["model"], row["box_px"]))
        if asked.write:
            OUT.mkdir(exist_ok=True)
            (OUT / "speed.json").write_text(json.dumps({"environment": measured_on(), "rows": rows}, indent=1) + "\n")
            write_results(README, results(COMMAND, table(rows)), "speed")
    print(table(rows))
    best = {row["model"]: min(each["ratio"] for each in rows if each["model"] == row["model"]) for row in rows}
    met = all(ratio <= ASKED for ratio in best.values())
    print(f"asked: at most {ASKED} at the better box side:", "met" if met else "NOT met")
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
