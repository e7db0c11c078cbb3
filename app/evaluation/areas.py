"""Predicted areas held against annotations: Dice and IoU of each class, lesions found, and pictures of both.

Takes a folder of predictions and the annotations of its slides; returns an ``AreaScores``. Both are compared on the map
that areas were drawn around, px by px, a px having the class of its centre; px that are annotated to be ignored do not
count.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import cv2
import numpy as np
from numpy.typing import NDArray

from app.evaluation.froc import Froc, SlideHits, froc, hits
from app.pages.overlays import colour_of
from app.prediction.prediction_folder import PredictionFolder
from models.losses import IGNORE
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import listed, read_rows
from pipelines.labels.annotation_files import annotations_in
from pipelines.labels.annotations import SlideAnnotations, read_annotations
from pipelines.labels.class_names import ClassMap
from pipelines.slides.geometry import Bounds, Level, Region
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import LevelReader, Slide, SlideError

log = logging.getLogger(__name__)

BAND_ROWS = 1024
"""Rows of annotations painted at a time."""

PICTURE_PX = 480
"""Longer side of a picture of a mask."""

Masks = NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class AreaScores:
    """Scores of areas.

    Attributes:
        slides: in order.
        classes: that model and annotations both have.
        dice, iou: float64 (slides, classes); NaN where a class is neither true nor predicted.
        froc: by class.
        pictures: PNG of the true and the predicted mask of each slide, side by side.
        left_out: a line for each slide that takes no part, with why, and one for annotated classes that do not.
    """

    slides: tuple[str, ...]
    classes: tuple[str, ...]
    dice: NDArray[np.float64]
    iou: NDArray[np.float64]
    froc: dict[str, Froc]
    pictures: dict[str, bytes]
    left_out: tuple[str, ...]


def score_areas(
    folder: PredictionFolder,
    slide_ids: Collection[str],
    shown: Sequence[str],
    annotations: Path,
    class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
) -> AreaScores:
    """Return the scores of the areas in ``folder``.

    Args:
        slide_ids: slides to score.
        shown: classes that areas were drawn of, in the order of the masks' values from 1.
        annotations: folder of annotations by slide name.
        class_map: classes of the annotations by other names, as in training.

    Raises:
        ValueError: no annotation fits, or its classes are others than the model's.
    """
    all_records = {record["row"]["slide"]: record["canvas"] for record in folder.records()}
    records = {slide_id: all_records[slide_id] for slide_id in slide_ids}
    specs = [SlideSpec(slide_id, Path(slide_id)) for slide_id in records]
    files = annotations_in(annotations, specs)
    truth = read_annotations(files, specs, {}, class_map=class_map, of_training=False)
    classes = [name for name in shown if name in truth.classes]
    if not classes:
        raise ValueError(
            f"--annotations {annotations} have the classes {', '.join(truth.classes[1:])}; the model predicts "
            f"{', '.join(shown)}: name them alike"
        )
    left_out = [f"{slide_id}: {why}" for slide_id, why in truth.failed.items()]
    left_out += [f"{slide_id}: no annotation" for slide_id in truth.unlabelled]
    if others := [name for name in truth.classes[1:] if name not in shown]:
        left_out.append(f"annotated classes without predicted areas count as background: {listed(others)}")
    slides, dice, iou, pictures = [], [], [], {}
    found: dict[str, list[SlideHits]] = {name: [] for name in classes}
    for slide_id in sorted(truth.paths):
        try:
            canvas = records[slide_id]
            width, height = canvas["l0_size"]
            if outside := truth.outside(slide_id, width, height, Bounds(*canvas["l0_bounds"])):
                log.warning("%s: %s", slide_id, outside)
            true = true_mask(truth, slide_id, canvas)
        except SlideError as fault:
            left_out.append(f"{slide_id}: {fault}")
            continue
        predicted = cv2.imdecode(np.fromfile(folder.mask(slide_id), np.uint8), cv2.IMREAD_UNCHANGED)
        assert predicted is not None, folder.mask(slide_id)
        counted = true != IGNORE
        pairs = [
            ((true == truth.classes.index(name)), (predicted == shown.index(name) + 1) & counted) for name in classes
        ]
        dice.append([_ratio(2 * int((a & b).sum()), int(a.sum()) + int(b.sum())) for a, b in pairs])
        iou.append([_ratio(int((a & b).sum()), int((a | b).sum())) for a, b in pairs])
        for name, (lesions, _) in zip(classes, pairs, strict=True):
            detections = _detections(folder.areas(slide_id), name, canvas["l0_px"])
            found[name].append(hits(lesions, canvas["mpp"] * canvas["l0_px"], detections))
        pictures[slide_id] = _picture([[mask for mask, _ in pairs], [mask for _, mask in pairs]])
        slides.append(slide_id)
    if not slides:
        raise ValueError(f"--annotations {annotations}: none can be held against a prediction: {'; '.join(left_out)}")
    return AreaScores(
        tuple(slides),
        tuple(classes),
        np.array(dice, np.float64),
        np.array(iou, np.float64),
        {name: froc(of_class) for name, of_class in found.items()},
        pictures,
        tuple(left_out),
    )


def true_mask(truth: SlideAnnotations, slide_id: str, canvas: Mapping[str, Any]) -> Masks:
    """Return the class of each px of a slide's map, uint8 (height, width).

    Raises:
        SlideError: the annotation is damaged, or of another slide.
    """
    bounds, mpp = Bounds(*canvas["l0_bounds"]), canvas["mpp"]
    width, height = canvas["l0_size"]
    # An annotation wants to know where a slide lies, not its pixels.
    placed = PyramidSlide(Path(slide_id), cast(LevelReader, None), (Level(0, width, height, 1.0, mpp),), bounds)
    slide = cast(Slide, placed)
    mask = np.empty((canvas["height"], canvas["width"]), np.uint8)
    for row in range(0, len(mask), BAND_ROWS):
        band = mask[row : row + BAND_ROWS]
        l0_y = bounds.l0_y + round(row * canvas["l0_px"])
        region = Region(bounds.l0_x, l0_y, band.shape[1], len(band), mpp * canvas["l0_px"])
        truth.read_mask(slide_id, slide, region, band)
    return mask


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _detections(path: Path, name: str, l0_px: float) -> list[tuple[int, int, float]]:
    """Areas of a class as px (x, y) of the map, where it is likeliest, and that probability."""
    with path.open(newline="", encoding="utf-8") as file:
        return [
            (int(float(row["l0_x"]) / l0_px), int(float(row["l0_y"]) / l0_px), float(row["max_probability"]))
            for row in read_rows(file)
            if row["class"] == name
        ]


def _picture(sides: Sequence[Sequence[NDArray[np.bool_]]]) -> bytes:
    """A PNG of masks beside each other, a colour for each class."""
    drawn = []
    for masks in sides:
        height, width = masks[0].shape
        factor = max(1.0, max(height, width) / PICTURE_PX)
        size = (max(1, round(width / factor)), max(1, round(height / factor)))
        picture = np.full((size[1], size[0], 3), 245, np.float32)
        for number, mask in enumerate(masks):
            share = cv2.resize(mask.astype(np.float32), size, interpolation=cv2.INTER_AREA)[..., None]
            picture += share * (np.array(colour_of(number), np.float32) - picture)
        drawn.append(picture)
    between = np.full((drawn[0].shape[0], 8, 3), 128, np.float32)
    done, png = cv2.imencode(".png", np.concatenate([drawn[0], between, drawn[1]], 1)[..., ::-1].astype(np.uint8))
    assert done
    return png.tobytes()
