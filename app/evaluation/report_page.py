"""The page of an evaluation: cards, curves, tables and pictures of its scores.

Takes an ``Evaluation``; writes ``report.html``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from app.evaluation.areas import AreaScores
from app.evaluation.certain_tiles import certain_tiles
from app.evaluation.classification import calibration, confusion
from app.evaluation.report import Evaluation, number_text
from app.evaluation.report_charts import classification_charts, froc_chart, reliability_chart
from app.pages.charts import Chart
from app.pages.evaluation_page import EvaluationPage
from app.pages.html import Card, Table, format_value
from app.prediction.prediction_folder import PredictionFolder
from app.training.metrics import mean_defined
from pipelines.catalog.table import counted

MOST_PICTURES = 60
"""Slides whose areas the report shows; of five hundred the page would be 20 MB."""


def write_report(evaluation: Evaluation, folder: PredictionFolder, path: Path, slides: Path | None) -> Path:
    """Write the page of ``evaluation`` and give its path.

    Args:
        slides: folder of the slides, for pictures of tiles; None: there are none.
    """
    made_with = evaluation.made_with
    notes, unit = evaluation.head(), evaluation.unit
    cards: list[Card] = []
    charts: list[Chart] = []
    tables: dict[str, Table] = {}
    if evaluation.labelled is not None:
        cases = evaluation.labelled.cases
        for key, estimate in evaluation.estimates.items():
            if "balanced_accuracy" not in key and estimate.value is not None:
                interval = f"95 % interval {number_text(estimate.low)} to {number_text(estimate.high)}"
                name = evaluation.name_of(*key)
                cards.append(Card(name[0].upper() + name[1:], format_value(estimate.value), note=interval))
        reliability = calibration(cases)
        charts += [*classification_charts(cases, evaluation.classes), reliability_chart(reliability)]
        tables[f"Scores of {unit}s{' and patients' if evaluation.patient else ''}"] = Table(
            ("", "value", f"95 % interval, 1,000 resamples of {'patients' if evaluation.patient else f'{unit}s'}"),
            [
                (evaluation.name_of(*key), number_text(e.value), f"{number_text(e.low)} to {number_text(e.high)}")
                for key, e in evaluation.estimates.items()
            ]
            + [(f"calibration error of {unit}s", number_text(reliability.error), "")],
            (1,),
        )
        tables[f"{unit.capitalize()}s by true class (rows) and predicted class"] = Table(
            ("", *evaluation.classes),
            [(name, *map(str, row)) for name, row in zip(evaluation.classes, confusion(cases).tolist(), strict=True)],
            tuple(range(1, len(evaluation.classes) + 1)),
        )
        notes += [*evaluation.labelled.left_out, *evaluation.notes]
    if evaluation.areas is not None:
        areas = evaluation.areas
        tables["Areas, by slide"] = Table(
            ("slide", *(f"{what} {name}" for name in areas.classes for what in ("Dice", "IoU"))),
            [
                (slide, *(_cell(v) for pair in zip(dice, iou, strict=True) for v in pair))
                for slide, dice, iou in zip(areas.slides, areas.dice, areas.iou, strict=True)
            ],
            tuple(range(1, 2 * len(areas.classes) + 1)),
        )
        cards += [
            Card(
                f"Dice {name}",
                number_text(e.value),
                note=f"95 % interval {number_text(e.low)} to {number_text(e.high)}",
            )
            for name, e in evaluation.dice.items()
        ]
        cards += [
            Card(f"FROC {name}", number_text(curve.score), note="mean sensitivity at 1/4 to 8 false alarms per slide")
            for name, curve in areas.froc.items()
            if curve.score is not None
        ]
        if any(curve.score is not None for curve in areas.froc.values()):
            charts.append(froc_chart(areas))
        tables["Lesions and detections"] = Table(
            ("class", "lesions", "detections", "FROC"),
            [
                (
                    name,
                    str(curve.lesions),
                    str(curve.detections),
                    number_text(curve.score) + f" {curve.reason}".rstrip(),
                )
                for name, curve in areas.froc.items()
            ],
            (1, 2),
        )
        notes += areas.left_out
    scored = [row["slide"] for row in evaluation.split.rows]
    tiles = {} if slides is None else certain_tiles(folder, scored, slides, made_with)
    return EvaluationPage(
        folder.path.resolve().name,
        (
            made_with["model"],
            made_with["task"],
            _looked_at(made_with),
            f"{counted(len(scored), 'slide')} of split {evaluation.split.name}",
        ),
        cards,
        charts,
        tables,
        {} if evaluation.areas is None else _lowest(evaluation.areas),
        tiles,
        notes,
    ).write(path)


def _lowest(areas: AreaScores) -> dict[str, bytes]:
    """Pictures of the slides of lowest Dice, those first; of a slide with neither true nor predicted areas none."""
    means = {slide: mean_defined(dice) for slide, dice in zip(areas.slides, areas.dice, strict=True)}
    known = sorted((mean, slide) for slide, mean in means.items() if mean is not None)
    return {f"{slide}, Dice {mean:.3f}": areas.pictures[slide] for mean, slide in known[:MOST_PICTURES]}


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _looked_at(made_with: dict[str, Any]) -> str:
    if made_with["whole_pictures"]:
        return f"whole pictures, resized to {made_with['tile']} px"
    what = "whole slides" if made_with["tile"] == "slide" else f"tiles of {made_with['tile']} px"
    return f"{what} at {made_with['mpp']:g} µm/px"
