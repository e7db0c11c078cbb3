"""Several runs beside each other: one self-contained HTML page made from their folders.

Takes folders of ``app.train``; gives what tells them apart, in settings and environment, their figures in one table,
and their curves of loss and scores over each other. What all runs share is left to the report of each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from app.pages.charts import COLOURS, Chart, Series, line_chart
from app.pages.curves import SETTLING_STEPS, SMOOTH_FRACTION, rolling_mean, score_name
from app.pages.html import Table, flattened, format_setting, format_value, rendered, save
from app.pages.run_files import Columns, RunFiles, read_run

MOST = 12
"""Runs that six colours, solid and dashed, tell apart."""

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

SMOOTHED = f"mean of {SMOOTH_FRACTION:.0%} of the steps"


def write_comparison(runs: Sequence[Path], out: Path) -> Path:
    """Write the page that compares ``runs`` to ``out`` and give its path.

    Raises:
        ValueError: fewer than two runs, more than can be told apart, or one of them twice.
        RunError: one of them is no run folder, or a file in it cannot be understood.
        OSError: the page cannot be written.
    """
    if not 2 <= len(runs) <= MOST:
        raise ValueError(f"a comparison takes 2 to {MOST} runs; got {len(runs)}: name fewer, or compare them in parts")
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
        charts=_curves(runs, names),
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


def _curves(runs: Sequence[RunFiles], names: Sequence[str]) -> list[Chart]:
    """Loss, each score, and speed without the first steps, which would hide all later ones; those that any run has."""
    scores = dict.fromkeys(key for run in runs for key in run.validation if key != "step")
    metrics, validations = [run.metrics for run in runs], [run.validation for run in runs]
    settled = [{k: v[SETTLING_STEPS:] if len(v) > SETTLING_STEPS else v for k, v in run.items()} for run in metrics]
    charts = [
        line_chart(_series(metrics, names, "loss"), "Training loss", f"per tile, {SMOOTHED}"),
        *(line_chart(_series(validations, names, key), score_name(key), "validation") for key in scores),
        line_chart(_series(settled, names, "images_per_second"), "Throughput", f"images/s, {SMOOTHED}", from_zero=True),
    ]
    return [chart for chart in charts if chart.series]


def _series(columns: Sequence[Columns], names: Sequence[str], key: str) -> list[Series]:
    """Values that there are, joined: a validation stands every so many steps. Of many, the mean of each with its
    neighbours: noise of several runs over each other cannot be read."""
    series = []
    for number, (run, name) in enumerate(zip(columns, names, strict=True)):
        value = run.get(key, np.array([]))
        known = np.isfinite(value)
        if "step" in run and known.any():
            kind: Literal["line", "dashed"] = "line" if number < COLOURS else "dashed"
            mean, _ = rolling_mean(value[known])
            series.append(Series(name, run["step"][known], mean, number % COLOURS, kind))
    return series
