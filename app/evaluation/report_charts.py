"""Curves of an evaluation: ROC, precision over recall, reliability and lesions found."""

from __future__ import annotations

import numpy as np
from sklearn.metrics import precision_recall_curve, roc_curve

from app.evaluation.areas import AreaScores
from app.evaluation.classification import Calibration, Cases
from app.evaluation.froc import FALSE_POSITIVES
from app.pages.charts import Chart, Series, line_chart


def classification_charts(cases: Cases, classes: list[str]) -> list[Chart]:
    """Return ROC and precision over recall, of each class that has slides and is not all of them."""
    of_classes = range(len(classes)) if cases.positive is None else [cases.positive]
    roc, precision = [], []
    for colour, c in enumerate(of_classes):
        true = cases.label == c
        if not 0 < np.count_nonzero(true) < len(true):
            continue
        false_rate, true_rate, _ = roc_curve(true, cases.score[:, c])
        roc.append(Series(classes[c], false_rate, true_rate, colour))
        precisions, recalls, _ = precision_recall_curve(true, cases.score[:, c])
        precision.append(Series(classes[c], recalls, precisions, colour))
    return [
        line_chart(
            roc, "ROC of slides", "true positive rate", x_label="false positive rate", from_zero=True, last=False
        ),
        line_chart(
            precision, "Precision and recall of slides", "precision", x_label="recall", from_zero=True, last=False
        ),
    ]


def reliability_chart(reliability: Calibration) -> Chart:
    """Return how often slides are right, by how certain the model is of them."""
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
        last=False,
    )


def froc_chart(areas: AreaScores) -> Chart:
    """Return the sensitivity of each class at the false alarms that the score asks for."""
    series = []
    for number, (name, curve) in enumerate(areas.froc.items()):
        if curve.score is not None:
            up_to = np.array(FALSE_POSITIVES)
            series.append(
                Series(name, up_to, np.interp(up_to, curve.false_per_slide, curve.sensitivity), number, "dots")
            )
    return line_chart(
        series, "Lesions found (FROC)", "sensitivity", x_label="false alarms per slide", from_zero=True, last=False
    )
