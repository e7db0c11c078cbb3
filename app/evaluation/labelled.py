"""True classes of slides, from a table, with the scores that the slides were given; and the patients of slides.

Takes the rows of predicted slides and a table; returns ``Cases``. A slide without a label, or a label without a
prediction, takes no part and is named.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from app.evaluation.classification import Cases
from pipelines.catalog.catalog import SlideNames
from pipelines.catalog.table import Table, counted, listed, read_table, shown
from pipelines.labels.class_names import IGNORED_CLASS, ClassMap, known_patients

PREFERRED = ("test", "val", "external", "unknown")
"""Without ``--split`` the first of these that has a slide is scored: slides that were never looked at, those that chose
the checkpoint, those that the run did not have, those of checkpoints that record no split. Never training slides."""

Rows = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ScoredSplit:
    """The split that is scored.

    Attributes:
        name: train, val, test, external, unknown, or all.
        rows: predicted slides in it.
        counts: predicted slides of each split.
    """

    name: str
    rows: Rows
    counts: Mapping[str, int]

    def lines(self) -> list[str]:
        """Return what is scored and what is not."""
        others = ", ".join(f"{name} {count}" for name, count in self.counts.items() if self.name not in (name, "all"))
        left = f"; predicted and not scored: {others} (--split)" if others else ""
        lines = [f"scored split: {self.name}, {counted(len(self.rows), 'slide')}{left}"]
        if self.name == "unknown" or (self.name == "all" and "unknown" in self.counts):
            lines.append(
                "the checkpoint does not record the split of its run: training slides may be among those scored"
            )
        return lines

    def trained(self, scored: Sequence[str]) -> tuple[str, ...]:
        """Return the slides of ``scored`` that the run trained on, or on other slides of their patients."""
        train = {row["slide"] for row in self.rows if row["split"] == "train"}
        return tuple(slide for slide in scored if slide in train)


def choose_split(rows: Rows, asked: str | None) -> ScoredSplit:
    """Return the split to score.

    Args:
        rows: of all predicted slides.
        asked: ``--split``; None: the first of ``PREFERRED`` that has slides.

    Raises:
        ValueError: no predicted slide is in it.
    """
    counts = dict(sorted(Counter(row["split"] for row in rows).items()))
    name = asked or next((name for name in PREFERRED if name in counts), None)
    kept = [row for row in rows if name in (row["split"], "all")]
    if not kept:
        have = ", ".join(f"{name} {count}" for name, count in counts.items())
        what = f"--split {asked} has no predicted slide" if asked else "all predicted slides are training slides"
        raise ValueError(
            f"{what}: the predictions have {have}. Predict slides that the model was not trained on, or score these "
            f"with --split {next(iter(counts))}"
        )
    assert name is not None
    return ScoredSplit(name, kept, counts)


def training_note(trained: Sequence[str], scored: int) -> str:
    """Return a line that names training slides in a score."""
    return f"{len(trained)} of {scored} scored slides are training slides: {listed(trained)}"


@dataclass(frozen=True, eq=False)
class LabelledSlides:
    """Slides that have a prediction and a label, in order.

    Attributes:
        cases: of the slides; the patient of a slide whose patient is unknown is the slide.
        left_out: a line for each kind of slide that takes no part.
    """

    slides: tuple[str, ...]
    cases: Cases
    left_out: tuple[str, ...]


def read_truth(path: Path, *, needs_labels: bool) -> Table:
    """Return the table of ``--labels``, whose column label may be missing where annotations are scored.

    Raises:
        ValueError: it cannot be read.
    """
    table = read_table(path, ("slide",))
    return read_table(path, ("slide", "label")) if needs_labels or "label" in table.roles else table


def patients_of(rows: Sequence[Mapping[str, Any]], table: Table | None, pattern: str | None) -> dict[str, str]:
    """Return the patient of every slide of ``rows`` whose patient is known: by the table, by ``--patient-pattern``, or
    as the predictions record it.

    Raises:
        ValueError: the table names two patients of a slide, or the pattern finds none.
    """
    names = SlideNames(row["slide"] for row in rows)
    named: dict[str, str] = {}
    faults = []
    for line in () if table is None else table.rows:
        slide = names.match(line["slide"])
        if slide is not None and line["patient"] and named.setdefault(slide, line["patient"]) != line["patient"]:
            faults.append(f"line {line.line}: slide {slide!r} has two patients; keep one")
    if table is not None and faults:
        raise ValueError(f"labels {table.path}: {shown(faults)}")
    if pattern is not None:
        named = known_patients([row["slide"] for row in rows], named, pattern)
    return {row["slide"]: row["patient"] for row in rows if row["patient"]} | named


def labelled_slides(
    rows: Sequence[Mapping[str, Any]],
    classes: Sequence[str],
    table: Table,
    patient: Mapping[str, str],
    positive: int | None,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
) -> LabelledSlides:
    """Return the slides of ``rows`` (of ``slides.csv``) with the labels of ``table``.

    Args:
        patient: of every slide whose patient is known.
        positive: index of the positive class of two; None: there is none.
        class_map: classes of the table by other names, as in training.

    Raises:
        ValueError: the table has labels that are no classes of the model, or fits no slide.
    """
    names = SlideNames(row["slide"] for row in rows)
    label: dict[str, int] = {}
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
    cases = Cases(
        np.array([[row[f"score_{name}"] for name in classes] for row in kept], np.float64),
        np.array([label[row["slide"]] for row in kept], np.int64),
        numbers.astype(np.int64),
        positive,
    )
    return LabelledSlides(tuple(row["slide"] for row in kept), cases, tuple(left_out))
