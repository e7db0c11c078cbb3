"""Areas drawn in ASAP: a class is a group of annotations.

Takes elements of ``ASAP_Annotations`` (Annotation, Coordinate, Group), gives a ``Drawing``; and writes one. Coordinates
are level-0 px; a ring that crosses itself has all that it winds around, as in the masks that ASAP itself makes. The
groups of the Camelyon challenges mean what their masks say: in Camelyon16 ``_0`` and ``_1`` are ``Tumor`` and ``_2``,
or ``Exclusion``, is not; in Camelyon17 ``normal`` lies within ``metastases``. Such exclusions are painted last, as
background.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from xml.sax.saxutils import quoteattr

import numpy as np
from numpy.typing import NDArray

from pipelines.labels.drawing import BACKGROUND, UNNAMED_CLASS, Drawing, Origin, make_drawing, printable_name
from pipelines.labels.geojson import signed_area
from pipelines.labels.winding import even_odd_areas, wound_areas

AREAS = frozenset({"Polygon", "Spline", "Rectangle"})
"""A spline is the polygon through its points, as in the masks that ASAP itself makes."""

NO_AREAS = frozenset({"Dot", "PointSet", "Measurement", "None"})

NO_GROUP = ("", "None")

CAMELYON16 = {"_0": "Tumor", "_1": "Tumor", "_2": BACKGROUND, "Exclusion": BACKGROUND}
CAMELYON17 = {"metastases": "metastases", "normal": BACKGROUND}

Point = tuple[float, float]


class AsapReader:
    """Told of the elements of a document, makes a ``Drawing`` of them."""

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

    def drawing(self) -> Drawing:
        """Return the areas: in file order, exclusions of Camelyon last."""
        meaning = CAMELYON16 | (CAMELYON17 if "metastases" in self._groups else {})
        classes = [
            UNNAMED_CLASS if group in NO_GROUP else meaning.get(group, printable_name(group))
            for group, _ in self._areas
        ]
        last = [meaning.get(group) == BACKGROUND for group, _ in self._areas]
        areas = wound_areas([ring for _, ring in self._areas])
        if flat := sum(not polygons for polygons in areas):
            self._left_out["area that encloses nothing"] += flat
        painted = [(k, rings) for k in sorted(range(len(classes)), key=last.__getitem__) for rings in areas[k]]
        return make_drawing(
            [rings for _, rings in painted], [classes[k] for k, _ in painted], self._left_out, Origin.LEVEL0
        )


def write_asap(drawing: Drawing, path: Path) -> None:
    """Write ``drawing``, counted from level 0, in painting order, with a group for each class.

    ASAP has no holes: the ring of a polygon goes along its holes and back on a cut of no width, which every way to fill
    it leaves out. A ring that crosses itself is written as areas that do not, since ASAP fills it by another rule.
    """
    assert drawing.origin is Origin.LEVEL0
    lines = ['<?xml version="1.0"?>', "<ASAP_Annotations>", "<Annotations>"]
    areas = (
        (index, rings)
        for polygon, index in enumerate(drawing.polygon_class.tolist())
        for rings in even_odd_areas(drawing.rings(polygon))
    )
    for number, (index, rings) in enumerate(areas):
        group = quoteattr(drawing.classes[index])
        lines.append(
            f'<Annotation Name="Annotation {number}" Type="Polygon" PartOfGroup={group} Color="#F4FA58"><Coordinates>'
        )
        lines += [
            f'<Coordinate Order="{k}" X="{x!r}" Y="{y!r}"/>' for k, (x, y) in enumerate(_keyholed(rings).tolist())
        ]
        lines.append("</Coordinates></Annotation>")
    lines += ["</Annotations>", "<AnnotationGroups>"]
    lines += [
        f'<Group Name={quoteattr(name)} PartOfGroup="None" Color="#F4FA58"><Attributes/></Group>'
        for name in drawing.classes
    ]
    lines += ["</AnnotationGroups>", "</ASAP_Annotations>", ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def _keyholed(rings: list[NDArray[np.float64]]) -> NDArray[np.float64]:
    """One ring, float64 (n, 2): the outer one, then from its first point to each hole, around it and back. Holes turn
    the other way, so that winding numbers, too, are 0 within them."""
    outer, *holes = rings
    pieces = [outer]
    for hole in holes:
        turned = hole if (signed_area(hole) > 0) != (signed_area(outer) > 0) else hole[::-1]
        pieces += [outer[:1], turned, turned[:1]]
    return np.concatenate([*pieces, outer[:1]] if holes else pieces)
