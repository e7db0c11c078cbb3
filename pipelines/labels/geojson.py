"""Areas drawn on a slide, read from GeoJSON as QuPath exports it, and written so that QuPath takes them.

Format: RFC 7946, in pixels of the slide's level 0 instead of degrees, counted from the corner of the slide's bounds;
classes as in QuPath's ``properties.classification``. All three of QuPath's layouts are read: FeatureCollection, plain
list, single Feature.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.labels.drawing import UNNAMED_CLASS, Origin, PolygonSet, make_polygon_set, printable_name
from pipelines.slides.slide import SlideError

AREAS = frozenset({"Polygon", "MultiPolygon"})
NO_AREAS = frozenset({"Point", "MultiPoint", "LineString", "MultiLineString"})


def read_geojson(path: Path) -> PolygonSet:
    """Return the areas of a GeoJSON file.

    Raises:
        SlideError: it is no GeoJSON, or a feature is malformed (says which).
        OSError: the file cannot be read.
    """
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as fault:
        raise SlideError(f"annotation {path} is damaged: not JSON ({fault}). Export it again") from fault
    polygons: list[Sequence[Any]] = []
    names: list[str] = []
    left_out: Counter[str] = Counter()
    where = "feature 1: "
    try:
        for number, feature in enumerate(_features(document), start=1):
            geometry, properties = feature["geometry"], feature.get("properties") or {}
            is_missing = properties.get("isMissing") is True
            areas = [] if geometry is None or is_missing else list(_polygons(geometry))
            if not areas:
                kind = "empty feature" if geometry is None else geometry["type"]
                left_out["missing TMA core" if is_missing else kind] += 1
            for rings in areas:
                if not rings or len(rings[0]) < 3:
                    left_out["polygon of fewer than 3 points"] += 1  # as a stray click leaves
                    continue
                polygons.append([ring for ring in rings if len(ring) >= 3])
                names.append(class_name(properties))
            where = f"feature {number + 1}: "
        where = ""
        return make_polygon_set(polygons, names, left_out, Origin.BOUNDS)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError) as fault:
        raise SlideError(
            f"annotation {path} is damaged or no GeoJSON: {where}{type(fault).__name__}: {fault}. "
            "Export it from QuPath as GeoJSON again"
        ) from fault


def write_geojson(drawing: PolygonSet, path: Path) -> None:
    """Write ``drawing``, counted from the bounds, as a FeatureCollection: a Polygon for each, in painting order."""
    assert drawing.origin is Origin.BOUNDS
    features = [
        {
            "type": "Feature",
            "geometry": {"type": "Polygon", "coordinates": closed_rings(drawing.rings(polygon))},
            "properties": {"objectType": "annotation", "classification": {"name": drawing.classes[index]}},
        }
        for polygon, index in enumerate(drawing.polygon_class.tolist())
    ]
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}), encoding="utf-8")


def closed_rings(rings: Sequence[NDArray[np.float64]]) -> list[list[list[float]]]:
    """Return the coordinates of a polygon: the outer ring turns left, holes right (RFC 7946, 3.1.6), all are closed."""
    turned = [ring if (signed_area(ring) > 0) == (k == 0) else ring[::-1] for k, ring in enumerate(rings)]
    return [[*ring.tolist(), ring[0].tolist()] for ring in turned]


def signed_area(ring: NDArray[np.float64]) -> float:
    """Return the area of a ring, float64 (n, 2), in px squared: positive where it turns from x towards y."""
    x, y = (ring - ring[0]).T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def class_name(properties: Mapping[str, Any]) -> str:
    """Return the class of a feature: its classification, else its name, else ``UNNAMED_CLASS``."""
    classification = properties.get("classification")
    if isinstance(classification, dict):
        # QuPath 0.5 and later write derived classes ("Tumor: Positive") as a list of names
        names = classification.get("names")
        classification = ": ".join(map(str, names)) if names else classification.get("name")
    return printable_name(str(classification or properties.get("name") or UNNAMED_CLASS))


def _features(document: Any) -> Iterator[Mapping[str, Any]]:
    kind = document.get("type") if isinstance(document, dict) else type(document).__name__
    if isinstance(document, list):
        for item in document:
            yield from _features(item)
    elif kind == "FeatureCollection":
        yield from _features(list(document["features"]))
    elif kind == "Feature":
        yield document
    elif kind in AREAS | {"GeometryCollection"}:
        yield {"geometry": document}
    else:
        raise ValueError(f"expected a FeatureCollection, a Feature or a list of them, found {kind!r}")


def _polygons(geometry: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Rings of every polygon of a geometry, nested ones included."""
    kind = geometry["type"]
    if kind == "Polygon":
        yield geometry["coordinates"]
    elif kind == "MultiPolygon":
        yield from geometry["coordinates"]
    elif kind == "GeometryCollection":
        for member in geometry["geometries"]:
            yield from _polygons(member)
    elif kind not in NO_AREAS:
        raise ValueError(f"unknown geometry {kind!r}")
