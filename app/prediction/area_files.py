"""The areas of one slide where a class is the likeliest, as files: GeoJSON, a table and a mask.

Takes the model's outputs for a slide; leaves three files, and gives um2 of each class.
"""

from __future__ import annotations

import json
import logging
from dataclasses import dataclass

import cv2
import numpy as np
from numpy.typing import NDArray

from app.pages.overlays import colour_of
from app.prediction.polygons import collection, feature, largest_areas, peaks, polygons_of, without_saddles
from app.prediction.prediction_folder import PredictionFolder
from app.prediction.trained_model import TrainedModel
from pipelines.catalog.table import write_rows
from pipelines.tiles.windows import SlideWindows

log = logging.getLogger(__name__)

MOST_AREAS = 50_000
"""Of a class and slide, as many areas are drawn, and as many holes: the largest. A model that is hardly trained gives a
hundred times as many specks."""

ROWS_AT_ONCE = 256
"""Rows of the map that are looked at together."""


@dataclass(frozen=True, eq=False)
class Scored:
    """Outputs of the model for the windows of a slide.

    Attributes:
        scores: float64 (n, classes), of a segmenter the mean over the window; NaN of one that cannot be read.
        certainty: float64 (n,), the probability of the likeliest class, of a segmenter the mean over the window.
        areas_map: uint8 (classes, h, w), probabilities of ``factor`` x ``factor`` cells, 255 is 1.
        fault: the first of the windows that cannot be read.
        attention: float64 (n,), attention weights of a model of bags, 1 on average; None of other models.
    """

    scores: NDArray[np.float64]
    certainty: NDArray[np.float64]
    areas_map: NDArray[np.uint8]
    factor: int
    fault: str
    attention: NDArray[np.float64] | None


def write_areas(
    model: TrainedModel, windows: SlideWindows, scored: Scored, folder: PredictionFolder, slide_id: str
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
            placed = polygon.scaled(l0_px, limits)
            um2 = round(placed.area * windows.slide_mpp**2, 2)
            areas[name] += um2
            probability = round(value / 255, 4)
            features.append(
                feature(placed, name, colour_of(number), {"Area µm^2": um2, "Max probability": probability})
            )
            rows.append([name, um2, probability, round((x + 0.5) * l0_px, 2), round((y + 0.5) * l0_px, 2)])
    folder.geojson(slide_id).write_text(json.dumps(collection(features), ensure_ascii=False), encoding="utf-8")
    done, png = cv2.imencode(".png", whole)
    assert done
    folder.mask(slide_id).write_bytes(png.tobytes())
    with folder.areas(slide_id).open("w", newline="", encoding="utf-8") as file:
        write_rows(file, [["class", "area_um2", "max_probability", "l0_x", "l0_y"], *rows])
    return areas
