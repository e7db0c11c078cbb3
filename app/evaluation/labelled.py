"""The classes that slides really have, from a table, beside the scores that they were given.

Takes the rows of predicted slides and a table; gives ``Cases``. A slide without a label, or a label without a
prediction, takes no part and is named.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.evaluation.classification import Cases
from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import listed, read_table, shown
from pipelines.labels.class_names import IGNORED_CLASS, ClassMap


@dataclass(frozen=True, eq=False)
class LabelledSlides:
    """Slides that have a prediction and a label, in order.

    Attributes:
        patients: names, by the number that ``cases`` have.
        left_out: a line for each kind of slide that takes no part.
    """

    slides: tuple[str, ...]
    cases: Cases
    patients: tuple[str, ...]
    left_out: tuple[str, ...]

    @property
    def patient_of(self) -> dict[str, str]:
        """Name of each slide's patient."""
        numbers = self.cases.patient.tolist()
        return {slide: self.patients[number] for slide, number in zip(self.slides, numbers, strict=True)}


def labelled_slides(
    rows: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    path: Path,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
) -> LabelledSlides:
    """Return the slides of ``rows`` (of ``slides.csv``) with the labels of the table ``path``, renamed by
    ``class_map``.

    Raises:
        ValueError: the table cannot be read, has labels that are no classes of the model, or fits no slide.
    """
    table = read_table(path, ("slide", "label"))
    names = SlideNames(row["slide"] for row in rows)
    label: dict[str, int] = {}
    patient: dict[str, str] = {}
    unknown, faults = [], []
    for line in table.rows:
        slide, name = names.match(line["slide"]), class_map.learned(line["label"])
        if slide is None:
            unknown.append(line["slide"])
        elif not line["label"] or (name != line["label"] and IGNORED_CLASS.match(name)):
            continue  # a missing value, or a class that was left out of training
        elif name not in classes:
            faults.append(f"line {line.line}: {line['label']!r} is no class of the model ({', '.join(classes)})")
        elif label.setdefault(slide, classes.index(name)) != classes.index(name):
            faults.append(f"line {line.line}: slide {slide!r} has two labels; keep one")
        else:
            patient[slide] = line["patient"] or slide
    if faults:
        raise ValueError(f"labels {path}: {shown(faults)}")
    kept = [row for row in rows if row["slide"] in label]
    if not kept:
        raise ValueError(
            f"labels {path}: no line names a slide that was predicted ({listed([row['slide'] for row in rows])})"
        )
    patients = tuple(sorted({patient[row["slide"]] for row in kept}))
    left_out = []
    if unlabelled := [row["slide"] for row in rows if row["slide"] not in label]:
        left_out.append(f"{len(unlabelled)} predicted slides have no label: {listed(unlabelled)}")
    if unknown:
        left_out.append(f"{len(unknown)} labels are for slides without a prediction: {listed(unknown)}")
    cases = Cases(
        np.array([[row[f"score_{name}"] for name in classes] for row in kept], np.float64),
        np.array([label[row["slide"]] for row in kept], np.int64),
        np.array([patients.index(patient[row["slide"]]) for row in kept], np.int64),
    )
    return LabelledSlides(tuple(row["slide"] for row in kept), cases, patients, tuple(left_out))
