"""Areas drawn on a slide, read from GeoJSON as QuPath exports it.

Takes a file, gives a ``Drawing``: the edges of all polygons in flat arrays, in file order, with the class of each
polygon. Format: RFC 7946, in pixels of the slide's level 0 instead of degrees; classes as in QuPath's
``properties.classification``. All three of QuPath's layouts are read: FeatureCollection, plain list, single Feature.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.slides.slide import SlideError

UNNAMED_CLASS = "foreground"
"""Class of an area that has neither a classification nor a name."""

FILE_BYTES = 2 << 30
"""Largest file that is read: parsed, it takes about ten times as much."""

FARTHEST_PX = 1e9
"""A coordinate beyond is no pixel of any slide."""

AREAS = frozenset({"Polygon", "MultiPolygon"})
NO_AREAS = frozenset({"Point", "MultiPoint", "LineString", "MultiLineString"})


@dataclass(frozen=True, slots=True)
class Drawing:
    """Polygons in the order they are painted.

    A polygon's edges are those of its outer ring and of its holes; a point is inside where a ray from it crosses an odd
    number of them. The parts of a multipolygon are polygons of their own, so that parts that overlap do not cancel out.

    Attributes:
        start, end: float64 (edges, 2), (x, y) of each edge in level-0 px from the corner of the slide's bounds.
        first_edge: int64 (polygons + 1,): polygon i has edges first_edge[i]..first_edge[i + 1].
        box: float64 (polygons, 4): left, top, right, bottom.
        polygon_class: int32 (polygons,) index into ``classes``.
        classes: names in the order of their first polygon.
        without_area: number of features left out: points, lines.
    """

    start: NDArray[np.float64]
    end: NDArray[np.float64]
    first_edge: NDArray[np.int64]
    box: NDArray[np.float64]
    polygon_class: NDArray[np.int32]
    classes: tuple[str, ...]
    without_area: int

    @property
    def nbytes(self) -> int:
        return self.start.nbytes + self.end.nbytes + self.box.nbytes


def read_geojson(path: Path) -> Drawing:
    """Return the areas of a GeoJSON file.

    Raises:
        SlideError: the file cannot be read, is no GeoJSON, or a feature is malformed (says which).
    """
    try:
        if path.stat().st_size > FILE_BYTES:
            raise SlideError(f"annotation {path} is larger than {FILE_BYTES >> 30} GiB: leave out what is not drawn")
        document = json.loads(path.read_bytes())
    except OSError as fault:
        raise SlideError(f"annotation {path} cannot be read: {fault.strerror or fault}") from fault
    except (ValueError, RecursionError) as fault:
        raise SlideError(f"annotation {path} is damaged: not JSON ({fault}). Export it again") from fault
    polygons: list[Sequence[Any]] = []
    polygon_class: list[int] = []
    classes: dict[str, int] = {}
    without_area = 0
    where = "feature 1: "
    try:
        for number, feature in enumerate(_features(document), start=1):
            geometry = feature["geometry"]
            areas = [] if geometry is None else list(_polygons(geometry))
            without_area += not areas
            for rings in areas:
                if not rings or min(map(len, rings)) < 3:
                    raise ValueError("a polygon has at least one ring, a ring at least three points")
                polygons.append(rings)
                polygon_class.append(classes.setdefault(class_name(feature.get("properties") or {}), len(classes)))
            where = f"feature {number + 1}: "
        where = ""
        return _drawing(polygons, polygon_class, tuple(classes), without_area)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RecursionError, OverflowError) as fault:
        raise SlideError(
            f"annotation {path} is damaged or no GeoJSON: {where}{type(fault).__name__}: {fault}. "
            "Export it from QuPath as GeoJSON again"
        ) from fault


def class_name(properties: Mapping[str, Any]) -> str:
    """Class of a feature: its classification, else its name, else ``UNNAMED_CLASS``."""
    classification = properties.get("classification")
    if isinstance(classification, dict):
        # QuPath 0.5 and later write derived classes ("Tumor: Positive") as a list of names
        names = classification.get("names")
        classification = ": ".join(map(str, names)) if names else classification.get("name")
    name = str(classification or properties.get("name") or UNNAMED_CLASS)
    # It is printed, and written into files: no line breaks, no terminal's commands, no half of a character.
    return " ".join("".join(c if c.isprintable() else " " for c in name).split()) or UNNAMED_CLASS


def _features(document: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(document, list):
        for item in document:
            yield from _features(item)
    elif isinstance(document, dict) and document.get("type") == "FeatureCollection":
        yield from _features(list(document["features"]))
    elif isinstance(document, dict) and document.get("type") == "Feature":
        yield document
    elif isinstance(document, dict) and document.get("type") in AREAS | {"GeometryCollection"}:
        yield {"geometry": document}
    else:
        kind = document.get("type") if isinstance(document, dict) else type(document).__name__
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


def _drawing(
    polygons: list[Sequence[Any]], polygon_class: list[int], classes: tuple[str, ...], without_area: int
) -> Drawing:
    rings = [ring for polygon in polygons for ring in polygon]
    # a position may have a third value, a height: not used
    numbers = np.fromiter((n for ring in rings for p in ring for n in (p[0], p[1])), np.float64)
    if not (np.abs(numbers) <= FARTHEST_PX).all():
        raise ValueError(f"a coordinate is not a finite number of px within {FARTHEST_PX:g}")
    start = numbers.reshape(-1, 2)
    following = np.arange(1, len(start) + 1)
    ring_ends = np.cumsum([len(ring) for ring in rings], dtype=np.int64)
    following[ring_ends - 1] = np.concatenate([[0], ring_ends])[
        :-1
    ]  # closes open rings; an edge of no length otherwise
    first_edge = np.zeros(len(polygons) + 1, np.int64)
    np.cumsum([sum(map(len, polygon)) for polygon in polygons], out=first_edge[1:])
    corners = [np.minimum.reduceat(start, first_edge[:-1]), np.maximum.reduceat(start, first_edge[:-1])]
    return Drawing(
        start,
        start[following],
        first_edge,
        np.concatenate(corners, axis=1),
        np.asarray(polygon_class, np.int32),
        classes,
        without_area,
    )
