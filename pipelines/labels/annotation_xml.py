"""Annotations in XML, element by element: nothing of a document is held but what its reader keeps.

Takes a file and a reader for each root element, returns what the reader made. A document type is refused before all
in it is looked at: without one there are no entities to expand and no other files to be fetched.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.parsers import expat

import shapely

from pipelines.labels.drawing import (
    BACKGROUND,
    UNNAMED_CLASS,
    Origin,
    Point,
    PolygonSet,
    make_polygon_set,
    polygons_of,
    printable_name,
    split_self_intersections,
    valid_area,
)
from pipelines.slides.slide import SlideError

AREAS = frozenset({"Polygon", "Spline", "Rectangle"})
"""A spline is the polygon through its points, as in the masks that ASAP itself makes."""

NO_AREAS = frozenset({"Dot", "PointSet", "Measurement", "None"})

NO_GROUP = ("", "None")

CAMELYON16 = {"_0": "Tumor", "_1": "Tumor", "_2": BACKGROUND, "Exclusion": BACKGROUND}
CAMELYON17 = {"metastases": "metastases", "normal": BACKGROUND}


class AsapReader:
    """Reader of ASAP's elements: a class is a group of annotations. Coordinates are level-0 px.

    A ring that crosses itself has all that it winds around, as in the masks that ASAP itself makes. Groups of the
    Camelyon challenges mean what their masks say: in Camelyon16 ``_0`` and ``_1`` are ``Tumor`` and ``_2``, or
    ``Exclusion``, is not; in Camelyon17 ``normal`` lies within ``metastases``. Exclusions are painted last, as
    background.
    """

    def __init__(self) -> None:
        self._areas: list[tuple[str, list[Point]]] = []  # group, ring
        self._groups: set[str] = set()
        self._left_out: Counter[str] = Counter()
        self._points: list[tuple[int, Point]] = []
        self._kind = self._group = ""

    def start(self, element: str, attributes: Mapping[str, str]) -> None:
        if element == "Coordinate":
            point = float(attributes["X"]), float(attributes["Y"])
            self._points.append((int(attributes.get("Order", len(self._points))), point))
        elif element == "Annotation":
            self._points, self._kind = [], attributes["Type"]
            self._group = attributes.get("PartOfGroup", "")
            if self._kind not in AREAS | NO_AREAS:
                raise ValueError(f"unknown annotation type {self._kind!r}")
        elif element == "Group":
            self._groups.add(attributes["Name"])

    def end(self, element: str) -> None:
        if element != "Annotation":
            return
        self._groups.add(self._group)
        self._points.sort(key=lambda numbered: numbered[0])
        if self._kind not in AREAS:
            self._left_out[self._kind] += 1
        elif len(self._points) < 3:
            self._left_out[f"{self._kind} of fewer than 3 points"] += 1
        else:
            self._areas.append((self._group, [point for _, point in self._points]))

    def drawing(self) -> PolygonSet:
        """Return the areas: in file order, exclusions of Camelyon last."""
        meaning = CAMELYON16 | (CAMELYON17 if "metastases" in self._groups else {})
        classes = [
            UNNAMED_CLASS if group in NO_GROUP else meaning.get(group, printable_name(group))
            for group, _ in self._areas
        ]
        last = [meaning.get(group) == BACKGROUND for group, _ in self._areas]
        areas = split_self_intersections([ring for _, ring in self._areas])
        if flat := sum(not polygons for polygons in areas):
            self._left_out["area that encloses nothing"] += flat
        painted = [(k, rings) for k in sorted(range(len(classes)), key=last.__getitem__) for rings in areas[k]]
        return make_polygon_set(
            [rings for _, rings in painted], [classes[k] for k, _ in painted], self._left_out, Origin.LEVEL0
        )


FREEHAND, RECTANGLE, ELLIPSE = "0", "1", "2"
"""Values of a region's ``Type`` that have an area; arrows, rulers and pins have others."""
ELLIPSE_POINTS = 256
"""Of the polygon in place of an ellipse: its area is 0.01 % less."""

Rings = Sequence[Sequence[Point]]


class ImageScopeReader:
    """Reader of ImageScope's elements: a class is a layer, called Annotation there. Coordinates are level-0 px.

    A region with ``NegativeROA`` is cut out of all others of its layer, and of no other layer. A layer is called by its
    name, else by its first attribute, else ``layer_<Id>``.
    """

    def __init__(self) -> None:
        self._polygons: list[Rings] = []
        self._names: list[str] = []
        self._left_out: Counter[str] = Counter()
        self._layer: dict[str, str] = {}
        self._attribute: Mapping[str, str] | None = None
        self._region: Mapping[str, str] | None = None
        self._points: list[Point] = []
        self._drawn: list[list[Point]] = []
        self._cut_out: list[list[Point]] = []

    def start(self, element: str, attributes: Mapping[str, str]) -> None:
        if element in ("Vertex", "V"):
            self._points.append((float(attributes["X"]), float(attributes["Y"])))
        elif element == "Region":
            self._region, self._points = attributes, []
        elif element == "Annotation":
            self._layer, self._attribute, self._drawn, self._cut_out = dict(attributes), None, [], []
        elif element == "Attribute" and self._region is None and self._attribute is None:
            self._attribute = attributes

    def end(self, element: str) -> None:
        if element == "Region":
            self._end_region()
        elif element == "Annotation":
            polygons = _without(self._drawn, self._cut_out)
            self._polygons += polygons
            self._names += [self._layer_name()] * len(polygons)

    def drawing(self) -> PolygonSet:
        """Return the areas, layer by layer in file order."""
        return make_polygon_set(self._polygons, self._names, self._left_out, Origin.LEVEL0)

    def _layer_name(self) -> str:
        attribute = self._attribute or {}
        header = attribute.get("Name", "")
        name = self._layer.get("Name") or attribute.get("Value") or ("" if header == "Description" else header)
        return printable_name(name or f"layer_{self._layer.get('Id', '1')}")

    def _end_region(self) -> None:
        assert self._region is not None
        region, points = self._region, self._points
        self._region = None
        kind = region.get("Type", FREEHAND)
        if kind not in (FREEHAND, RECTANGLE, ELLIPSE):
            self._left_out[f"region of type {kind}"] += 1
            return
        if kind in (RECTANGLE, ELLIPSE) and len(points) == 2:
            (x0, y0), (x1, y1) = points
            points = [(x0, y0), (x1, y0), (x1, y1), (x0, y1)] if kind == RECTANGLE else _ellipse(*points)
        elif kind == ELLIPSE and len(points) <= 4:
            raise ValueError(
                f"an ellipse is given by two corners of its box; region {region.get('Id')} has {len(points)}"
            )
        if len(points) < 3:
            self._left_out["region of fewer than 3 points"] += 1
            return
        (self._cut_out if region.get("NegativeROA", "0") not in ("", "0") else self._drawn).append(points)


def _ellipse(corner: Point, opposite: Point) -> list[Point]:
    """The polygon of ``ELLIPSE_POINTS`` points on the ellipse that fills the box between two corners."""
    (x0, y0), (x1, y1) = corner, opposite
    turns = [2 * math.pi * k / ELLIPSE_POINTS for k in range(ELLIPSE_POINTS)]
    return [((x0 + x1 + (x1 - x0) * math.cos(t)) / 2, (y0 + y1 + (y1 - y0) * math.sin(t)) / 2) for t in turns]


def _without(drawn: Sequence[list[Point]], cut_out: Sequence[list[Point]]) -> list[Rings]:
    """Rings of every polygon of ``drawn`` without the areas ``cut_out``."""
    if not cut_out:
        return [[ring] for ring in drawn]
    negatives = [valid_area(shapely.Polygon(ring)) for ring in cut_out]
    tree = shapely.STRtree(negatives)
    polygons: list[Rings] = []
    for ring in drawn:
        area = shapely.Polygon(ring)
        near = [negatives[k] for k in tree.query(area)]
        polygons += polygons_of(shapely.difference(valid_area(area), shapely.union_all(near))) if near else [[ring]]
    return polygons


CHUNK_BYTES, TOKEN_BYTES = 1 << 18, 1 << 20
"""Bytes of a file given to the parser at a time, and of its longest tag or comment."""


READERS: Mapping[str, type[AsapReader | ImageScopeReader]] = {
    "ASAP_Annotations": AsapReader,
    "Annotations": ImageScopeReader,
}
"""By root element."""


def read_xml(path: Path) -> PolygonSet:
    """Return the areas of an ASAP or Aperio ImageScope file, distinguished by the root element.

    Raises:
        SlideError: it is no such XML, declares a document type, or an object is malformed (says in which line).
        OSError: the file cannot be read.
    """
    reader: AsapReader | ImageScopeReader | None = None
    parser = expat.ParserCreate()

    def start(element: str, attributes: Mapping[str, str]) -> None:
        nonlocal reader
        if reader is None:
            if element not in READERS:
                raise ValueError(f"the root element is {element!r}, not {' or '.join(READERS)}")
            reader = READERS[element]()
        reader.start(element, attributes)

    def end(element: str) -> None:
        assert reader is not None
        reader.end(element)

    def refuse_document_type(name: str, *rest: object) -> None:
        raise ValueError(f"it declares a document type ({name!r}); remove the DOCTYPE: entities are not read")

    parser.StartElementHandler = start
    parser.EndElementHandler = end
    parser.StartDoctypeDeclHandler = refuse_document_type
    line = "in or before line {}: "
    try:
        with path.open("rb") as file:
            fed = 0
            while chunk := file.read(CHUNK_BYTES):
                parser.Parse(chunk, False)
                fed += len(chunk)
                # expat reads an unfinished tag or comment again with every chunk: time grows with the square
                if fed - parser.CurrentByteIndex > TOKEN_BYTES + CHUNK_BYTES:
                    raise ValueError(f"a tag, comment or value of more than {TOKEN_BYTES >> 20} MiB")
            parser.Parse(b"", True)
        line = ""
        assert reader is not None, "expat has seen a root element"
        return reader.drawing()
    except expat.ExpatError as fault:
        raise SlideError(f"annotation {path} is damaged: not XML ({fault}). Export it again") from fault
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as fault:
        what = f"{type(fault).__name__}: {fault}" if not isinstance(fault, ValueError) else str(fault)
        raise SlideError(
            f"annotation {path} cannot be used: {line.format(parser.CurrentLineNumber)}{what}. "
            "Export it from ASAP or ImageScope again"
        ) from fault
