"""Which of the settings that run something beside the computation help, which help together, and which fight.

    python -m benchmarks.overlap.run [--models resnet18] [--repeats 2] [--steps 12] [--knobs NAME ...] [--write]

Runs ``app.bench --sweep`` on real slides, on two data-parallel ranks; what was measured before is kept. Leaves reports
in ``bench-data/overlap``. Wants an otherwise idle machine.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.results import markdown_table, results, write_results
from demo.run import collect_slides

ROOT = Path(__file__).parents[2]
OUT = ROOT / "bench-data" / "overlap"
README = Path(__file__).with_name("README.md")
RANKS, TILE, BATCH, EVERY = 2, 512, 8, 5
HEADER = ("on", "images/s", "range", "x nothing on", "x best of them alone", "verdict")


def measure(model: str, repeats: int, steps: int, knobs: list[str]) -> dict[str, Any]:
    """What ``app.bench`` found of ``model``."""
    if not (OUT / "slides" / "labels.csv").exists():
        collect_slides(OUT)
    out = OUT / model
    command = [
        *(sys.executable, "-m", "app.bench", "--slides", str(OUT / "slides"), "--model", model),
        *("--tiles", str(TILE), "--ranks", str(RANKS), "--strategies", "ddp", "--batch", str(BATCH)),
        *("--min-tissue", "0.1", "--steps", str(steps), "--twin-steps", "0", "--repeats", str(repeats)),
        *("--checkpoint-every", str(EVERY), "--sweep", *knobs, "--resume", "--out", str(out)),
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    found: dict[str, Any] = json.loads((out / "bench.json").read_text())
    return found


def parts(model: str, found: dict[str, Any]) -> Iterator[str]:
    """A paragraph, a table and the findings of each sweep."""
    for sweep in found["sweeps"]:
        yield (
            f"{model}, {sweep['ranks']} ranks under {sweep['strategy']}, {sweep['tile_px']} px, batch {BATCH}, a "
            f"checkpoint every {EVERY} of {found['settings']['steps']} steps, {found['settings']['repeats']} runs of "
            f"each; {found['wall_s'] / 60:.0f} min.\n"
        )
        yield markdown_table(HEADER, map(line, sweep["rows"]))
        yield "".join(f"- {finding}\n" for finding in sweep["findings"])


def line(row: dict[str, Any]) -> tuple[str, ...]:
    low, high = row["images_per_second_range"] or (None, None)
    return (
        row["label"],
        number(row["images_per_second"]),
        "" if low is None else f"{number(low)}-{number(high)}",
        number(row["times_off"]),
        number(row["times_best_knob"]),
        row["verdict"],
    )


def number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["resnet18"])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--knobs", nargs="*", default=[], help="default: all")
    parser.add_argument("--write", action="store_true", help="write the tables of README.md")
    asked = parser.parse_args()
    found = {model: measure(model, asked.repeats, asked.steps, asked.knobs) for model in asked.models}
    written = [part for model, one in found.items() for part in parts(model, one)]
    text = results("python -m benchmarks.overlap.run --write", *written)
    print(text)
    if asked.write:
        write_results(README, text)


if __name__ == "__main__":
    main()
