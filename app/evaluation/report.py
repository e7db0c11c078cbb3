"""All scores of an evaluation: as figures for a file, as lines for a terminal, as a page.

Takes a folder of predictions and the truth; gives an ``Evaluation``.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.evaluation.areas import AreaScores, score_areas
from app.evaluation.certain_tiles import certain_tiles
from app.evaluation.classification import (
    auc,
    auprc,
    balanced_accuracy,
    by_patient,
    calibration,
    confusion,
    with_interval,
)
from app.evaluation.intervals import Estimate, resampled
from app.evaluation.labelled import LabelledSlides, labelled_slides
from app.evaluation.report_charts import classification_charts, froc_chart, reliability_chart
from app.pages.charts import Chart
from app.pages.evaluation_page import EvaluationPage
from app.pages.html import Card, Table, format_value
from app.prediction.prediction_folder import PredictionFolder
from app.training.metrics import mean_defined
from pipelines.labels.class_names import ClassMap

MEASURES = {"auc": auc, "auprc": auprc, "balanced_accuracy": balanced_accuracy}
MOST_PICTURES = 60
"""Slides whose areas the report shows; of five hundred the page would be 20 MB."""

NAMES = {"auc": "AUC", "auprc": "AUPRC", "balanced_accuracy": "Balanced accuracy"}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What predictions are worth.

    Attributes:
        made_with: settings of the predictions.
        labelled: slides with their labels; None where no labels were given.
        estimates: by "slide" or "patient" and measure.
        areas: None where no annotations were given.
        dice, iou: by class, mean over the slides that have it; of no value where none has.
    """

    made_with: dict[str, Any]
    labelled: LabelledSlides | None
    estimates: dict[tuple[str, str], Estimate]
    areas: AreaScores | None
    dice: dict[str, Estimate]
    iou: dict[str, Estimate]

    @classmethod
    def of(cls, folder: PredictionFolder, labels: Path | None, annotations: Path | None) -> Evaluation:
        """Score the predictions in ``folder``.

        Raises:
            ValueError: there are none, or the truth does not fit them.
        """
        made_with = folder.settings()
        rows, classes = folder.rows(), made_with["classes"]
        if not rows:
            raise ValueError(f"{folder.path} holds no predicted slide; {folder.failed.path} may say why")
        class_map = ClassMap.parse(made_with.get("class_map") or ())
        labelled = None if labels is None else labelled_slides(rows, classes, labels, class_map)
        estimates = {}
        if labelled is not None:
            for unit, cases in (("slide", labelled.cases), ("patient", by_patient(labelled.cases))):
                for name, measure in MEASURES.items():
                    estimates[unit, name] = with_interval(cases, measure)
        if annotations is not None and not made_with["shown"]:
            raise ValueError(
                f"--annotations {annotations}: {folder.path} holds scores of whole slides and no areas: leave them out"
            )
        areas = None if annotations is None else score_areas(folder, made_with["shown"], annotations)
        if areas is None:
            return cls(made_with, labelled, estimates, None, {}, {})
        patients = {} if labelled is None else labelled.patient_of
        overlaps = [_of_classes(areas, values, patients) for values in (areas.dice, areas.iou)]
        return cls(made_with, labelled, estimates, areas, *overlaps)

    @property
    def classes(self) -> list[str]:
        """Names, in the order of the scores."""
        classes: list[str] = self.made_with["classes"]
        return classes

    def figures(self) -> dict[str, Any]:
        """Return all figures, as JSON can hold them."""
        figures: dict[str, Any] = {"predictions": self.made_with}
        if self.labelled is not None:
            cases = self.labelled.cases
            reliability = calibration(cases)
            figures["slides"] = len(cases.label)
            figures["patients"] = len(self.labelled.patients)
            for (unit, name), estimate in self.estimates.items():
                figures[f"{unit}_{name}"] = {"value": estimate.value, "low": estimate.low, "high": estimate.high}
            figures["confusion"] = confusion(cases).tolist()
            figures["calibration_error"] = reliability.error
            figures["reliability"] = {
                "confidence": reliability.confidence.tolist(),
                "accuracy": reliability.accuracy.tolist(),
                "slides": reliability.count.tolist(),
            }
            figures["left_out"] = list(self.labelled.left_out)
        if self.areas is not None:
            for what, estimates in (("dice", self.dice), ("iou", self.iou)):
                figures[what] = {name: estimate.value for name, estimate in estimates.items()}
                figures[f"{what}_interval"] = {name: [e.low, e.high] for name, e in estimates.items()}
            figures["froc"] = {name: curve.score for name, curve in self.areas.froc.items()}
            figures["annotated_slides"] = len(self.areas.slides)
            figures["annotations_left_out"] = list(self.areas.left_out)
        return figures

    def lines(self) -> list[str]:
        """Return the scores as lines."""
        lines = []
        if self.labelled is not None:
            cases = self.labelled.cases
            lines.append(f"{len(cases.label)} slides of {len(self.labelled.patients)} patients with a label")
            lines += [
                f"{unit} {NAMES[name]} {_with_interval(estimate)}" for (unit, name), estimate in self.estimates.items()
            ]
            lines.append(f"calibration error {calibration(cases).error:.4f}")
            lines += self.labelled.left_out
        if self.areas is not None:
            lines.append(f"{len(self.areas.slides)} slides with annotations")
            for name in self.areas.classes:
                score = self.areas.froc[name].score
                overlap = f"Dice {_with_interval(self.dice[name])}, IoU {_with_interval(self.iou[name])}"
                lines.append(f"{name}: {overlap}, FROC {_number(score)}")
            lines += self.areas.left_out
        return lines


def _looked_at(made_with: dict[str, Any]) -> str:
    if made_with.get("whole_pictures"):
        return f"whole pictures, resized to {made_with['tile']} px"
    what = "whole slides" if made_with["tile"] == "slide" else f"tiles of {made_with['tile']} px"
    return f"{what} at {made_with['mpp']:g} µm/px"


def _of_classes(areas: AreaScores, values: NDArray[np.float64], patients: dict[str, str]) -> dict[str, Estimate]:
    """Means of each class over the slides that have it.

    Args:
        values: (slides, classes).
        patients: by slide, where they are known; every other slide stands for itself.
    """
    _, patient = np.unique([patients.get(slide, slide) for slide in areas.slides], return_inverse=True)
    return {
        name: resampled(patient, functools.partial(_mean_of_rows, values[:, c])) for c, name in enumerate(areas.classes)
    }


def _mean_of_rows(values: NDArray[np.float64], rows: NDArray[np.int64]) -> float | None:
    return mean_defined(values[rows])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _with_interval(estimate: Estimate) -> str:
    if estimate.low is None or estimate.high is None:
        return _number(estimate.value)
    return f"{_number(estimate.value)} ({_number(estimate.low)} to {_number(estimate.high)})"


def write_report(evaluation: Evaluation, folder: PredictionFolder, path: Path, slides: Path | None) -> Path:
    """Write the page of ``evaluation`` and give its path.

    Args:
        slides: folder of the slides, for pictures of tiles; None: there are none.
    """
    made_with = evaluation.made_with
    notes: list[str] = []
    cards: list[Card] = []
    charts: list[Chart] = []
    tables: dict[str, Table] = {}
    if evaluation.labelled is not None:
        cases = evaluation.labelled.cases
        for (unit, name), estimate in evaluation.estimates.items():
            if name != "balanced_accuracy" and estimate.value is not None:
                interval = f"95 % interval {_number(estimate.low)} to {_number(estimate.high)}"
                cards.append(Card(f"{unit.capitalize()} {NAMES[name]}", format_value(estimate.value), note=interval))
        reliability = calibration(cases)
        charts += [*classification_charts(cases, evaluation.classes), reliability_chart(reliability)]
        tables["Scores of slides and patients"] = Table(
            ("", "value", "95 % interval, 1,000 resamples of patients"),
            [
                (f"{unit} {NAMES[name]}", _number(e.value), f"{_number(e.low)} to {_number(e.high)}")
                for (unit, name), e in evaluation.estimates.items()
            ]
            + [("calibration error of slides", _number(reliability.error), "")],
            (1,),
        )
        tables["Slides by true class (rows) and predicted class"] = Table(
            ("", *evaluation.classes),
            [(name, *map(str, row)) for name, row in zip(evaluation.classes, confusion(cases).tolist(), strict=True)],
            tuple(range(1, len(evaluation.classes) + 1)),
        )
        notes += evaluation.labelled.left_out
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
            Card(f"Dice {name}", _number(e.value), note=f"95 % interval {_number(e.low)} to {_number(e.high)}")
            for name, e in evaluation.dice.items()
        ]
        cards += [
            Card(f"FROC {name}", _number(curve.score), note="mean sensitivity at 1/4 to 8 false alarms per slide")
            for name, curve in areas.froc.items()
        ]
        charts.append(froc_chart(areas))
        notes += areas.left_out
    tiles = {} if slides is None else certain_tiles(folder, slides, made_with)
    return EvaluationPage(
        folder.path.resolve().name,
        (made_with["model"], made_with["task"], _looked_at(made_with)),
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
