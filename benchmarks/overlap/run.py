"""Which of the settings that run something beside the computation help, which help together, and which fight.

    python -m benchmarks.overlap.run [--models resnet18] [--repeats 2] [--steps 10] [--knobs NAME ...] [--spare]
        [--write]

Runs ``app.bench --sweep`` on real slides: on as many data-parallel ranks as there are cores, or with ``--spare`` on one
rank of one thread, which leaves the other cores to what runs beside it, as a GPU would. What was measured before is
kept. Leaves reports in ``bench-data/overlap``. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from app.benchmark.sweep import COLUMNS, sweep_cells
from benchmarks.results import markdown_table, results, write_results
from demo.run import collect_slides

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "overlap"
README = Path(__file__).with_name("README.md")
RANKS, TILE, BATCH, EVERY = os.cpu_count() or 1, 512, 8, 5


def measure(model: str, asked: argparse.Namespace) -> dict[str, Any]:
    """What ``app.bench`` found of ``model``."""
    if not (OUT / "slides" / "labels.csv").exists():
        collect_slides(OUT)
    out = OUT / (f"{model}-spare" if asked.spare else model)
    ranks, strategy = ("1", "single") if asked.spare or RANKS == 1 else (str(RANKS), "ddp")
    command = [
        *(sys.executable, "-m", "app.bench", "--slides", str(OUT / "slides"), "--model", model),
        *("--tiles", str(TILE), "--ranks", ranks, "--strategies", strategy, "--batch", str(BATCH)),
        *("--min-tissue", "0.1", "--steps", str(asked.steps), "--twin-steps", "0", "--repeats", str(asked.repeats)),
        *("--checkpoint-every", str(EVERY), "--sweep", *asked.knobs, "--resume", "--out", str(out)),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"} if asked.spare else None
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    found: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return found


def parts(model: str, found: dict[str, Any]) -> Iterator[str]:
    """A paragraph, a table and the findings of each sweep."""
    for sweep in found["sweeps"]:
        yield (
            f"{model}, {ranks_text(sweep)}, {sweep['tile_px']} px, batch {BATCH}, a "
            f"checkpoint every {EVERY} of {found['settings']['steps']} steps, {found['settings']['repeats']} runs of "
            f"each; {found['wall_s'] / 60:.0f} min.\n"
        )
        yield markdown_table(COLUMNS, map(sweep_cells, sweep["rows"]))
        yield "".join(f"- {finding}\n" for finding in sweep["findings"])


def ranks_text(sweep: dict[str, Any]) -> str:
    if sweep["ranks"] == 1:
        return "one rank of one thread"
    return f"{sweep['ranks']} ranks of one thread under {sweep['strategy']}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--knobs", nargs="*", default=[], help="default: all")
    parser.add_argument("--spare", action="store_true", help="one rank of one thread, with the other cores idle")
    parser.add_argument("--write", action="store_true", help="write the tables of README.md")
    asked = parser.parse_args()
    found = {model: measure(model, asked) for model in asked.models}
    written = [part for model, one in found.items() for part in parts(model, one)]
    command = f"python -m benchmarks.overlap.run{' --spare' if asked.spare else ''} --write"
    text = results(command, *written)
    print(text)
    if asked.write:
        write_results(README, text, "spare cores" if asked.spare else "busy cores")


if __name__ == "__main__":
    main()
