"""All scores of an evaluation: as figures for a file and as lines for a terminal.

Takes a folder of predictions and the truth; returns an ``Evaluation``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.evaluation.areas import AreaScores
from app.evaluation.classification import (
    Estimate,
    LabelledPredictions,
    ScoredSplit,
    auc,
    auprc,
    balanced_accuracy,
    bootstrap,
    by_patient,
    confusion,
    labelled_slides,
    patients_of,
    scored_class,
    with_interval,
)
from app.prediction.prediction_folder import TRAINING_PATIENTS, PredictionFolder
from app.training.metrics import mean_defined
from parallel.units import number_text
from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import Table, counted, listed, original, read_table
from pipelines.labels.class_names import ClassMap, patient_note, positive_class

MEASURES = {"auc": auc, "auprc": auprc, "balanced_accuracy": balanced_accuracy}
NAMES = {"auc": "AUC", "auprc": "AUPRC", "balanced_accuracy": "Balanced accuracy"}


class Evaluation:
    """Scores of the predictions in ``folder``, as the flags of ``app.evaluate`` ask.

    Attributes:
        patient: of the predicted slides whose patient is known.
        labelled: slides with their labels; None where no labels were given.
        estimates: by "slide" or, where patients are known, "patient", and measure.
        notes: slides and patients that take no part, and classes that a measure is not of.
        dice, iou: by class, mean over the slides that have it; of no value where none has.

    Raises:
        ValueError: there are no predictions, or the truth does not fit them.
    """

    def __init__(
        self,
        folder: PredictionFolder,
        labels: Path | None,
        annotations: Path | None,
        split_name: str | None = None,
        patient_pattern: str | None = None,
        positive_name: str | None = None,
    ) -> None:
        self.made_with = folder.settings()
        rows, classes, shown = folder.rows(), self.classes, self.made_with["shown"]
        if not rows:
            raise ValueError(f"{folder.path} holds no predicted slide; {folder.failed.path} may say why")
        # Taken out of the settings, which evaluation.json repeats: it need not name patients that are not scored.
        self.split = ScoredSplit(rows, split_name, self.made_with.pop(TRAINING_PATIENTS, ()))
        required = ("slide", "label") if annotations is None else ("slide",)
        table = None if labels is None else read_table(labels, required)
        self.patient = patients_of(rows, table, patient_pattern)
        positive = positive_class(classes, positive_name or self.made_with["positive_class"])
        class_map = ClassMap.parse(self.made_with["class_map"])
        self.labelled: LabelledPredictions | None = None
        self.estimates: dict[tuple[str, str], Estimate] = {}
        self.notes: list[str] = []
        patients_alone: list[str] = []
        if table is not None and "label" in table.roles:
            drawn = {original(row["label"]) for row in table.rows}
            names = {name for each in drawn if (name := scored_class(each, class_map)) is not None}
            # app.train takes such a table for its patients, too: annotations name the classes.
            segments = annotations is not None and self.made_with["task"] == "segment"
            if segments and not (names and names.issubset(classes)):
                strange = listed(sorted(names - {*classes})) or "nothing"
                what = f"its labels are not all classes of the model ({', '.join(classes)}), but {strange}"
                patients_alone = [f"labels {labels}: {what}; only its patients are used"]
            else:
                self.labelled = labelled_slides(self.split.rows, classes, table, self.patient, positive, class_map)
                self.estimates, self.notes = _estimates(self.labelled, classes, self.patient)
                self.notes += _failed_slides(folder, table, classes, class_map)
        if annotations is not None and not shown:
            raise ValueError(
                f"--annotations {annotations}: {folder.path} holds scores of whole slides and no areas: leave them out"
            )
        self.areas: AreaScores | None = None
        self.dice: dict[str, Estimate] = {}
        self.iou: dict[str, Estimate] = {}
        if annotations is not None:
            ids = [row["slide"] for row in self.split.rows]
            self.areas = AreaScores(folder, ids, shown, annotations, class_map)
            self.areas.left_out += patients_alone
            self.dice, self.iou = (
                _of_classes(self.areas, values, self.patient) for values in (self.areas.dice, self.areas.iou)
            )

    @property
    def scored(self) -> list[str]:
        """Slides with a label or an annotation, sorted."""
        labelled = () if self.labelled is None else self.labelled.slides
        return sorted({*labelled, *(() if self.areas is None else self.areas.slides)})

    @property
    def unit(self) -> str:
        """Word for what has a score: a picture, where whole pictures are classified, else a slide."""
        return "picture" if self.made_with["whole_pictures"] else "slide"

    def name_of(self, unit: str, measure: str) -> str:
        return f"{self.unit if unit == 'slide' else unit} {NAMES[measure]}"

    @property
    def classes(self) -> list[str]:
        """Names, in the order of the scores."""
        classes: list[str] = self.made_with["classes"]
        return classes

    def figures(self) -> dict[str, Any]:
        """Return all figures, as JSON can hold them."""
        figures: dict[str, Any] = {
            "predictions": self.made_with,
            "split": self.split.name,
            "predicted_slides": dict(self.split.counts),
            "training_slides": self.split.trained(self.scored),
            "slides_of_training_patients": self.split.of_trained_patients(self.scored, self.patient),
            "patients_unknown": sorted(set(self.scored) - set(self.patient)),
        }
        if self.labelled is not None:
            cases, reliability = self.labelled.cases, self.labelled.calibration
            figures["slides"] = len(cases.label)
            figures["patients"] = self._patients(self.labelled.slides)
            for (unit, name), estimate in self.estimates.items():
                figures[f"{unit}_{name}"] = asdict(estimate)
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
            for key, name in (("froc", "score"), ("lesions", "lesions"), ("detections", "detections")):
                figures[key] = {of_class: getattr(curve, name) for of_class, curve in self.areas.froc.items()}
            figures["annotated_slides"] = len(self.areas.slides)
            figures["annotations_left_out"] = list(self.areas.left_out)
        return figures

    def lines(self) -> list[str]:
        lines = self.head()
        if self.labelled is not None:
            cases, patients = self.labelled.cases, self._patients(self.labelled.slides)
            of_patients = f" of {counted(patients, 'patient')}" if patients else ""
            lines.append(f"{counted(len(cases.label), self.unit)}{of_patients} with a label")
            lines += [f"{self.name_of(*key)} {estimate}" for key, estimate in self.estimates.items()]
            lines.append(f"calibration error {self.labelled.calibration.error:.4f}")
            lines += [*self.labelled.left_out, *self.notes]
        if self.areas is not None:
            lines.append(f"{counted(len(self.areas.slides), 'slide')} with annotations")
            for name in self.areas.classes:
                curve = self.areas.froc[name]
                counts = f"{counted(curve.lesions, 'lesion')}, {counted(curve.detections, 'detection')}"
                froc = f"FROC {number_text(curve.score)} ({counts})"
                froc = f"no FROC ({counts}: {curve.reason})" if curve.reason else froc
                lines.append(f"{name}: Dice {self.dice[name]}, IoU {self.iou[name]}, {froc}")
            lines += self.areas.left_out
        return lines

    def head(self) -> list[str]:
        """Return lines about which slides are scored, which of them or their patients were trained on, and unknown
        patients."""
        lines, scored = [self.split.line()], self.scored
        if trained := self.split.trained(scored):
            lines.append(f"{len(trained)} of {len(scored)} scored slides are training slides: {listed(trained)}")
        if others := self.split.of_trained_patients(scored, self.patient):
            lines.append(
                f"{len(others)} of {len(scored)} scored slides have the names of training patients: {listed(others)}"
            )
        note = patient_note(self.patient, scored, "resampled")
        return lines if note is None else [*lines, note]

    def _patients(self, slides: Sequence[str]) -> int | None:
        """Number of patients, each slide of an unknown patient counting as one; None where none is known."""
        known = any(slide in self.patient for slide in slides)
        return len({self.patient.get(slide, slide) for slide in slides}) if known else None


def _estimates(
    labelled: LabelledPredictions, classes: Sequence[str], patient: Mapping[str, str]
) -> tuple[dict[tuple[str, str], Estimate], list[str]]:
    """Estimates of slides and of patients, the latter where any is known, and lines about patients left out, AUPRC
    without a positive class, and classes without a slide."""
    units = {"slide": labelled.cases}
    notes: list[str] = []
    of_both = labelled.cases.positive is None and len(classes) == 2
    if of_both:
        named = " or ".join(f"--positive-class {name}" for name in classes)
        notes.append(f"AUPRC is the mean of both classes: give {named} for that of one")
    present = np.unique(labelled.cases.label).tolist()
    if absent := [name for number, name in enumerate(classes) if number not in present]:
        means = "AUC, AUPRC and balanced accuracy are means over the other classes"
        if len(present) == 1:
            means = "AUC and AUPRC need two classes, and balanced accuracy is that of the other class alone"
        notes.append(f"no scored slide is {' or '.join(absent)}: {means}")
    if any(slide in patient for slide in labelled.slides):
        names = np.unique([patient.get(slide, slide) for slide in labelled.slides])
        if of_both and len(names) < len(labelled.slides):
            raise ValueError(
                "a patient has the positive class where one slide has it, and their names do not tell which that is: "
                f"give --positive-class {classes[0]} or --positive-class {classes[1]}"
            )
        units["patient"], mixed = by_patient(labelled.cases)
        if len(mixed):
            what = f"{counted(len(mixed), 'patient')} with slides of several classes, without a score"
            notes.append(f"{what}: {listed(names[mixed].tolist())}")
    estimates = {
        (unit, name): with_interval(cases, measure)
        for unit, cases in units.items()
        for name, measure in MEASURES.items()
    }
    return estimates, notes


def _failed_slides(folder: PredictionFolder, table: Table, classes: Sequence[str], class_map: ClassMap) -> list[str]:
    """Line about slides that have a label and could not be predicted, if there are any."""
    names = SlideNames(slide for slide, step, _ in folder.failed.rows() if step == "predict")
    labelled = [row["slide"] for row in table.rows if scored_class(original(row["label"]), class_map) in classes]
    failed = sorted({slide for name in labelled if (slide := names.match(original(name))) is not None})
    what = f"no score of {counted(len(failed), 'slide')} with a label that could not be predicted"
    return [f"{what} (see {folder.failed.path}): {listed(failed)}"] if failed else []


def _of_classes(areas: AreaScores, values: NDArray[np.float64], patients: dict[str, str]) -> dict[str, Estimate]:
    """Means of each class over the slides that have it."""
    _, patient = np.unique([patients.get(slide, slide) for slide in areas.slides], return_inverse=True)
    columns = dict(zip(areas.classes, values.T, strict=True))

    def estimate(values: NDArray[np.float64]) -> Estimate:
        return bootstrap(patient, lambda rows: mean_defined(values[rows]))

    return {name: estimate(values) for name, values in columns.items()}
