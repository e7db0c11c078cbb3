"""Seconds per px of a tile computed box by box, compared with the plain step.

Takes nothing; gives the table of the README. Both compute one tile of random px, forward and backward, in alternating
rounds in one process, so that a busy machine slows them alike; figures are of processor time, one thread; the ratio is
the median of the rounds', with the range. Exit code 1 if a model is slower than asked at its better box side.

    python -m benchmarks.streaming.speed [--tile 1024] [--boxes 256 512] [--rounds 5] [--only NAME ... | --write]
"""

from __future__ import annotations

import copy
import functools
from statistics import median
from typing import Any

import torch
from torch import nn

from benchmarks.in_boxes import streamed
from benchmarks.results import finish, markdown_table, measured_on, parser_of, publish, results, spread, write_json
from benchmarks.timing import in_turns
from models.registry import build_model

MODELS = ("resnet18", "resnet50", "unet")
ASKED = 1.25


def step(module: nn.Module, images: torch.Tensor) -> None:
    """Compute a forward and a backward pass."""
    module.zero_grad()
    module(images).mean().backward()


def measure(model: str, tile: int, boxes: list[int], rounds: int) -> list[dict[str, Any]]:
    """Return a row for each box side: all sides and the plain step take turns."""
    torch.manual_seed(0)
    plain = build_model(model, classes=2, norm="frozen").train()
    images = torch.randn(1, 3, tile, tile)
    modules = {"plain": plain} | {str(box): streamed(copy.deepcopy(plain), box, (1, 3, tile, tile)) for box in boxes}
    taken = in_turns({way: functools.partial(step, module, images) for way, module in modules.items()}, rounds)
    took = {way: [each.cpu for each in of_way] for way, of_way in taken.items()}
    return [
        {
            "model": model,
            "tile_px": tile,
            "box_px": box,
            "ratios": [ours / theirs for ours, theirs in zip(took[str(box)], took["plain"], strict=True)],
            "plain_s_per_mpx": median(took["plain"]) / tile**2 * 1e6,
            "streamed_s_per_mpx": median(took[str(box)]) / tile**2 * 1e6,
        }
        for box in boxes
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """Return a line for each model and box side."""
    header = ["model, frozen norm", "tile px", "boxes px", "plain, s per Mpx", "in boxes, s per Mpx", "ratio (range)"]
    return markdown_table(
        header,
        (
            [
                row["model"],
                f"{row['tile_px']:,}",
                str(row["box_px"]),
                *(f"{row[way]:.1f}" for way in ("plain_s_per_mpx", "streamed_s_per_mpx")),
                spread(row["ratios"]),
            ]
            for row in rows
        ),
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tile", type=int, default=1024, help="px")
    parser.add_argument("--boxes", type=int, nargs="+", default=[256, 512], help="px")
    parser.add_argument("--rounds", type=int, default=5, help="after one to warm up")
    parser.add_argument("--only", nargs="+", default=MODELS, metavar="NAME", help="as for --model")
    asked = parser.parse_args()
    if asked.write and asked.only is not MODELS:
        parser.error("--write replaces the whole table: leave out --only")
    torch.set_flush_denormal(True)  # as app.train does
    torch.set_num_threads(1)
    rows = [row for model in asked.only for row in measure(model, asked.tile, asked.boxes, asked.rounds)]
    write_json("streaming_speed", {"rows": rows, "environment": measured_on()})
    publish(__file__, results(table(rows)), asked.write, "speed")
    best = {model: min(median(row["ratios"]) for row in rows if row["model"] == model) for model in asked.only}
    finish(f"{model}: {ratio:.2f}x the plain step, asked {ASKED}" for model, ratio in best.items() if ratio > ASKED)


if __name__ == "__main__":
    main()
