"""Labels and scores of slides and patients, and measures of them: ROC and precision-recall areas with intervals.

Takes the rows of predicted slides and a table of labels; returns ``Predictions``, and numbers and curves. scikit-learn
computes what it has. A slide without a label, or a label without a prediction, takes no part and is named.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.metrics import average_precision_score, confusion_matrix, roc_auc_score

from app.training import metrics
from app.training.metrics import Floats, Labels, rows_by
from parallel.units import number_text
from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import Table, counted, listed, original, shown
from pipelines.labels.class_names import IGNORED_CLASS, ClassMap, known_patients
from pipelines.labels.slide_labels import values_by_slide

BINS = 10
RESAMPLES = 1000
CONFIDENCE = 0.95
PREFERRED = ("test", "val", "external")
"""Without ``--split`` the first of these that has a slide is scored: slides that were never looked at, those that chose
the checkpoint, those that the run did not have. Never training slides."""
SlideRows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, eq=False)
class Predictions:
    """Slides or patients with their scores and labels.

    Attributes:
        score: (n, C), each 0 to 1.
        label: (n,) true class.
        patient: (n,) number of each one's patient.
        positive: index of the positive class of two; None: it is unknown, or there are more classes.
    """

    score: Floats
    label: Labels
    patient: Labels
    positive: int | None = None

    def select(self, rows: Labels) -> Predictions:
        """Return the cases ``rows``, in that order."""
        return Predictions(self.score[rows], self.label[rows], self.patient[rows], self.positive)


def auc(cases: Predictions) -> float | None:
    """Return the area under the ROC curve: of the positive class, or the mean of each class against the rest."""
    return _over_classes(cases, roc_auc_score)


def auprc(cases: Predictions) -> float | None:
    """Return the average precision: of the positive class, or the mean over the classes."""
    return _over_classes(cases, average_precision_score)


def balanced_accuracy(cases: Predictions) -> float | None:
    """Return the mean over the classes of the share of their cases whose highest score is their own."""
    return metrics.balanced_accuracy(cases.score, cases.label)


def _over_classes(cases: Predictions, score: Callable[..., float]) -> float | None:
    classes = cases.score.shape[1]
    present = [c for c in range(classes) if 0 < np.count_nonzero(cases.label == c) < len(cases.label)]
    if not present:
        return None
    if cases.positive is not None:
        present = [cases.positive]
    return float(np.mean([score(cases.label == c, cases.score[:, c]) for c in present]))


def with_interval(cases: Predictions, measure: Callable[[Predictions], float | None]) -> Estimate:
    """Return ``measure`` of the cases with its interval over their patients. A draw that lacks a class of the cases is
    not counted: its mean would be over other classes."""
    classes = len(np.unique(cases.label))

    def of_draw(rows: Labels) -> float | None:
        drawn = cases.select(rows)
        return measure(drawn) if len(np.unique(drawn.label)) == classes else None

    return bootstrap(cases.patient, of_draw)


def by_patient(cases: Predictions) -> tuple[Predictions, Labels]:
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
    return Predictions(score, label, patients, cases.positive).select(kept), patients[mixed]


def confusion(cases: Predictions) -> NDArray[np.int64]:
    """Return counts (C, C): rows true, columns predicted."""
    classes = range(cases.score.shape[1])
    counts: NDArray[np.int64] = confusion_matrix(cases.label, cases.score.argmax(1), labels=list(classes))
    return counts


class Calibration:
    """Accuracy of the predicted class by the model's confidence, over ``BINS`` bins of the same width.

    Attributes:
        error: expected calibration error (Guo et al. 2017): mean of |confidence - accuracy| over the cases of the bins.
        confidence, accuracy: (b,) means of each bin that has a case.
        count: (b,) cases.
    """

    def __init__(self, cases: Predictions) -> None:
        confidence, right = cases.score.max(1), cases.score.argmax(1) == cases.label
        _, bins = rows_by(np.minimum((confidence * BINS).astype(np.int64), BINS - 1))
        self.count = np.array([len(rows) for rows in bins], np.int64)
        self.confidence = np.array([confidence[rows].mean() for rows in bins])
        self.accuracy = np.array([right[rows].mean() for rows in bins])
        error = (np.abs(self.confidence - self.accuracy) * self.count).sum() / max(1, self.count.sum())
        self.error = float(error)


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; None where the cases cannot define it."""

    value: float | None
    low: float | None = None
    high: float | None = None

    @property
    def interval(self) -> str:
        return f"{number_text(self.low)} to {number_text(self.high)}"

    def __str__(self) -> str:
        return number_text(self.value) + ("" if self.low is None else f" ({self.interval})")


def bootstrap(patient: Labels, measure: Callable[[Labels], float | None]) -> Estimate:
    """Return ``measure`` of all cases, and its ``CONFIDENCE`` interval over ``RESAMPLES`` draws of patients with
    replacement; draws that cannot define it, as those of one class alone, are not counted.

    Args:
        patient: (n,) number of each case's patient.
        measure: of the cases with these numbers, which may come several times.
    """
    value = measure(np.arange(len(patient)))
    if value is None:
        return Estimate(None)
    random = np.random.default_rng(0)
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


class ScoredSplit:
    """The split that is scored.

    Args:
        asked: ``--split``; None: the first of ``PREFERRED`` that has slides.
        training_patients: those of the run, as far as they are known.

    Attributes:
        name: train, val, test, external, or all.

    Raises:
        ValueError: no predicted slide is in it.
    """

    def __init__(self, rows: SlideRows, asked: str | None, training_patients: Sequence[str] = ()) -> None:
        self.counts = counts = dict(sorted(Counter(row["split"] for row in rows).items()))
        self.name = asked or next((name for name in PREFERRED if name in counts), "")
        self.rows = [row for row in rows if self.name in (row["split"], "all")]
        self._train = {row["slide"] for row in rows if row["split"] == "train"}
        self._training_patients = training_patients
        if not self.rows:
            have = ", ".join(f"{name} {count}" for name, count in counts.items())
            what = f"--split {asked} has no predicted slide" if asked else "all predicted slides are training slides"
            raise ValueError(
                f"{what}: the predictions have {have}. Predict slides that the model was not trained on, or score "
                f"these with --split {min(counts)}"
            )

    def line(self) -> str:
        """Return what is scored and what is not."""
        others = ", ".join(f"{name} {count}" for name, count in self.counts.items() if self.name not in (name, "all"))
        left = f"; predicted and not scored: {others} (--split)" if others else ""
        return f"scored split: {self.name}, {counted(len(self.rows), 'slide')}{left}"

    def trained(self, scored: Sequence[str]) -> list[str]:
        """Return the slides of ``scored`` that are in the training split."""
        return [slide for slide in scored if slide in self._train]

    def of_trained_patients(self, scored: Sequence[str], patient: Mapping[str, str]) -> list[str]:
        """Return the other slides of ``scored`` whose patient has a slide in the training split."""
        trained = {*self._training_patients, *(patient[slide] for slide in self._train if slide in patient)}
        return [slide for slide in scored if slide not in self._train and patient.get(slide) in trained]


@dataclass(frozen=True, eq=False)
class LabelledPredictions:
    """Slides that have a prediction and a label, in order.

    Attributes:
        cases: of the slides; the patient of a slide whose patient is unknown is the slide.
        left_out: a line for each kind of slide that takes no part.
    """

    slides: tuple[str, ...]
    cases: Predictions
    left_out: tuple[str, ...]

    @functools.cached_property
    def calibration(self) -> Calibration:
        return Calibration(self.cases)


def patients_of(rows: Sequence[Mapping[str, Any]], table: Table | None, pattern: str | None) -> dict[str, str]:
    """Return the patient of every slide of ``rows`` whose patient is known: by the table, by ``--patient-pattern``, or
    as the predictions record it.

    Raises:
        ValueError: the table names two patients of a slide, or the pattern finds none.
    """
    named: dict[str, str] = {}
    if table is not None:
        named, faults = values_by_slide(table, {row["slide"] for row in rows}, "patient")
        if faults:
            raise ValueError(f"labels {table.path}: {shown(faults)}")
    if pattern is not None:
        named = known_patients([row["slide"] for row in rows], named, pattern)
    return {row["slide"]: row["patient"] for row in rows if row["patient"]} | named


def scored_class(drawn: str, class_map: ClassMap) -> str | None:
    """Return the class of a label; None for a missing value, or a class that was left out of training."""
    name = class_map.learned(drawn)
    return None if not drawn or (name != drawn and IGNORED_CLASS.match(name)) else name


def labelled_slides(
    rows: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    table: Table,
    patient: Mapping[str, str],
    positive: int | None,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
) -> LabelledPredictions:
    """Return the slides of ``rows`` (of ``slides.csv``) with the labels of ``table``.

    Args:
        positive: index of the positive class of two; None: there is none.
        class_map: classes of the table by other names, as in training.

    Raises:
        ValueError: the table has labels that are no classes of the model, or fits no slide; or as `check_others`.
    """
    class_map.check_others({original(line["label"]) for line in table.rows})
    names = SlideNames(row["slide"] for row in rows)
    label: dict[str, int] = {}
    unknown, faults = [], []
    for line in table.rows:
        drawn = original(line["label"])
        slide, name = names.match(original(line["slide"])), scored_class(drawn, class_map)
        if slide is None:
            unknown.append(line["slide"])
        elif name is None:
            continue
        elif name not in classes:
            faults.append(f"line {line.line}: {drawn!r} is no class of the model ({', '.join(classes)})")
        elif label.setdefault(slide, classes.index(name)) != classes.index(name):
            faults.append(f"line {line.line}: slide {slide!r} has two labels; keep one")
    if faults:
        raise ValueError(f"labels {table.path}: {shown(faults)}")
    kept = [row for row in rows if row["slide"] in label]
    if not kept:
        raise ValueError(
            f"labels {table.path}: no line names a slide that is scored ({listed([row['slide'] for row in rows])}); "
            "--split chooses others"
        )
    left_out = []
    if unlabelled := [row["slide"] for row in rows if row["slide"] not in label]:
        left_out.append(f"{counted(len(unlabelled), 'predicted slide')} without a label: {listed(unlabelled)}")
    if unknown:
        left_out.append(f"{counted(len(unknown), 'label')} of slides that are not scored: {listed(unknown)}")
    _, numbers = np.unique([patient.get(row["slide"], row["slide"]) for row in kept], return_inverse=True)
    cases = Predictions(
        np.array([[row[f"score_{name}"] for name in classes] for row in kept], np.float64),
        np.array([label[row["slide"]] for row in kept], np.int64),
        numbers.astype(np.int64),
        positive,
    )
    return LabelledPredictions(tuple(row["slide"] for row in kept), cases, tuple(left_out))
