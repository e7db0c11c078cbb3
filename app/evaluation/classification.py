"""How well scores tell classes apart: ROC and precision-recall areas with confidence intervals, confusion, calibration.

Takes scores and labels of slides or patients; gives numbers and curves. scikit-learn computes what it has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix, recall_score, roc_auc_score

from app.evaluation.intervals import Estimate, resampled

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]

BINS = 10


@dataclass(frozen=True, eq=False)
class Cases:
    """What is scored.

    Attributes:
        score: (n, C), rows sum to 1 or less.
        label: (n,) true class.
        patient: (n,) number of each one's patient.
    """

    score: Floats
    label: Labels
    patient: Labels

    def select(self, rows: Labels) -> Cases:
        """Return the cases ``rows``, in that order."""
        return Cases(self.score[rows], self.label[rows], self.patient[rows])


def auc(cases: Cases) -> float | None:
    """Return the area under the ROC curve: of class 1 against 0, or the mean of one class against the rest."""
    return _over_classes(cases, roc_auc_score)


def auprc(cases: Cases) -> float | None:
    """Return the average precision: of class 1, or the mean over the classes."""
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
    if classes == 2:
        return float(score(cases.label == 1, cases.score[:, 1]))
    return float(np.mean([score(cases.label == c, cases.score[:, c]) for c in present]))


def with_interval(cases: Cases, measure: Callable[[Cases], float | None], seed: int = 0) -> Estimate:
    """Return ``measure`` of the cases with its interval over their patients."""
    return resampled(cases.patient, lambda rows: measure(cases.select(rows)), seed)


def by_patient(cases: Cases) -> Cases:
    """Return one case for each patient: the highest score of its slides for classes 1 and on, and the highest of their
    classes. A patient has a tumour where one slide has."""
    patients = np.unique(cases.patient)
    score = np.empty((len(patients), cases.score.shape[1]))
    label = np.empty(len(patients), np.int64)
    for row, patient in enumerate(patients):
        own = cases.patient == patient
        score[row] = cases.score[own].max(0)
        label[row] = cases.label[own].max()
    score[:, 0] = np.clip(1 - score[:, 1:].max(1), 0, 1)
    return Cases(score, label, patients)


def confusion(cases: Cases) -> NDArray[np.int64]:
    """Return counts (C, C): rows true, columns predicted."""
    classes = range(cases.score.shape[1])
    counts: NDArray[np.int64] = confusion_matrix(cases.label, cases.score.argmax(1), labels=list(classes))
    return counts


@dataclass(frozen=True, eq=False)
class Calibration:
    """How often the predicted class is right, by how sure the model is of it.

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
