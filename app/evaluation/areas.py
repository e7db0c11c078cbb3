"""Predicted areas compared with annotations: Dice and IoU of each class, lesions found, and pictures of both.

Takes a folder of predictions and the annotations of its slides; returns an ``AreaScores``. Both are compared on the map
that areas were drawn around, pixel by pixel, with the class of its centre; pixels annotated to be ignored do not count.
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

from app.pages.pictures import as_png, colour_of
from app.prediction.prediction_folder import PredictionFolder
from app.training.metrics import Floats
from models.losses import IGNORE
from pipelines.backends.level_reader import MemoryReader
from pipelines.catalog.catalog import SlideSpec
from pipelines.catalog.table import listed, read_rows
from pipelines.labels.annotation_files import annotations_in
from pipelines.labels.annotations import SlideAnnotations, read_annotations
from pipelines.labels.class_names import ClassMap
from pipelines.labels.rasterize import PixelGrid
from pipelines.slides.geometry import Bounds, Level
from pipelines.slides.pyramid import PyramidSlide
from pipelines.slides.slide import Slide, SlideError
from pipelines.tiles.tissue import Mask

MERGED_UM, ISOLATED_UM = 75.0, 275.0
"""CAMELYON16: lesions nearer than this are one; one whose longer axis is shorter than this is of isolated tumour cells,
which count neither way."""
FALSE_POSITIVES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
"""False alarms per slide at which the score asks for the sensitivity."""

log = logging.getLogger(__name__)
BAND_ROWS = 1024
"""Rows of annotations painted at a time."""
PICTURE_PX = 480
"""Longer side of a picture of a mask."""


@dataclass(frozen=True)
class SlideHits:
    """Lesions that the detections of one slide hit.

    Attributes:
        found: highest probability in each lesion that was hit.
        false: probability of each detection outside of all lesions.
        isolated: lesions that do not count, as they are too small.
        objects: connected areas of the true mask, before those near each other are merged.
    """

    lesions: int
    found: tuple[float, ...]
    false: tuple[float, ...]
    isolated: int = 0
    objects: int = 0
    detections: int = 0


def match_detections(mask: Mask, mpp: float, detections: Sequence[tuple[int, int, float]]) -> SlideHits:
    """Return what ``detections`` (x, y, probability) hit on a slide.

    Args:
        mask: bool (h, w), true lesions.
        mpp: um of its px.
    """
    lesions, isolated = _lesions(mask, mpp)
    highest: dict[int, float] = {}
    false = []
    for x, y, probability in detections:
        inside = 0 <= y < mask.shape[0] and 0 <= x < mask.shape[1]
        lesion = int(lesions[y, x]) if inside else 0
        if lesion == 0:
            false.append(probability)
        elif lesion not in isolated:
            highest[lesion] = max(highest.get(lesion, 0.0), probability)
    objects, _ = cv2.connectedComponents(mask.view(np.uint8), connectivity=8)
    counts = len(isolated), objects - 1, len(detections)
    return SlideHits(int(lesions.max()) - len(isolated), tuple(highest.values()), tuple(false), *counts)


def _lesions(mask: Mask, mpp: float) -> tuple[NDArray[np.int32], set[int]]:
    """Return the number of the lesion at each pixel, from 1, and those of isolated cells."""
    if not mask.any():
        return np.zeros(mask.shape, np.int32), set()
    distance = cv2.distanceTransform((~mask).view(np.uint8), cv2.DIST_L2, cv2.DIST_MASK_PRECISE)
    near = np.pad((distance < MERGED_UM / mpp / 2) | mask, 1)  # with a rim from which holes cannot be reached
    _, background = cv2.connectedComponents((~near).view(np.uint8), connectivity=4)
    filled = (background != background[0, 0])[1:-1, 1:-1]
    _, labels = cv2.connectedComponents(filled.view(np.uint8), connectivity=8, ltype=cv2.CV_32S)
    isolated = np.flatnonzero(_major_axes(labels) * mpp < ISOLATED_UM) + 1
    return labels, set(isolated.tolist())


def _major_axes(labels: NDArray[np.int32]) -> Floats:
    """Return the major axis, px, of the ellipse with the second moments of each label from 1, in one pass."""
    rows, columns = np.nonzero(labels)
    label = labels[rows, columns] - 1
    count = np.bincount(label).astype(np.float64)
    x, y = (axis - (np.bincount(label, axis) / count)[label] for axis in (columns, rows))
    xx, yy, xy = (np.bincount(label, product) / count for product in (x * x, y * y, x * y))
    xx, yy = xx + 1 / 12, yy + 1 / 12  # a px is a square, not a point
    longest: Floats = 4 * np.sqrt((xx + yy) / 2 + np.sqrt(((xx - yy) / 2) ** 2 + xy**2))
    return longest


class Froc:
    """The curve over all slides, from the highest threshold to the lowest; it means nothing without a lesion, and where
    most objects are merged, as nuclei are: a hit anywhere then finds all of them.

    Attributes:
        fp_per_slide, sensitivity: (n,) false alarms per slide, and part of the lesions found.
        score: mean sensitivity at ``FALSE_POSITIVES``; None where the curve means nothing.
        reason: why the curve means nothing; empty where it does.
    """

    def __init__(self, slides: Sequence[SlideHits]) -> None:
        self.lesions = sum(slide.lesions for slide in slides)
        self.detections = sum(slide.detections for slide in slides)
        found = np.sort([p for slide in slides for p in slide.found])
        false = np.sort([p for slide in slides for p in slide.false])
        thresholds = np.unique(np.concatenate([found, false]))[::-1]
        alarms, hits = ((len(each) - np.searchsorted(each, thresholds)) for each in (false, found))
        self.fp_per_slide = np.array([0.0, *(alarms / max(1, len(slides)))])
        self.sensitivity = np.array([0.0, *(hits / max(1, self.lesions))])
        objects, kept = sum(slide.objects for slide in slides), self.lesions + sum(slide.isolated for slide in slides)
        self.reason = ""
        if not self.lesions:
            self.reason = f"no lesion of {ISOLATED_UM:g} um or more"
        elif 2 * kept < objects:
            self.reason = (
                f"{objects} annotated objects merge into {kept}, those within {MERGED_UM:g} um being one lesion"
            )
        score = float(np.mean(np.interp(FALSE_POSITIVES, self.fp_per_slide, self.sensitivity)))
        self.score = None if self.reason else score


class AreaScores:
    """Scores of the areas in ``folder``.

    Args:
        shown: classes that areas were drawn of, in the order of the masks' values from 1.
        class_map: classes of the annotations by other names, as in training.

    Attributes:
        classes: that model and annotations both have; where nothing is annotated, those of the model.
        dice, iou: float64 (slides, classes); NaN where a class is neither true nor predicted.
        pictures: PNG of the true and the predicted mask of each slide, side by side.
        left_out: a line for each slide that takes no part, with why, and for classes that only one side has.

    Raises:
        ValueError: no annotation fits, or its classes are others than the model's.
    """

    def __init__(
        self,
        folder: PredictionFolder,
        slide_ids: Collection[str],
        shown: Sequence[str],
        annotations: Path,
        class_map: ClassMap = ClassMap(),  # noqa: B008 - frozen
    ) -> None:
        all_records = {record["row"]["slide"]: record["canvas"] for record in folder.records()}
        records = {slide_id: all_records[slide_id] for slide_id in slide_ids}
        specs = [SlideSpec(slide_id, _slide_of(slide_id, canvas)) for slide_id, canvas in records.items()]
        files = annotations_in(annotations, specs)
        truth = read_annotations(files, specs, {}, class_map=class_map, known=shown)
        seen = set().union(*truth.visible.values())  # classes.txt may name classes that no mask has
        annotated = [name for name in truth.classes[1:] if name in seen]
        self.classes = classes = [name for name in shown if name in annotated or not annotated]
        if not classes:
            raise ValueError(
                f"--annotations {annotations} have the classes {', '.join(annotated)}; the model predicts "
                f"{', '.join(shown)}: name them alike"
            )
        self.left_out = left_out = [f"{slide_id}: {why}" for slide_id, why in truth.failed.items()]
        left_out += [f"{slide_id}: no annotation" for slide_id in truth.unlabelled]
        if others := [name for name in annotated if name not in shown]:
            left_out.append(f"annotated classes without predicted areas count as background: {listed(others)}")
        if others := [name for name in shown if name not in classes]:
            left_out.append(f"predicted classes that no annotation has are not scored: {listed(others)}")
        self.slides: list[str] = []
        self.pictures: dict[str, bytes] = {}
        dice, iou = [], []
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
            predicted = cv2.imdecode(np.fromfile(folder.file("masks", slide_id), np.uint8), cv2.IMREAD_UNCHANGED)
            assert predicted is not None, folder.file("masks", slide_id)
            counted = true != IGNORE
            pairs = [
                (
                    true == truth.classes.index(name) if annotated else np.zeros_like(counted),
                    (predicted == shown.index(name) + 1) & counted,
                )
                for name in classes
            ]
            dice.append([_ratio(2 * int((a & b).sum()), int(a.sum()) + int(b.sum())) for a, b in pairs])
            iou.append([_ratio(int((a & b).sum()), int((a | b).sum())) for a, b in pairs])
            for name, (lesions, _) in zip(classes, pairs, strict=True):
                every = _detections(folder.file("areas", slide_id), name, canvas["l0_px"])
                detections = [each for each in every if counted[each[1], each[0]]]
                found[name].append(match_detections(lesions, canvas["mpp"] * canvas["l0_px"], detections))
            self.pictures[slide_id] = _picture([[mask for mask, _ in pairs], [mask for _, mask in pairs]])
            self.slides.append(slide_id)
        if not self.slides:
            raise ValueError(
                f"--annotations {annotations}: none can be compared with a prediction: {'; '.join(left_out)}"
            )
        self.dice, self.iou = np.array(dice, np.float64), np.array(iou, np.float64)
        self.froc = {name: Froc(of_class) for name, of_class in found.items()}


def true_mask(truth: SlideAnnotations, slide_id: str, canvas: Mapping[str, Any]) -> NDArray[np.uint8]:
    """Return the class of each pixel of a slide's map, uint8 (height, width).

    Raises:
        SlideError: the annotation is damaged, or of another slide.
    """
    bounds, mpp = Bounds(*canvas["l0_bounds"]), canvas["mpp"]
    width, height = canvas["l0_size"]
    # An annotation wants to know where a slide lies, not its pixels.
    placed = PyramidSlide(Path(slide_id), MemoryReader(()), (Level(0, width, height, 1.0, mpp),), bounds)
    slide = cast(Slide, placed)
    mask = np.empty((canvas["height"], canvas["width"]), np.uint8)
    step = canvas["l0_px"], canvas["l0_px"]
    for row in range(0, len(mask), BAND_ROWS):
        band = mask[row : row + BAND_ROWS]
        grid = PixelGrid(bounds.l0_x, bounds.l0_y, *step, band.shape[1], len(band), first_y=row)
        truth.read_mask(slide_id, slide, grid, band)
    return mask


def _slide_of(slide_id: str, canvas: Mapping[str, Any]) -> Path:
    """Return the file that was predicted, which a DICOM Segmentation may name; the slide's name where it is gone."""
    path = Path(canvas.get("path", slide_id))
    return path if path.is_file() else Path(slide_id)


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
    return as_png(np.concatenate([drawn[0], between, drawn[1]], 1).astype(np.uint8))
