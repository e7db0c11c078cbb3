"""All scores of an evaluation: as figures for a file, as lines for a terminal, as a page.

Takes a folder of predictions and the truth; gives an ``Evaluation``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.metrics import precision_recall_curve, roc_curve

from app.evaluation.areas import AreaScores, score_areas
from app.evaluation.certain_tiles import certain_tiles
from app.evaluation.classification import (
    Calibration,
    Cases,
    Estimate,
    auc,
    auprc,
    balanced_accuracy,
    by_patient,
    calibration,
    confusion,
    with_interval,
)
from app.evaluation.froc import FALSE_POSITIVES
from app.evaluation.labelled import LabelledSlides, labelled_slides
from app.pages.charts import Chart, Series, line_chart
from app.pages.evaluation_page import EvaluationPage
from app.pages.html import Card, Table, format_value
from app.prediction.prediction_folder import PredictionFolder

MEASURES = {"auc": auc, "auprc": auprc, "balanced_accuracy": balanced_accuracy}
NAMES = {"auc": "AUC", "auprc": "AUPRC", "balanced_accuracy": "Balanced accuracy"}


@dataclass(frozen=True, eq=False)
class Evaluation:
    """What predictions are worth.

    Attributes:
        made_with: settings of the predictions.
        labelled: slides with their labels; None where no labels were given.
        estimates: by "slide" or "patient" and measure.
        areas: None where no annotations were given.
    """

    made_with: dict[str, Any]
    labelled: LabelledSlides | None
    estimates: dict[tuple[str, str], Estimate]
    areas: AreaScores | None

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
        labelled = None if labels is None else labelled_slides(rows, classes, labels)
        estimates = {}
        if labelled is not None:
            for unit, cases in (("slide", labelled.cases), ("patient", by_patient(labelled.cases))):
                for name, measure in MEASURES.items():
                    estimates[unit, name] = with_interval(cases, measure)
        areas = None if annotations is None else score_areas(folder, made_with["shown"], annotations)
        return cls(made_with, labelled, estimates, areas)

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
            figures["dice"] = self._means(self.areas.dice)
            figures["iou"] = self._means(self.areas.iou)
            figures["froc"] = {name: curve.score for name, curve in self.areas.froc.items()}
            figures["annotated_slides"] = len(self.areas.slides)
            figures["annotations_left_out"] = list(self.areas.left_out)
        return figures

    def _means(self, values: Any) -> dict[str, float | None]:
        """Mean over the slides of each class; None where no slide has it."""
        assert self.areas is not None
        means = {}
        for c, name in enumerate(self.areas.classes):
            defined = values[~np.isnan(values[:, c]), c]
            means[name] = float(defined.mean()) if len(defined) else None
        return means

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
            dice, iou = self._means(self.areas.dice), self._means(self.areas.iou)
            for name in self.areas.classes:
                score = self.areas.froc[name].score
                lines.append(f"{name}: Dice {_number(dice[name])}, IoU {_number(iou[name])}, FROC {_number(score)}")
            lines += self.areas.left_out
        return lines


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
        charts += [*_classification_charts(cases, evaluation.classes), _reliability_chart(reliability)]
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
        figures = evaluation.figures()
        cards += [Card(f"Dice {name}", _number(value)) for name, value in figures["dice"].items()]
        cards += [
            Card(f"FROC {name}", _number(score), note="mean sensitivity at 1/4 to 8 false alarms per slide")
            for name, score in figures["froc"].items()
        ]
        charts.append(_froc_chart(areas))
        notes += areas.left_out
    tiles = {} if slides is None else certain_tiles(folder, slides, made_with)
    return EvaluationPage(
        folder.path.resolve().name,
        (made_with["model"], made_with["task"], f"tiles of {made_with['tile']} px at {made_with['mpp']:g} µm/px"),
        cards,
        charts,
        tables,
        {} if evaluation.areas is None else evaluation.areas.pictures,
        tiles,
        notes,
    ).write(path)


def _cell(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.4f}"


def _classification_charts(cases: Cases, classes: list[str]) -> list[Chart]:
    """ROC and precision over recall, of each class that has slides and is not all of them."""
    of_classes = [1] if len(classes) == 2 else range(len(classes))
    roc, precision = [], []
    for colour, c in enumerate(of_classes):
        true = cases.label == c
        if not 0 < np.count_nonzero(true) < len(true):
            continue
        false_rate, true_rate, _ = roc_curve(true, cases.score[:, c])
        roc.append(Series(classes[c], false_rate, true_rate, colour % 6))
        precisions, recalls, _ = precision_recall_curve(true, cases.score[:, c])
        precision.append(Series(classes[c], recalls, precisions, colour % 6))
    return [
        line_chart(roc, "ROC of slides", "true positive rate", x_label="false positive rate", from_zero=True),
        line_chart(precision, "Precision and recall of slides", "precision", x_label="recall", from_zero=True),
    ]


def _reliability_chart(reliability: Calibration) -> Chart:
    diagonal = np.array([0.0, 1.0])
    return line_chart(
        [
            Series("certain as it should be", diagonal, diagonal, 5, "ideal"),
            Series("slides", reliability.confidence, reliability.accuracy, 0, "dots"),
        ],
        "Reliability of slides",
        "share that is right",
        x_label="how certain the model is",
        from_zero=True,
    )


def _froc_chart(areas: AreaScores) -> Chart:
    series = []
    for number, (name, curve) in enumerate(areas.froc.items()):
        if curve.score is not None:
            up_to = np.array(FALSE_POSITIVES)
            series.append(
                Series(name, up_to, np.interp(up_to, curve.false_per_slide, curve.sensitivity), number % 6, "dots")
            )
    return line_chart(series, "Lesions found (FROC)", "sensitivity", x_label="false alarms per slide", from_zero=True)
