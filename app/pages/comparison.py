"""Several runs beside each other: one self-contained HTML page made from their folders.

Takes folders of ``app.train``; gives what tells them apart, in settings and environment, their figures in one table,
and their curves of loss and scores over each other. What all runs share is left to the report of each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from app.pages.charts import Series, Values, format_value, line_chart
from app.pages.curves import SETTLING_STEPS, SMOOTH_FRACTION, rolling_mean, score_name
from app.pages.html import document, flattened, format_setting, save, section, table
from app.pages.run_files import Columns, RunFiles, read_run

MOST = 12
"""Runs that six colours, solid and dashed, tell apart."""

COLOURS = 6

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

STYLE = """
.compared th:first-child { min-width: 130px; } .compared td, .compared thead th { overflow-wrap: anywhere;
  min-width: 96px; white-space: normal; font-variant-numeric: tabular-nums; }
"""


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
    """The page."""
    charts = "".join(_curves(runs, names))
    parts = [
        f'<header><h1>{len(runs)} runs compared</h1><p class="soft">Of what all of them share, each run\'s own report '
        "tells.</p></header>",
        section("Settings that differ", _beside(names, _differing([run.config for run in runs], ("out", "resume")))),
        section("Figures", _beside(names, _figures(runs))),
        section("Curves", f'<div class="grid charts">{charts}</div>' if charts else ""),
        section("Environment that differs", _beside(names, _differing([run.environment for run in runs], ()))),
    ]
    return document("Runs compared · MegaTile", "\n".join(part for part in parts if part), STYLE)


def _beside(names: Sequence[str], rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    made = table(("", *names), [(name, *cells) for name, cells in rows])
    return made.replace('<div class="table">', '<div class="table compared">', 1)


def _figures(runs: Sequence[RunFiles]) -> list[tuple[str, Sequence[str]]]:
    rows = [(name, [_told(key, run.summary.get(key)) for run in runs]) for key, name in FIGURES.items()]
    scores = dict.fromkeys(key for run in runs for key in run.summary.get("metrics") or {})
    for key in scores:
        found = [(run.summary.get("metrics") or {}).get(key) for run in runs]
        rows.append((score_name(key), [_told("", value) for value in found]))
    best = [run.summary.get("best") or {} for run in runs]
    rows.append(("Best checkpoint, at step", [_told("", one.get("step")) for one in best]))
    return [(name, cells) for name, cells in rows if any(cell != "–" for cell in cells)]


def _told(key: str, value: Any) -> str:
    if isinstance(value, int) and not isinstance(value, bool) and not key.endswith("_bytes"):
        return format_value(value)
    return format_setting("bubble_fraction" if key == "bubble" else key, value)


def _differing(values: Sequence[Mapping[str, Any]], ignored: Sequence[str]) -> list[tuple[str, Sequence[str]]]:
    """Rows of those values that are not the same in all runs; a value that a run does not have is a dash."""
    flat = [dict(flattened(one)) for one in values]
    names = dict.fromkeys(name for one in flat for name in one if name not in ignored)
    rows = [(name, [one.get(name, "–") for one in flat]) for name in names]
    return [(name, cells) for name, cells in rows if len(set(cells)) > 1]


def _curves(runs: Sequence[RunFiles], names: Sequence[str]) -> list[str]:
    """Loss, each score, and speed; only those that any run has."""
    scores = dict.fromkeys(key for run in runs for key in run.validation if key != "step")
    charts = [
        _chart(runs, names, "Training loss", f"per tile, {SMOOTHED}", lambda run: run.metrics, "loss"),
        *(_chart(runs, names, score_name(key), "validation", lambda run: run.validation, key) for key in scores),
        _chart(runs, names, "Throughput", f"images/s, {SMOOTHED}", _settled, "images_per_second", from_zero=True),
    ]
    return [chart for chart in charts if chart]


def _chart(
    runs: Sequence[RunFiles],
    names: Sequence[str],
    title: str,
    unit: str,
    columns: Callable[[RunFiles], Columns],
    key: str,
    *,
    from_zero: bool = False,
) -> str:
    series = []
    for number, (run, name) in enumerate(zip(runs, names, strict=True)):
        found = columns(run)
        if "step" in found and key in found and np.isfinite(found[key]).any():
            series.append(_series(name, found["step"], found[key], number))
    return line_chart(series, title=title, y_label=unit, from_zero=from_zero) if series else ""


def _series(name: str, step: Values, value: Values, number: int) -> Series:
    """Values that there are, joined: a validation stands every so many steps. Of many, the mean of each with its
    neighbours: noise of several runs over each other cannot be read."""
    known = np.isfinite(value)
    return Series(
        name, step[known], rolling_mean(value[known])[0], number % COLOURS, "line" if number < COLOURS else "dashed"
    )


def _settled(run: RunFiles) -> Columns:
    """Speed without the first steps, which would hide all later ones."""
    return {name: v[SETTLING_STEPS:] if len(v) > SETTLING_STEPS else v for name, v in run.metrics.items()}
