"""Several runs beside each other: one self-contained HTML page made from their folders.

Takes folders of ``app.train``; gives what tells them apart, in settings and environment, and their figures in one
table. What all runs share is left to the report of each, and their curves over each other to TensorBoard.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from app.pages.curves import score_name
from app.pages.html import Table, flattened, format_setting, format_value, rendered, save
from app.pages.run_files import RunFiles, read_run

FIGURES = {
    "status": "Ended",
    "strategy": "Strategy",
    "ranks": "Ranks",
    "tile_px": "Tile side, px",
    "global_batch": "Tiles per step",
    "steps": "Optimiser steps",
    "images": "Tiles trained on",
    "images_per_second": "Images per second",
    "images_per_second_no_data": "Images per second, fed from memory",
    "data_wait_fraction": "Waiting for data",
    "bubble": "Bubble",
    "peak_memory_bytes": "Peak memory, by rank",
    "device_bytes": "Tensors on the device at most, by rank",
    "final_loss": "Training loss, last step",
    "wall_s": "Duration",
}
"""Figures of ``summary.json`` by their key, in the order shown; scores come after them."""


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares ``runs`` to ``out`` and give its path.

    Raises:
        ValueError: one of them is named twice.
        RunError: one of them is no run folder, or a file in it cannot be understood.
        OSError: the page cannot be written.
    """
    if len({run.resolve() for run in runs}) < len(runs):
        raise ValueError(f"a comparison takes each run once; got {' '.join(map(str, runs))}")
    found = [read_run(run) for run in runs]
    out.parent.mkdir(parents=True, exist_ok=True)
    return save(out, render(found, names_of(runs)))


def names_of(runs: Sequence[Path]) -> list[str]:
    """The shortest ends of the folders' paths that tell all of them apart."""
    whole = [run.resolve().parts for run in runs]
    for length in range(1, max(map(len, whole)) + 1):
        names = ["/".join(parts[-length:]) for parts in whole]
        if len(set(names)) == len(names):
            break
    return names


def render(runs: Sequence[RunFiles], names: Sequence[str]) -> str:
    """Return the page."""
    headers = ("", *names)
    return rendered(
        "comparison.html.j2",
        runs=len(runs),
        settings=Table(headers, _differing([run.config for run in runs], ("out", "resume"))),
        figures=Table(headers, _figures(runs)),
        curves=[f"tensorboard --logdir {shlex.quote(os.path.commonpath([run.folder.resolve() for run in runs]))}"],
        environment=Table(headers, _differing([run.environment for run in runs], ())),
    )


def _figures(runs: Sequence[RunFiles]) -> list[list[str]]:
    rows = [[name, *(_told(key, run.summary.get(key)) for run in runs)] for key, name in FIGURES.items()]
    scores = [run.summary.get("metrics") or {} for run in runs]
    for key in dict.fromkeys(key for run in scores for key in run):
        rows.append([score_name(key), *(_told("", run.get(key)) for run in scores)])
    best = [run.summary.get("best") or {} for run in runs]
    rows.append(["Best checkpoint, at step", *(_told("", run.get("step")) for run in best)])
    return [row for row in rows if any(cell != "–" for cell in row[1:])]


def _told(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not key.endswith("_bytes"):
        return format_value(value)
    return format_setting("bubble_fraction" if key == "bubble" else key, value)


def _differing(values: Sequence[Mapping[str, Any]], ignored: Sequence[str]) -> list[list[str]]:
    """Rows of those values that are not the same in all runs; a value that a run does not have is a dash."""
    flat = [dict(flattened(run)) for run in values]
    names = dict.fromkeys(name for run in flat for name in run if name not in ignored)
    rows = [[name, *(run.get(name, "–") for run in flat)] for name in names]
    return [row for row in rows if len(set(row[1:])) > 1]
