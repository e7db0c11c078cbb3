"""Areas drawn in Aperio ImageScope: a class is a layer, called Annotation there.

Takes elements of ``Annotations`` (Annotation, Region, Vertex), gives a ``Drawing``; and writes one. Coordinates are
level-0 px. A region with ``NegativeROA`` is cut out of all others of its layer, and of no other layer. A layer is
called by its name, else by its first attribute, else ``layer_<Id>``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from xml.sax.saxutils import quoteattr

import shapely

from pipelines.labels.drawing import Drawing, Origin, make_drawing, printable_name
from pipelines.labels.winding import valid_area

FREEHAND, RECTANGLE, ELLIPSE = "0", "1", "2"
"""Values of a region's ``Type`` that have an area; arrows, rulers and pins have others."""
ELLIPSE_POINTS = 256
"""Of the polygon in place of an ellipse: its area is 0.01 % less."""

Point = tuple[float, float]
Rings = Sequence[Sequence[Point]]


class ImageScopeReader:
    """Told of the elements of a document, makes a ``Drawing`` of them."""

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

    def drawing(self) -> Drawing:
        """Return the areas, layer by layer in file order."""
        return make_drawing(self._polygons, self._names, self._left_out, Origin.LEVEL0)

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
            points = _rectangle(*points) if kind == RECTANGLE else _ellipse(*points)
        elif kind == ELLIPSE and len(points) <= 4:
            raise ValueError(
                f"an ellipse is given by two corners of its box; region {region.get('Id')} has {len(points)}"
            )
        if len(points) < 3:
            self._left_out["region of fewer than 3 points"] += 1
            return
        (self._cut_out if region.get("NegativeROA", "0") not in ("", "0") else self._drawn).append(points)


def _rectangle(corner: Point, opposite: Point) -> list[Point]:
    (x0, y0), (x1, y1) = corner, opposite
    return [(x0, y0), (x1, y0), (x1, y1), (x0, y1)]


def _ellipse(corner: Point, opposite: Point) -> list[Point]:
    """The polygon of ``ELLIPSE_POINTS`` points on the ellipse that fills the box between two corners."""
    (x0, y0), (x1, y1) = corner, opposite
    turns = [2 * math.pi * k / ELLIPSE_POINTS for k in range(ELLIPSE_POINTS)]
    return [((x0 + x1 + (x1 - x0) * math.cos(t)) / 2, (y0 + y1 + (y1 - y0) * math.sin(t)) / 2) for t in turns]


def _without(drawn: Sequence[list[Point]], cut_out: Sequence[list[Point]]) -> list[Rings]:
    """Rings of every polygon of ``drawn`` without the areas ``cut_out``."""
    if not cut_out:
        return [[ring] for ring in drawn]
    negatives = [_valid(ring) for ring in cut_out]
    tree = shapely.STRtree(negatives)
    polygons: list[Rings] = []
    for ring in drawn:
        area = shapely.Polygon(ring)
        near = [negatives[k] for k in tree.query(area)]
        if not near:
            polygons.append([ring])
            continue
        rest = shapely.difference(_valid(ring), shapely.union_all(near))
        polygons += [
            [list(edge.coords) for edge in (part.exterior, *part.interiors)]
            for part in shapely.get_parts(rest).tolist()
            if isinstance(part, shapely.Polygon) and not part.is_empty
        ]
    return polygons


def _valid(ring: list[Point]) -> shapely.Geometry:
    """The area of a ring that may cross itself, by the even-odd rule."""
    return valid_area(shapely.Polygon(ring))


def write_imagescope(drawing: Drawing, path: Path) -> None:
    """Write ``drawing``, counted from level 0: a layer for each run of polygons of one class.

    A hole is cut out of the whole of its layer, so a polygon that has holes gets a layer of its own.
    """
    assert drawing.origin is Origin.LEVEL0
    lines = ['<?xml version="1.0" encoding="UTF-8"?>', "<Annotations>"]
    layers = regions = 0
    open_class = None
    for polygon, index in enumerate(drawing.polygon_class.tolist()):
        rings = drawing.rings(polygon)
        if open_class != index or len(rings) > 1:
            lines += ["</Regions>", "</Annotation>"] if layers else []
            layers, regions = layers + 1, 0
            lines += [f'<Annotation Id="{layers}" Name={quoteattr(drawing.classes[index])} Type="4">', "<Regions>"]
        open_class = None if len(rings) > 1 else index
        for hole, ring in enumerate(rings):
            regions += 1
            lines.append(f'<Region Id="{regions}" Type="{FREEHAND}" NegativeROA="{int(hole > 0)}"><Vertices>')
            lines += [f'<Vertex X="{x!r}" Y="{y!r}"/>' for x, y in ring.tolist()]
            lines.append("</Vertices></Region>")
    lines += ["</Regions>", "</Annotation>"] if layers else []
    path.write_text("\n".join([*lines, "</Annotations>", ""]), encoding="utf-8")
