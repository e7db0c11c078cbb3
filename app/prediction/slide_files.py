"""Files of one slide's prediction: tables of scores, areas as GeoJSON, table and mask, and a picture.

Takes the model's outputs for a slide; writes the files, and returns um2 of each class.
"""

from __future__ import annotations

import json
import logging
import math
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from app.pages.pictures import as_png, colour_of
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.trained_model import TrainedModel
from pipelines.backends.mask import ArrayMask
from pipelines.catalog.handles import SlideState
from pipelines.catalog.table import write_rows
from pipelines.labels.conversion import Rings, outlines
from pipelines.labels.geojson import closed_rings, signed_area
from pipelines.tiles.windows import SlideWindows

NAMESPACE = uuid.UUID("6f0c8a52-6a53-4b0e-9a3c-0d7f1c3b5e21")
"""Of the ids of features, which are the same whenever the same area is written."""
log = logging.getLogger(__name__)
MOST_AREAS = 50_000
"""Of a class and slide, as many areas are drawn, and as many holes: the largest. A model that is hardly trained gives a
hundred times as many specks."""
ROWS_AT_ONCE = 256
"""Rows of the map that are looked at together."""


def write_tiles(
    path: Path,
    classes: Sequence[str],
    places: Iterable[Sequence[int]],
    tissue: NDArray[Any],
    scores: NDArray[np.float64],
    certainty: NDArray[np.float64],
    attention: NDArray[np.float64] | None = None,
) -> None:
    """Write a row for each tile to the CSV file ``path``; the cells of a number that is NaN are empty.

    Args:
        places: l0_x, l0_y, l0_width and l0_height of each tile.
        tissue: (n,) part of each that is tissue.
        scores: (n, classes).
        certainty: (n,), 0 to 1.
        attention: (n,) weights of a model of bags.
    """
    columns = {f"score_{name}": scores[:, c] for c, name in enumerate(classes)} | {"certainty": certainty}
    columns |= {} if attention is None else {"attention": attention}
    values = np.stack([*columns.values()], 1).tolist()
    rows = [
        [*place, round(part, 4), *(None if math.isnan(value) else value for value in row)]
        for place, part, row in zip(places, tissue.tolist(), values, strict=True)
    ]
    with path.open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [["l0_x", "l0_y", "l0_width", "l0_height", "tissue", *columns], *rows])


def bag_scores(probability: NDArray[np.float64], attention: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the probabilities (classes,) of a bag.

    ``models.heads.bag_logits`` averages logits. Logarithms of probabilities differ from the logits of a tile by one
    number for all classes, and so do their averages, which softmax does not see.

    Args:
        probability: (n, classes) of each tile.
        attention: (n,) weights, 1 on average.
    """
    logits = (attention[:, None] * np.log(np.maximum(probability, np.finfo(np.float32).tiny))).mean(0)
    exponentials: NDArray[np.float64] = np.exp(logits - logits.max())
    probabilities: NDArray[np.float64] = exponentials / exponentials.sum()
    return probabilities


def slide_row(
    model: TrainedModel, slide_id: str, state: SlideState, tiles: int, unreadable: int, scores: NDArray[np.float64]
) -> dict[str, Any]:
    """Return the row of ``slides.csv`` of a slide: origin, tiles, likeliest class, and the score of each."""
    names = {f"score_{name}": float(scores[c]) for c, name in enumerate(model.classes)}
    likeliest = model.classes[int(np.argmax(scores))]
    known = {"slide": slide_id, **model.origin(slide_id, state), "tiles": tiles, "tiles_unreadable": unreadable}
    return {**known, "prediction": likeliest, **names}


def polygons_of(mask: NDArray[np.bool_]) -> list[Rings]:
    """Return the areas of ``mask`` (h, w): outer ring, then holes, corners in px.

    Args:
        mask: as ``without_saddles`` gives it: rings that touch themselves are not valid.
    """
    return outlines(ArrayMask(Path(), mask.view(np.uint8))).get(1, [])


def area_of(polygon: Rings) -> float:
    """Return the area of a polygon without its holes, in the square of the coordinates' unit."""
    outer, *holes = (abs(signed_area(ring)) for ring in polygon)
    return outer - sum(holes)


def peaks(mask: NDArray[np.bool_], polygons: Sequence[Rings], values: NDArray[np.uint8]) -> list[tuple[int, int, int]]:
    """Return the px (x, y) of the largest of ``values`` (h, w) in each of the ``polygons`` of ``mask``, and that."""
    if not polygons:
        return []
    _, labels = cv2.connectedComponents(mask.view(np.uint8), connectivity=4, ltype=cv2.CV_32S)
    highest = np.zeros(labels.max() + 1, np.uint8)
    np.maximum.at(highest, labels.ravel(), values.ravel())
    places = np.zeros(len(highest), np.int64)
    at = np.flatnonzero((values == highest[labels]) & mask)[::-1]
    places[labels.ravel()[at]] = at  # of several as high, the first one stays
    found = []
    for polygon in polygons:
        x, y = polygon[0][np.lexsort(polygon[0].T)[0]].astype(int)
        place = int(places[labels[y, x]])  # the px below the leftmost of the highest corners is inside
        found.append((place % mask.shape[1], place // mask.shape[1], int(values.flat[place])))
    return found


def without_saddles(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return ``mask`` with a pixel added to any two that touch at a corner alone."""
    filled = mask.copy()
    while True:
        a, b, c, d = filled[:-1, :-1], filled[:-1, 1:], filled[1:, :-1], filled[1:, 1:]
        falling, rising = a & d & ~b & ~c, b & c & ~a & ~d
        if not (falling.any() or rising.any()):
            return filled
        filled[:-1, 1:] |= falling
        filled[:-1, :-1] |= rising


def largest_areas(mask: NDArray[np.bool_], most: int) -> tuple[NDArray[np.bool_], int]:
    """Return the ``most`` largest of the 4-connected areas of ``mask``, and how many others there were."""
    count, labels, stats, _ = cv2.connectedComponentsWithStats(mask.view(np.uint8), connectivity=4, ltype=cv2.CV_32S)
    if count - 1 <= most:
        return mask, 0
    kept = np.zeros(count, np.bool_)
    kept[1 + np.argsort(-stats[1:, cv2.CC_STAT_AREA], kind="stable")[:most]] = True
    return kept[labels], count - 1 - most


def feature(polygon: Rings, name: str, colour: Sequence[int], measurements: Mapping[str, float]) -> dict[str, Any]:
    """Return a QuPath annotation.

    Args:
        polygon: level-0 px from the corner of the slide's bounds.
        colour: R, G, B.
    """
    rings = closed_rings([np.round(ring, 2) for ring in polygon])
    return {
        "type": "Feature",
        "id": str(uuid.uuid5(NAMESPACE, f"{name} {rings[0]}")),
        "geometry": {"type": "Polygon", "coordinates": rings},
        "properties": {
            "objectType": "annotation",
            "classification": {"name": name, "color": list(colour)},
            "isLocked": False,
            "measurements": dict(measurements),
        },
    }


@dataclass(frozen=True, eq=False)
class SlidePrediction:
    """Outputs of the model for the windows of a slide.

    Attributes:
        scores: float64 (n, classes), of a segmenter the mean over the window; NaN of one that cannot be read.
        certainty: float64 (n,), the probability of the likeliest class, of a segmenter the mean over the window.
        areas_map: uint8 (classes, h, w), probabilities of ``factor`` x ``factor`` cells, 255 is 1.
        attention: float64 (n,), attention weights of a model of bags, 1 on average; None of other models.
    """

    scores: NDArray[np.float64]
    certainty: NDArray[np.float64]
    areas_map: NDArray[np.uint8]
    factor: int
    fault: str
    attention: NDArray[np.float64] | None


def write_areas(
    model: TrainedModel, windows: SlideWindows, scored: SlidePrediction, folder: PredictionFolder, slide_id: str
) -> dict[str, float]:
    """Write the areas of the classes shown as GeoJSON, as a table and as a mask; um2 of each class."""
    l0_px = windows.l0_cell * scored.factor
    rows_of_map = np.array_split(scored.areas_map, max(1, scored.areas_map.shape[1] // ROWS_AT_ONCE), axis=1)
    likeliest = np.concatenate([rows.argmax(0).astype(np.uint8) for rows in rows_of_map])  # argmax takes 8 bytes a px
    looked_at = scored.areas_map.sum(0, dtype=np.uint16) >= 128
    limits = (float(windows.bounds.width), float(windows.bounds.height))
    features, rows, areas = [], [], {}
    whole = np.zeros(likeliest.shape, np.uint8)
    for number, (c, name) in enumerate(model.shown.items()):
        mask = (likeliest == c) & looked_at
        whole[mask] = number + 1
        mask, small = largest_areas(without_saddles(mask), MOST_AREAS)
        gaps, closed = largest_areas(~mask, MOST_AREAS)
        mask = ~gaps
        if small or closed:
            text = "%s: %d small areas of %s are not drawn and %d small holes are closed: it has more than %d"
            log.warning(text, slide_id, small, name, closed, MOST_AREAS)
        polygons = polygons_of(mask)
        areas[name] = 0.0
        for polygon, (x, y, value) in zip(polygons, peaks(mask, polygons, scored.areas_map[c]), strict=True):
            placed = [np.minimum(ring * l0_px, limits) for ring in polygon]
            um2 = round(area_of(placed) * windows.slide_mpp**2, 2)
            areas[name] += um2
            probability = round(value / 255, 4)
            measurements = {"Area µm^2": um2, "Max probability": probability}
            features.append(feature(placed, name, colour_of(number), measurements))
            rows.append([name, um2, probability, round((x + 0.5) * l0_px, 2), round((y + 0.5) * l0_px, 2)])
    document = {"type": "FeatureCollection", "features": features}
    folder.file("geojson", slide_id).write_text(json.dumps(document, ensure_ascii=False), encoding="utf-8")
    folder.file("masks", slide_id).write_bytes(as_png(whole))
    with folder.file("areas", slide_id).open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [["class", "area_um2", "max_probability", "l0_x", "l0_y"], *rows])
    return areas
