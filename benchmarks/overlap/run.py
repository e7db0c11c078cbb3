"""Levels of what overlaps with computation, alone and together, on small and large models: images/s round by round.

    python -m benchmarks.overlap.run [--cases CASE ...] [--rounds 5] [--exhaustive] [--tables] [--write]

Draws class folders of pictures shaped as CIFAR's (32 px) or ImageNet's (500 x 375 px), and measures every window once a
round in an order of the round, on two ranks. Rows are appended to
``bench-data/overlap/rows.jsonl``; the tables are made from the file. Wants an otherwise idle machine.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np

from benchmarks.overlap.findings import (
    CHECKPOINT_COLUMNS,
    COMBINATION_COLUMNS,
    HYPOTHESIS_COLUMNS,
    LEVEL_COLUMNS,
    MIN_ROUNDS,
    Rounds,
    answer,
    checkpoint_rows,
    combination_rows,
    hypothesis_rows,
    level_rows,
)
from benchmarks.overlap.settings import CASES, EXHAUSTIVE_WINDOWS, MACHINES, ON, Case, Window, windows_of
from benchmarks.overlap.tune import TUNED_COLUMNS, tuned_rows
from benchmarks.ranks import run_on_ranks
from benchmarks.results import OUT, markdown_table, parser_of, publish, results

FOLDER, ROWS = OUT / "overlap", "rows.jsonl"
RANKS, CLASSES, PER_CLASS, LONGEST_S = 2, 8, 48, 6 * 3600.0


def read_rows(out: Path = FOLDER) -> list[dict[str, Any]]:
    """Return the rows measured so far."""
    rows = out / ROWS
    return [json.loads(line) for line in rows.read_text().splitlines()] if rows.exists() else []


def draw_pictures(root: Path, px: int) -> None:
    """Draw a folder of pictures for each class: stripes of its own width under smooth noise, as PNG of 32 px, or JPEG
    of ImageNet's mean size."""
    numbers = np.random.default_rng(0)
    width, height = (32, 32) if px == 32 else (500, 375)
    for c, k in itertools.product(range(CLASSES), range(PER_CLASS)):
        folder = root / f"class_{c}"
        folder.mkdir(parents=True, exist_ok=True)
        stripes = 60 * np.sin(np.arange(width) * (c + 1) / 8 + k)[None, :, None]
        noise = cv2.resize(numbers.normal(128, 50, (height // 4, width // 4, 3)), (width, height))
        pixels = np.clip(stripes + noise, 0, 255).astype(np.uint8)
        cv2.imwrite(str(folder / f"{k}.{'png' if px == 32 else 'jpg'}"), pixels)


def measure(case: Case, windows: list[Window], rounds: int, out: Path) -> None:
    """Measure ``windows`` of a case and append their rows to the file in ``out``."""
    folder = out / case.name
    if not (folder / "pictures").exists():
        draw_pictures(folder / "pictures", case.px)
    # The tables compare rows of the same round: rounds of another run have other numbers.
    first = 1 + max((row["round"] for row in read_rows(out) if row["case"] == case.name), default=-1)
    argument = {
        "case": case,
        "windows": [dataclasses.astuple(window) for window in windows],
        "rounds": [first, first + rounds],
        "folder": str(folder),
        "rows": str(out / ROWS),
    }
    run_on_ranks(RANKS, "benchmarks.overlap.measure:measure", argument, timeout_s=LONGEST_S)


def tables(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the paragraphs and tables of what was measured."""
    rounds = Rounds.of(rows)
    yield f"{answer(rounds)}\n"
    if hypothesis := list(hypothesis_rows(rounds)):
        yield markdown_table(HYPOTHESIS_COLUMNS, hypothesis)
    for case in rounds.cases:
        parts: list[tuple[str, tuple[str, ...], Iterator[tuple[str, ...]]]] = []
        for machine in MACHINES:
            parts += [
                (f"{machine}: levels", LEVEL_COLUMNS, level_rows(rounds, case, machine)),
                (
                    f"{machine}: checkpoints",
                    CHECKPOINT_COLUMNS,
                    checkpoint_rows(rounds, case, machine),
                ),
            ]
        parts += [
            ("combinations", COMBINATION_COLUMNS, combination_rows(rounds, case)),
            ("knobs set by tune.py", TUNED_COLUMNS, tuned_rows(rounds, case)),
        ]
        for title, columns, cells in parts:
            if body := list(cells):
                yield f"### {case}, {title}\n\n{markdown_table(columns, body)}"


def about(rows: list[dict[str, Any]]) -> str:
    """Return what was measured, a line for each case."""
    lines = []
    for name in dict.fromkeys(row["case"] for row in rows):
        own = [row for row in rows if row["case"] == name]
        on = ", ".join(dict.fromkeys(row["measured_on"] for row in own))
        lines.append(f"- {name}, batch {CASES[name].batch}: {len({row['round'] for row in own})} rounds; {on}")
    return "\n".join([*lines, "\nTwo ranks of one thread over Gloo, AdamW, float32.\n"])


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=["resnet18@32", "resnet18@224"])
    parser.add_argument("--machines", nargs="+", choices=MACHINES, help="default: all for 32 px, two for 224 px")
    parser.add_argument("--knobs", nargs="+", choices=ON, default=[*ON])
    parser.add_argument("--rounds", type=int, default=MIN_ROUNDS)
    parser.add_argument("--exhaustive", action="store_true", help="all combinations of levels, no core to spare")
    parser.add_argument("--tables", action="store_true", help="make the tables of what was measured, measure nothing")
    parser.add_argument("--quick", action="store_true", help="one round of a few windows: does it run?")
    asked = parser.parse_args()
    if asked.quick:
        asked.cases, asked.machines, asked.knobs, asked.rounds = ["resnet18@32"], [MACHINES[2]], ["prefetch"], 1
    measured = {}
    for case in map(CASES.__getitem__, () if asked.tables else asked.cases):
        windows = EXHAUSTIVE_WINDOWS if asked.exhaustive else windows_of(asked.machines or case.machines, asked.knobs)
        measured[case] = [*windows]
    for case, windows in measured.items():
        print(f"{case.name}: {len(windows)} windows, {asked.rounds} rounds", flush=True)
    with tempfile.TemporaryDirectory() as quick:
        out = Path(quick) if asked.quick else FOLDER
        out.mkdir(parents=True, exist_ok=True)
        for case, windows in measured.items():
            measure(case, windows, asked.rounds, out)
        rows = read_rows(out)
    text = results(about(rows), *tables(rows))
    publish(__file__, text, asked.write)


if __name__ == "__main__":
    main()
