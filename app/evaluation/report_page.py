"""The page of an evaluation: figures, curves, tables, and true areas next to predicted ones, and the tiles
that the model is most and least certain of.
"""

from __future__ import annotations

import base64
import functools
import heapq
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from sklearn.metrics import precision_recall_curve, roc_curve

from app.evaluation.areas import FALSE_POSITIVES, AreaScores
from app.evaluation.classification import (
    CONFIDENCE,
    RESAMPLES,
    Calibration,
    LabelledPredictions,
    Predictions,
    confusion,
)
from app.evaluation.report import NAMES, Evaluation
from app.pages.html import Card, Chart, Series, Table, format_value, line_chart, rendered
from app.pages.pictures import as_png
from app.prediction.prediction_folder import PredictionFolder
from app.training.metrics import mean_defined
from parallel.units import number_text
from pipelines.catalog.catalog import find_slides
from pipelines.catalog.table import counted, read_rows
from pipelines.slides.geometry import Region
from pipelines.slides.slide import SlideError
from pipelines.slides.whole_files import write_text
from pipelines.stream.read import centre

_share_chart = functools.partial(line_chart, from_zero=True, linear=True, last=False)
"""Line chart of shares."""
SHOWN, PICTURE_PX = 6, 192
"""Tiles of each kind, and the side of their pictures."""
Tile = tuple[float, str, int, int, str]
"""Certainty, slide, l0_x, l0_y, and the class that covers most."""
MOST_PICTURES = 60
"""Slides whose areas the report shows; of five hundred the page would be 20 MB."""


def classification_charts(cases: Predictions, classes: list[str]) -> list[Chart]:
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
        _share_chart(roc, "ROC of slides", "true positive rate", x_label="false positive rate"),
        _share_chart(precision, "Precision and recall of slides", "precision", x_label="recall"),
    ]


def reliability_chart(reliability: Calibration) -> Chart:
    """Return how often slides are right, by how certain the model is of them."""
    diagonal = np.array([0.0, 1.0])
    ideal = Series("certain as it should be", diagonal, diagonal, 5, "ideal")
    measured = Series("slides", reliability.confidence, reliability.accuracy, 0, "dots")
    title = "Reliability of slides"
    return _share_chart([ideal, measured], title, "share that is right", x_label="how certain the model is")


def froc_chart(areas: AreaScores) -> Chart:
    """Return the sensitivity of each class at the false alarms that the score asks for."""
    alarms = np.array(FALSE_POSITIVES)
    series = [
        Series(name, alarms, np.interp(alarms, curve.fp_per_slide, curve.sensitivity), number, "dots")
        for number, (name, curve) in enumerate(areas.froc.items())
        if curve.score is not None
    ]
    return _share_chart(series, "Lesions found (FROC)", "sensitivity", x_label="false alarms per slide")


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
    classes, whole = made_with["classes"], made_with["whole_pictures"]
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
        pictures[f"{name} {certainty:.3f}, {slide_id} at {l0_x}, {l0_y}"] = as_png(small)
    return pictures


def _tiles(folder: PredictionFolder, slide_id: str, classes: Sequence[str]) -> list[Tile]:
    """The tiles of a slide that could be read."""
    tiles: list[Tile] = []
    with folder.file("tiles", slide_id).open(newline="", encoding="utf-8") as file:
        for tile in read_rows(file):
            scores = [float(tile[f"score_{name}"]) for name in classes if tile[f"score_{name}"]]
            if scores:
                place = slide_id, int(tile["l0_x"]), int(tile["l0_y"])
                tiles.append((float(tile["certainty"]), *place, classes[int(np.argmax(scores))]))
    return tiles


@dataclass
class _Figures:
    """Cards, charts, tables by heading and notes of the page, in order."""

    cards: list[Card]
    charts: list[Chart]
    tables: dict[str, Table]
    notes: list[str]


def write_report(evaluation: Evaluation, folder: PredictionFolder, path: Path, slides: Path | None) -> Path:
    """Write the page of ``evaluation`` and return its path."""
    made_with, areas = evaluation.made_with, evaluation.areas
    figures = _Figures([], [], {}, evaluation.head())
    if evaluation.labelled is not None:
        _add_labelled(figures, evaluation, evaluation.labelled)
    if areas is not None:
        _add_areas(figures, evaluation, areas)
    scored = [row["slide"] for row in evaluation.split.rows]
    images = "whole slides" if made_with["tile"] == "slide" else f"tiles of {made_with['tile']} px"
    images += f" at {made_with['mpp']:g} µm/px"
    if made_with["whole_pictures"]:
        images = f"whole pictures, resized to {made_with['tile']} px"
    page = rendered(
        "evaluation.html.j2",
        name=folder.path.resolve().name,
        what=(
            *(made_with["model"], made_with["task"], images),
            f"{counted(len(scored), 'slide')} of split {evaluation.split.name}",
        ),
        pictures=_as_text({} if areas is None else _lowest(areas)),
        tiles=_as_text({} if slides is None else certain_tiles(folder, scored, slides, made_with)),
        **vars(figures),
    )
    return write_text(path, page)


def _as_text(pictures: Mapping[str, bytes]) -> list[tuple[str, str]]:
    return [(name, base64.b64encode(png).decode()) for name, png in pictures.items()]


def _add_labelled(figures: _Figures, evaluation: Evaluation, labelled: LabelledPredictions) -> None:
    cases, unit, classes = labelled.cases, evaluation.unit, evaluation.classes
    named = {evaluation.name_of(*key): estimate for key, estimate in evaluation.estimates.items()}
    figures.cards += [
        Card(name[0].upper() + name[1:], format_value(each.value), note=f"{CONFIDENCE:.0%} interval {each.interval}")
        for name, each in named.items()
        if NAMES["balanced_accuracy"] not in name and each.value is not None
    ]
    figures.charts += [*classification_charts(cases, classes), reliability_chart(labelled.calibration)]
    drawn = "patients" if evaluation.patient else f"{unit}s"
    figures.tables[f"Scores of {unit}s{' and patients' if evaluation.patient else ''}"] = Table(
        ("", "value", f"{CONFIDENCE:.0%} interval, {RESAMPLES:,} resamples of {drawn}"),
        [(name, number_text(each.value), each.interval) for name, each in named.items()]
        + [(f"calibration error of {unit}s", number_text(labelled.calibration.error), "")],
        (1,),
    )
    figures.tables[f"{unit.capitalize()}s by true class (rows) and predicted class"] = Table(
        ("", *classes),
        [(name, *map(str, row)) for name, row in zip(classes, confusion(cases).tolist(), strict=True)],
        tuple(range(1, len(classes) + 1)),
    )
    figures.notes += [*labelled.left_out, *evaluation.notes]


def _add_areas(figures: _Figures, evaluation: Evaluation, areas: AreaScores) -> None:
    curves = areas.froc
    figures.tables["Areas, by slide"] = Table(
        ("slide", *(f"{what} {name}" for name in areas.classes for what in ("Dice", "IoU"))),
        [
            (slide, *(number_text(None if math.isnan(v) else v) for pair in zip(dice, iou, strict=True) for v in pair))
            for slide, dice, iou in zip(areas.slides, areas.dice, areas.iou, strict=True)
        ],
        tuple(range(1, 2 * len(areas.classes) + 1)),
    )
    figures.cards += [
        Card(f"Dice {name}", number_text(each.value), note=f"{CONFIDENCE:.0%} interval {each.interval}")
        for name, each in evaluation.dice.items()
    ]
    scored = {name: curve for name, curve in curves.items() if curve.score is not None}
    note = "mean sensitivity at 1/4 to 8 false alarms per slide"
    figures.cards += [Card(f"FROC {name}", number_text(curve.score), note=note) for name, curve in scored.items()]
    figures.charts += [froc_chart(areas)] if scored else []
    rows = [
        (name, str(curve.lesions), str(curve.detections), f"{number_text(curve.score)} {curve.reason}".rstrip())
        for name, curve in curves.items()
    ]
    figures.tables["Lesions and detections"] = Table(("class", "lesions", "detections", "FROC"), rows, (1, 2))
    figures.notes += areas.left_out


def _lowest(areas: AreaScores) -> dict[str, bytes]:
    """Pictures of the slides of lowest Dice, those first; of a slide with neither true nor predicted areas none."""
    means = {slide: mean_defined(dice) for slide, dice in zip(areas.slides, areas.dice, strict=True)}
    known = sorted((mean, slide) for slide, mean in means.items() if mean is not None)
    return {f"{slide}, Dice {mean:.3f}": areas.pictures[slide] for mean, slide in known[:MOST_PICTURES]}
