"""GeoJSON written by a test, slides of any size without pixels, and the slow, plain way to fill a polygon."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import ClassMap
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import Slide
from tests.helpers.memory_slide import memory_slide

Ring = Sequence[tuple[float, float]]

WHITE = np.full((1, 1, 3), 255, np.uint8)


def blank_slide(width: int, height: int, mpp: float = 0.5, bounds: Bounds | None = None, levels: int = 1) -> Slide:
    """A white slide of any size: one pixel of memory."""
    sizes = [(height >> (2 * i), width >> (2 * i), 3) for i in range(levels)]
    return memory_slide([np.broadcast_to(WHITE, size) for size in sizes], mpp, bounds=bounds)


def area(rings: Sequence[Ring], name: str | None = None) -> dict[str, Any]:
    """A polygon as a feature of QuPath's; the first ring is the outer one."""
    properties = {"classification": {"name": name}} if name else {}
    return {"type": "Feature", "geometry": {"type": "Polygon", "coordinates": rings}, "properties": properties}


def box(left: float, top: float, right: float, bottom: float, name: str | None = None) -> dict[str, Any]:
    return area([[(left, top), (right, top), (right, bottom), (left, bottom), (left, top)]], name)


def write_geojson(path: Path, *features: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"type": "FeatureCollection", "features": features}))
    return path


def annotations_in(folder: Path, *slides: SlideSpec | str, class_map: Sequence[str] = ()) -> SlideAnnotations:
    """Return the annotations in ``folder`` of slides, of which a name will do."""
    specs = [SlideSpec(slide, Path(f"slides/{slide}.svs")) if isinstance(slide, str) else slide for slide in slides]
    found = find_labels(Path("slides"), specs, annotations=folder, class_map=ClassMap.parse(tuple(class_map)))
    assert isinstance(found, SlideAnnotations)
    return found


def mask_of(annotations: SlideAnnotations, slide_id: str, slide: Slide, region: Region) -> NDArray[np.uint8]:
    """Class ids of the pixels of ``region``."""
    out = np.full((region.height, region.width), 77, np.uint8)
    annotations.read_mask(slide_id, slide, region, out)
    return out


def inside(rings: Sequence[Ring], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.bool_]:
    """bool (h, w): is the point (x[j], y[i]) inside? One ray per point, one edge at a time."""
    odd = np.zeros((len(y), len(x)), bool)
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
            if y0 != y1:
                straddles = (y0 > y) != (y1 > y)
                crossing = x0 + (y - y0) * (x1 - x0) / (y1 - y0)
                odd ^= straddles[:, None] & (x[None, :] < crossing[:, None])
    return odd


def edge_distance(rings: Sequence[Ring], x: NDArray[np.float64], y: NDArray[np.float64]) -> NDArray[np.float64]:
    """float64 (h, w): distance of the point (x[j], y[i]) from the nearest edge."""
    nearest = np.full((len(y), len(x)), np.inf)
    for ring in rings:
        for (x0, y0), (x1, y1) in zip(ring, [*ring[1:], ring[0]], strict=True):
            dx, dy = x1 - x0, y1 - y0
            length2 = (dx * dx + dy * dy) or 1.0
            along = np.clip(((x[None, :] - x0) * dx + (y[:, None] - y0) * dy) / length2, 0, 1)
            nearest = np.minimum(nearest, np.hypot(x[None, :] - x0 - along * dx, y[:, None] - y0 - along * dy))
    return nearest
