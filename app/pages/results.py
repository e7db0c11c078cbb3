"""The tables of a run's predictions: how each class and each slide came out.

Takes the rows of ``predictions.csv`` (slide, split, tiles; classification: label, prediction, score_<class>;
segmentation: dice_<class>) and of ``splits.csv``; returns tables, without rows where there is nothing to say.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence

from app.pages.html import Table
from app.pages.run_files import Rows
from pipelines.labels.class_names import patient_note

SLIDES_SHOWN = 100
"""Rows of the slide table; the slides that came out worst are first, the rest is in ``predictions.csv``."""

CLASSES_SHOWN = 10
"""With more classes the table of confusions no longer fits a page."""


def class_table(predictions: Rows) -> Table:
    """Return one row per class: slides, and what became of them."""
    dice = _columns(predictions, "dice_")
    if dice:
        values = {name: _numbers(predictions, name) for name in dice}
        rows = [
            (
                name.removeprefix("dice_"),
                str(len(counted)),
                *(f"{f(counted):.3f}" if counted else "–" for f in (statistics.fmean, statistics.median, min, max)),
            )
            for name, counted in values.items()
        ]
        return Table(("class", "slides", "mean Dice", "median", "lowest", "highest"), rows, range(1, 6))
    labelled = [row for row in predictions if row.get("label") and not _unscored(row)]
    classes = sorted({row["label"] for row in labelled} | {row.get("prediction", "") for row in labelled})
    counts = Counter((row["label"], row.get("prediction", "")) for row in labelled)
    shown = classes if len(classes) <= CLASSES_SHOWN else []
    rows = []
    for truth in classes:
        total = sum(counts[truth, other] for other in classes)
        right = counts[truth, truth]
        share = f"{100 * right / total:.0f} %" if total else "–"
        rows.append((truth, str(total), str(right), share, *(str(counts[truth, other]) for other in shown)))
    headers = ("class", "slides", "right", "sensitivity", *(f"said {other}" for other in shown))
    return Table(headers, rows, range(1, len(headers)))


def slide_table(predictions: Rows) -> tuple[Table, list[str]]:
    """Return one row per slide, the worst first, and what is to be said of those left out."""
    dice, scores = _columns(predictions, "dice_"), _columns(predictions, "score_")
    if dice:
        ordered = sorted(predictions, key=lambda row: min(_numbers((row,), *dice), default=2.0))
        headers = ["slide", "split", *(f"Dice {name.removeprefix('dice_')}" for name in dice)]
        rows = [
            [row.get("slide", ""), row.get("split", ""), *(_cell(row.get(name, "")) for name in dice)]
            for row in ordered
        ]
        numeric = range(2, len(headers))
    else:
        ordered = sorted(predictions, key=lambda row: (not _wrong(row), -max(_numbers((row,), *scores), default=0.0)))
        headers = ["slide", "split", "label", "prediction", "", "tiles", *(s.removeprefix("score_") for s in scores)]
        rows = [
            [
                *(row.get(name, "") for name in ("slide", "split", "label", "prediction")),
                ("✗\u00a0wrong" if _wrong(row) else "✓") if row.get("label") and not _unscored(row) else "",
                row.get("tiles", ""),
                *(_cell(row.get(name, "")) for name in scores),
            ]
            for row in ordered
        ]
        numeric = range(5, len(headers))
    unscored = sum(map(_unscored, predictions))
    notes = [f"The {SLIDES_SHOWN} worst of {len(rows)} slides; all are in predictions.csv."]
    notes = notes if len(rows) > SLIDES_SHOWN else []
    notes += [f"{unscored} without a score: no tile could be read, see failed_slides.csv."] if unscored else []
    return Table(headers, rows[:SLIDES_SHOWN], numeric), notes


def split_table(splits: Rows, classes: Sequence[str]) -> tuple[Table, list[str]]:
    """Return slides and patients of each split, its slides of each class where slides have a label, and a note where
    patients are unknown.

    Args:
        splits: slide, patient (empty where unknown), label (index into ``classes``), split.
        classes: names.
    """
    names = {str(i): name for i, name in enumerate(classes)}
    labels = sorted({row["label"] for row in splits if row.get("label")}, key=lambda text: (len(text), text))
    rows = []
    for split in ("train", "val", "test"):
        inside = [row for row in splits if row.get("split") == split]
        if inside:
            counts = Counter(row.get("label", "") for row in inside)
            named = [row["patient"] for row in inside if row.get("patient")]
            patients = str(len(set(named)))
            if len(named) < len(inside):
                patients = f"{patients} known" if named else "unknown"
            rows.append((split, str(len(inside)), patients, *(str(counts[label]) for label in labels)))
    headers = ("split", "slides", "patients", *(names.get(label, label) for label in labels))
    known = [row["slide"] for row in splits if row.get("patient")]
    note = patient_note(known, [row.get("slide", "") for row in splits])
    return Table(headers, rows, range(1, len(headers))), [] if note is None else [note]


def _columns(rows: Rows, start: str) -> list[str]:
    return [name for name in (rows[0] if rows else {}) if name.startswith(start)]


def _wrong(row: Mapping[str, str]) -> bool:
    return bool(row.get("label")) and row.get("label") != row.get("prediction") and not _unscored(row)


def _unscored(row: Mapping[str, str]) -> bool:
    """No tile of the slide could be read."""
    return row.get("tiles") == "0"


def _numbers(rows: Rows, *names: str) -> list[float]:
    """The values that are there."""
    counted = []
    for cell in (row.get(name, "") for row in rows for name in names):
        try:
            counted.append(float(cell))
        except ValueError:
            continue
    return [value for value in counted if not math.isnan(value)]


def _cell(text: str) -> str:
    try:
        return f"{float(text):.3f}"
    except ValueError:
        return "–"
