"""The page of an evaluation: figures, curves, tables, and true areas next to predicted ones, and the tiles
that the model is most and least certain of.
"""

from __future__ import annotations

import base64
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from sklearn.metrics import precision_recall_curve, roc_curve

from app.evaluation.areas import FALSE_POSITIVES, AreaScores
from app.evaluation.classification import Calibration, Cases, calibration, confusion
from app.evaluation.report import Evaluation
from app.pages.charts import Chart, Series, line_chart
from app.pages.html import Card, Table, format_value, rendered
from app.prediction.prediction_folder import PredictionFolder
from app.training.metrics import mean_defined
from parallel.units import number_text
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.table import counted, read_rows
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.slides.whole_files import write_text
from pipelines.stream.read import centre


@dataclass(frozen=True, eq=False)
class EvaluationPage:
    """Content of the page.

    Attributes:
        name: of the predictions.
        what: a few words about them.
        cards: the figures that count.
        charts: curves.
        tables: by heading.
        pictures: PNG by caption: true areas on the left, predicted ones on the right.
        tiles: PNG by caption: tiles that the model is most and least certain of.
        notes: lines about what is scored and what takes no part.
    """

    name: str
    what: Sequence[str]
    cards: Sequence[Card]
    charts: Sequence[Chart]
    tables: Mapping[str, Table]
    pictures: Mapping[str, bytes] = field(default_factory=dict)
    tiles: Mapping[str, bytes] = field(default_factory=dict)
    notes: Sequence[str] = ()

    def write(self, path: Path) -> Path:
        """Write the page and give its path."""
        return write_text(
            path,
            rendered(
                "evaluation.html.j2",
                name=self.name,
                what=self.what,
                cards=self.cards,
                charts=self.charts,
                tables=dict(self.tables),
                pictures=_as_text(self.pictures),
                tiles=_as_text(self.tiles),
                notes=self.notes,
            ),
        )


def _as_text(pictures: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [(name, base64.b64encode(png).decode()) for name, png in pictures.items()]


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


SHOWN, PICTURE_PX = 6, 192
"""Tiles of each kind, and the side of their pictures."""


Tile = tuple[float, str, int, int, str]
"""Certainty, slide, l0_x, l0_y, and the class that covers most."""


def extreme_tiles(of_slides: Iterable[list[Tile]]) -> list[Tile]:
    """Return the ``SHOWN`` tiles of the least and of the most certainty; tiles of one slide at a time are held."""
    least: list[Tile] = []
    most: list[Tile] = []
    for tiles in of_slides:
        least = heapq.nsmallest(SHOWN, [*least, *tiles])
        most = heapq.nlargest(SHOWN, [*most, *tiles])
    return list(dict.fromkeys([*least, *most]))


def certain_tiles(
    folder: PredictionFolder, slide_ids: Sequence[str], slides: Path, made_with: dict[str, Any]
) -> dict[str, bytes]:
    """Return pictures of the `extreme_tiles` of ``slide_ids``; none of a model that looks at slides as one image."""
    if made_with["tile"] == "slide":
        return {}
    classes = made_with["classes"]
    whole = made_with["whole_pictures"]
    specs = {spec.slide_id: spec for spec in find_slides(slides, whole_pictures=whole)}
    openings = {record["row"]["slide"]: record["opening"] for record in folder.records()}
    pictures = {}
    for certainty, slide_id, l0_x, l0_y, name in extreme_tiles(_tiles(folder, each, classes) for each in slide_ids):
        try:
            with replace(specs[slide_id], **openings[slide_id]).open() as slide:
                if whole:
                    level = slide.levels[0]
                    pixels = centre(slide.read(Region(0, 0, level.width, level.height, level.mpp)), made_with["tile"])
                else:
                    pixels = slide.read(Region(l0_x, l0_y, made_with["tile"], made_with["tile"], made_with["mpp"]))
        except (KeyError, SlideError):
            continue
        small = cv2.resize(pixels, (PICTURE_PX, PICTURE_PX), interpolation=cv2.INTER_AREA)
        caption = f"{name} {certainty:.3f}, {slide_id} at {l0_x}, {l0_y}"
        pictures[caption] = cv2.imencode(".png", small[..., ::-1])[1].tobytes()
    return pictures


def _tiles(folder: PredictionFolder, slide_id: str, classes: Sequence[str]) -> list[Tile]:
    """The tiles of a slide that could be read."""
    tiles: list[Tile] = []
    with folder.tiles(slide_id).open(newline="", encoding="utf-8") as file:
        for tile in read_rows(file):
            scores = [float(tile[f"score_{name}"]) for name in classes if tile[f"score_{name}"]]
            if scores:
                place = slide_id, int(tile["l0_x"]), int(tile["l0_y"])
                tiles.append((float(tile["certainty"]), *place, classes[int(np.argmax(scores))]))
    return tiles


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
                (
                    slide,
                    *(number_text(None if math.isnan(v) else v) for pair in zip(dice, iou, strict=True) for v in pair),
                )
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


def _looked_at(made_with: dict[str, Any]) -> str:
    if made_with["whole_pictures"]:
        return f"whole pictures, resized to {made_with['tile']} px"
    what = "whole slides" if made_with["tile"] == "slide" else f"tiles of {made_with['tile']} px"
    return f"{what} at {made_with['mpp']:g} µm/px"
