"""Bytes of a training step on one bag of N tiles: as ``--bag`` computes it, and with all tiles in one microbatch.

python -m benchmarks.bags.memory [--sizes 4 16 64] [--write]
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from benchmarks.bags.run import MODEL, OUT, README, run_forked
from benchmarks.bags.slides import make_noise_slides
from benchmarks.results import markdown_table, parser_of, results, write_results

PX, TILES_OF_MICROBATCH, STEPS, MIB = 128, 4, 2, 2**20
COMMON = ("--model", MODEL, "--tile", str(PX), "--parallel", "single", "--min-tissue", "0", "--slide-mpp", "0.5")
COMMON += ("--augment", "none", "--validation", "0.5", "--steps", str(STEPS), "--validate-every=100000")


def measure(slides: Path, size: int, microbatches: int) -> dict[str, Any]:
    """Return the summary of a run on bags of ``size`` tiles, one a step."""
    out = OUT / "memory"
    shutil.rmtree(out, ignore_errors=True)
    arguments = ["--slides", str(slides), "--out", str(out), *COMMON]
    run_forked([*arguments, "--bag", str(size), "--batch", str(size), "--microbatches", str(microbatches)], out)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--sizes", type=int, nargs="+", default=[4, 16, 64], help="tiles of a bag")
    arguments = parser.parse_args()
    slides = OUT / "memory_slides"
    make_noise_slides(slides, 4, PX)
    rows = []
    for size in arguments.sizes:
        small, one = (measure(slides, size, count) for count in (size // TILES_OF_MICROBATCH, 1))
        rows.append([str(size), *(f"{run['device_bytes'][0] / MIB:.2f}" for run in (small, one))])
        print(*rows[-1], sep="  ", flush=True)
    text = markdown_table(["tiles of a bag", "MiB, microbatches of 4 tiles", "MiB, the bag in one microbatch"], rows)
    print(text)
    if arguments.write:
        write_results(README, results("python -m benchmarks.bags.memory --write", text), "memory")
    return 0


if __name__ == "__main__":
    sys.exit(main())
