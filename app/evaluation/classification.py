"""Measures of classification: ROC and precision-recall areas with confidence intervals, confusion, calibration.

Takes scores and labels of slides or patients; returns numbers and curves. scikit-learn computes what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix, recall_score, roc_auc_score

from app.training.metrics import rows_by

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

BINS = 10


@dataclass(frozen=True, eq=False)
class Cases:
    """Slides or patients with their scores and labels.

    Attributes:
        score: (n, C), rows sum to 1 or less.
        label: (n,) true class.
        patient: (n,) number of each one's patient.
        positive: index of the positive class of two; None: it is unknown, or there are more classes.
    """

    score: Floats
    label: Labels
    patient: Labels
    positive: int | None = None

    def select(self, rows: Labels) -> Cases:
        """Return the cases ``rows``, in that order."""
        return Cases(self.score[rows], self.label[rows], self.patient[rows], self.positive)


def auc(cases: Cases) -> float | None:
    """Return the area under the ROC curve: of the positive class, or the mean of each class against the rest."""
    return _over_classes(cases, roc_auc_score)


def auprc(cases: Cases) -> float | None:
    """Return the average precision: of the positive class, or the mean over the classes."""
    return _over_classes(cases, average_precision_score)


def balanced_accuracy(cases: Cases) -> float | None:
    """Return the mean over the classes of the share of their cases whose highest score is their own."""
    if not len(cases.label):
        return None
    present = np.unique(cases.label)
    return float(recall_score(cases.label, cases.score.argmax(1), labels=present, average="macro"))


def _over_classes(cases: Cases, score: Callable[..., float]) -> float | None:
    classes = cases.score.shape[1]
    present = [c for c in range(classes) if 0 < np.count_nonzero(cases.label == c) < len(cases.label)]
    if not present:
        return None
    if cases.positive is not None:
        present = [cases.positive]
    return float(np.mean([score(cases.label == c, cases.score[:, c]) for c in present]))


def with_interval(cases: Cases, measure: Callable[[Cases], float | None], seed: int = 0) -> Estimate:
    """Return ``measure`` of the cases with its interval over their patients."""
    return bootstrap(cases.patient, lambda rows: measure(cases.select(rows)), seed)


def by_patient(cases: Cases) -> tuple[Cases, Labels]:
    """Return one case for each patient, and the patients left out.

    With a positive class a patient is positive where one slide is, and has the highest of the slides' scores. Otherwise
    a patient has the mean scores; one whose slides differ in class is left out. Of two classes the positive one has to
    be known as soon as a patient has two slides.
    """
    patients, groups = rows_by(cases.patient)
    score = np.empty((len(patients), cases.score.shape[1]))
    label = np.empty(len(patients), np.int64)
    mixed = np.zeros(len(patients), np.bool_)
    for row, own in enumerate(groups):
        labels = cases.label[own]
        if cases.positive is None:
            score[row], label[row] = cases.score[own].mean(0), labels[0]
            mixed[row] = (labels != labels[0]).any()
        else:
            highest = cases.score[own, cases.positive].max()
            score[row, cases.positive], score[row, 1 - cases.positive] = highest, np.clip(1 - highest, 0, 1)
            label[row] = cases.positive if (labels == cases.positive).any() else 1 - cases.positive
    kept = np.flatnonzero(~mixed)
    return Cases(score, label, patients, cases.positive).select(kept), patients[mixed]


def confusion(cases: Cases) -> NDArray[np.int64]:
    """Return counts (C, C): rows true, columns predicted."""
    classes = range(cases.score.shape[1])
    counts: NDArray[np.int64] = confusion_matrix(cases.label, cases.score.argmax(1), labels=list(classes))
    return counts


@dataclass(frozen=True, eq=False)
class Calibration:
    """Accuracy of the predicted class by the model's confidence.

    Attributes:
        error: expected calibration error (Guo et al. 2017): mean of |confidence - accuracy| over the cases of the bins.
        confidence, accuracy: (b,) means of each bin that has a case.
        count: (b,) cases.
    """

    error: float
    confidence: Floats
    accuracy: Floats
    count: Labels


def calibration(cases: Cases) -> Calibration:
    """Return the calibration over ``BINS`` bins of the same width."""
    confidence = cases.score.max(1)
    right = cases.score.argmax(1) == cases.label
    bins = np.minimum((confidence * BINS).astype(np.int64), BINS - 1)
    present = np.unique(bins)
    count = np.array([np.count_nonzero(bins == b) for b in present], np.int64)
    means = np.array([confidence[bins == b].mean() for b in present])
    accuracy = np.array([right[bins == b].mean() for b in present])
    error = float((np.abs(means - accuracy) * count).sum() / max(1, count.sum()))
    return Calibration(error, means, accuracy, count)


RESAMPLES = 1000
CONFIDENCE = 0.95

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; None where the cases cannot define it."""

    value: float | None
    low: float | None = None
    high: float | None = None


def bootstrap(patient: Rows, measure: Callable[[Rows], float | None], seed: int = 0) -> Estimate:
    """Return ``measure`` of all cases, and its ``CONFIDENCE`` interval over ``RESAMPLES`` draws of patients with
    replacement; draws that cannot define it, as those of one class alone, are not counted.

    Args:
        patient: (n,) number of each case's patient.
        measure: of the cases with these numbers, which may come several times.
    """
    value = measure(np.arange(len(patient)))
    if value is None:
        return Estimate(None)
    random = np.random.default_rng(seed)
    patients, rows = rows_by(patient)
    drawn = []
    for _ in range(RESAMPLES):
        picked = random.integers(len(patients), size=len(patients))
        of_draw = measure(np.concatenate([rows[k] for k in picked]))
        if of_draw is not None:
            drawn.append(of_draw)
    if not drawn:
        return Estimate(value)
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Estimate(value, float(low), float(high))
