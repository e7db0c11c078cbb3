"""The curves of a run: loss, validation scores, throughput, time of a step, learning rate.

Takes the columns of ``metrics.csv`` and ``validation.csv``; returns one figure for each that has values. A run of a
single step, without validation or with undefined scores, gives what it can.
"""

from __future__ import annotations

import numpy as np

from app.pages.charts import Chart, Series, Values, line_chart
from app.pages.run_files import Columns

SCORES = {
    "slide_auc": "Slide AUC",
    "slide_balanced_accuracy": "Slide balanced accuracy",
    "tile_auc": "Tile AUC",
    "tile_balanced_accuracy": "Tile balanced accuracy",
    "dice": "Dice",
    "loss": "Validation loss",
}
"""Scores by their key, the most telling first."""

SMOOTH_FRACTION = 0.05
"""Part of the run over which a noisy curve is averaged for its strong line."""

SETTLING_STEPS = 2
"""First steps that the speed curves leave out, as the speed figures do: they would hide all later ones."""


def curves(metrics: Columns, validation: Columns, pictures: bool = False) -> list[Chart]:
    """Return the charts that ``metrics.csv`` and ``validation.csv`` have values for; ``pictures``: see `score_name`."""
    charts = []
    if _has(metrics, "step", "loss"):
        drawn = _smoothed("training", metrics["step"], metrics["loss"], 0)
        if _has(validation, "step", "loss"):
            drawn.append(Series("validation", validation["step"], validation["loss"], 1, "dots"))
        charts.append(line_chart(drawn, title="Loss", y_label="per tile", mark="min"))
    scores = [key for key in validation if key not in ("step", "loss") and np.isfinite(validation[key]).any()]
    scores = [key for key in scores if not (pictures and key.startswith("tile_"))]
    if scores:
        drawn = [
            Series(score_name(key, pictures), validation["step"], validation[key], i, "dots")
            for i, key in enumerate(scores)
        ]
        drawn.append(drawn.pop(next((i for i, key in enumerate(scores) if key in ("slide_auc", "dice")), 0)))
        charts.append(line_chart(drawn, title="Validation scores", y_label="0 to 1", mark="max", from_zero=True))
    settled = {name: v[SETTLING_STEPS:] if len(v) > SETTLING_STEPS else v for name, v in metrics.items()}
    if _has(settled, "step", "images_per_second"):
        drawn = _smoothed("images/s", settled["step"], settled["images_per_second"], 2)
        charts.append(line_chart(drawn, title="Throughput", y_label="images/s", from_zero=True))
    if _has(settled, "step", "step_s", "data_wait_s"):
        drawn = [
            Series("whole step", settled["step"], settled["step_s"], 0),
            Series("of it waiting for data", settled["step"], settled["data_wait_s"], 1),
        ]
        charts.append(line_chart(drawn, title="Time of a step", y_label="seconds", from_zero=True))
    if _has(metrics, "step", "lr"):
        drawn = [Series("learning rate", metrics["step"], metrics["lr"], 3)]
        charts.append(line_chart(drawn, title="Learning rate", y_label="per step", mark="max", from_zero=True))
    return charts


def _smoothed(name: str, step: Values, value: Values, colour: int) -> list[Series]:
    """A noisy curve: each step faint, the mean of its neighbours strong. Of a short run, the steps alone."""
    window = round(len(value) * SMOOTH_FRACTION)
    if window < 2:
        return [Series(name, step, value, colour)]
    known = np.isfinite(value)
    sums, counts = (np.convolve(v, np.ones(window), "same") for v in (np.where(known, value, 0.0), known * 1.0))
    mean = np.where(known, sums / np.maximum(counts, 1), np.nan)
    return [
        Series(f"{name}, each step", step, value, colour, "faint"),
        Series(f"{name}, mean of {window} steps", step, mean, colour),
    ]


def _has(columns: Columns, *names: str) -> bool:
    return all(name in columns and len(columns[name]) > 0 for name in names)


def score_name(key: str, pictures: bool = False) -> str:
    """Return the name of the score ``key``; ``pictures``: of whole pictures, each of which is one tile, no slide."""
    if pictures and key in SCORES:
        return SCORES[key].replace("Slide", "Picture").replace("Tile", "Picture")
    return SCORES.get(key, f"Dice {key.removeprefix('dice_')}" if key.startswith("dice_") else key.replace("_", " "))
