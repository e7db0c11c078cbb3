"""Areas of a map of classes as polygons, and polygons as QuPath's GeoJSON.

Takes a mask; gives rings along the edges of its px, so that areas are those of the px to the last digit. Coordinates of
a file are level-0 px from the corner of the slide's bounds (RFC 7946 in px, as QuPath has it).
"""

from __future__ import annotations

import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from pipelines.labels.conversion import outlines_of
from pipelines.labels.geojson import closed_rings, signed_area

Ring = NDArray[np.float64]
"""float64 (n, 2), corners (x, y), not closed."""

NAMESPACE = uuid.UUID("6f0c8a52-6a53-4b0e-9a3c-0d7f1c3b5e21")
"""Of the ids of features, which are the same whenever the same area is written."""


@dataclass(frozen=True, eq=False)
class Polygon:
    """An outer ring and the holes in it."""

    outer: Ring
    holes: tuple[Ring, ...]

    @property
    def area(self) -> float:
        """Without the holes, in the square of the coordinates' unit."""
        return abs(signed_area(self.outer)) - sum(abs(signed_area(hole)) for hole in self.holes)

    def scaled(self, factor: float, limits: tuple[float, float]) -> Polygon:
        """Return it ``factor`` times as large, cut off at ``limits`` (x, y)."""
        return Polygon(
            np.minimum(self.outer * factor, limits), tuple(np.minimum(hole * factor, limits) for hole in self.holes)
        )


def polygons_of(mask: NDArray[np.bool_]) -> list[Polygon]:
    """Return the areas of ``mask`` (h, w) with their holes, corners in px.

    Args:
        mask: as ``without_saddles`` gives it: rings that touch themselves are not valid.
    """
    return [Polygon(outer, tuple(holes)) for outer, *holes in outlines_of(mask.view(np.uint8)).get(1, ())]


def peaks(
    mask: NDArray[np.bool_], polygons: Sequence[Polygon], values: NDArray[np.uint8]
) -> list[tuple[int, int, int]]:
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
        x, y = polygon.outer[np.lexsort((polygon.outer[:, 0], polygon.outer[:, 1]))[0]].astype(int)
        place = int(places[labels[y, x]])  # the px below the leftmost of the highest corners is inside
        found.append((place % mask.shape[1], place // mask.shape[1], int(values.flat[place])))
    return found


def without_saddles(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return ``mask`` with a px added beside any two that touch at a corner alone."""
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


def feature(polygon: Polygon, name: str, colour: Sequence[int], measurements: Mapping[str, float]) -> dict[str, Any]:
    """Return a QuPath annotation.

    Args:
        polygon: level-0 px from the corner of the slide's bounds.
        name: of the class.
        colour: R, G, B.
        measurements: shown with the annotation.
    """
    rings = closed_rings([np.round(ring, 2) for ring in (polygon.outer, *polygon.holes)])
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


def collection(features: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return a FeatureCollection."""
    return {"type": "FeatureCollection", "features": list(features)}
