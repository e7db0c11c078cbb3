"""Areas off the slide and areas painted over, against the pixels that are painted."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import shapely

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels import drawing as visible_areas
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import ClassMap
from pipelines.labels.drawing import Origin, PolygonSet, areas_within, make_polygon_set, painted_over
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import area, box, write_geojson


def drawn(*features: dict[str, object]) -> PolygonSet:
    parsed = json.loads(json.dumps(features))
    names = [feature["properties"]["classification"]["name"] for feature in parsed]
    return make_polygon_set([feature["geometry"]["coordinates"] for feature in parsed], names, {}, Origin.BOUNDS)


def hidden(*features: dict[str, object]) -> list[bool]:
    drawing = drawn(*features)
    return painted_over(drawing, drawing.polygon_class).tolist()


def annotations(folder: Path, *slides: str, class_map: tuple[str, ...] = ()) -> SlideAnnotations:
    specs = [SlideSpec(slide, Path(f"slides/{slide}.svs")) for slide in slides]
    found = find_labels(Path("slides"), specs, annotations=folder, class_map=ClassMap.parse(class_map))
    assert isinstance(found, SlideAnnotations)
    return found


def test_areas_within_are_those_of_shapely() -> None:
    rng = np.random.default_rng(3)
    shapes = []
    for _ in range(60):
        angles = (np.arange(9) + rng.uniform(0, 0.9, 9)) * 2 * np.pi / 9
        ring = np.column_stack([np.cos(angles), np.sin(angles)]) * rng.uniform(20, 60, (9, 1)) + rng.uniform(0, 100, 2)
        shapes.append([ring.tolist(), (0.3 * (ring - ring.mean(0)) + ring.mean(0))[:: rng.choice([-1, 1])].tolist()])
    drawing = make_polygon_set(shapes, ["a"] * len(shapes), {}, Origin.LEVEL0)
    for rectangle in [(0, 0, 100, 100), (-1e3, -1e3, 1e3, 1e3), (40, 20, 60, 90), (300, 300, 400, 400)]:
        expected = [
            shapely.intersection(shapely.Polygon(outer), shapely.box(*rectangle)).area
            - shapely.intersection(shapely.Polygon(hole), shapely.box(*rectangle)).area
            for outer, hole in shapes
        ]
        np.testing.assert_allclose(areas_within(drawing, *rectangle), expected, atol=1e-6)


def test_what_is_painted_over() -> None:
    small, large = box(4, 4, 6, 6, "Tumor"), box(0, 0, 10, 10, "Stroma")
    ring = area([[(0, 0), (10, 0), (10, 10), (0, 10)], [(3, 3), (7, 3), (7, 7), (3, 7)]], "Stroma")
    crossed = area([[(0, 0), (10, 10), (10, 0), (0, 10)]], "Stroma")
    assert hidden(small, large) == [True, False]
    assert hidden(large, small) == [False, False]
    assert hidden(small, box(4, 4, 6, 6, "Stroma")) == [True, False]
    assert hidden(small, box(0, 0, 10, 10, "Tumor")) == [False, False]
    assert hidden(small, ring) == [False, False]
    assert hidden(small, box(0, 0, 5, 10, "Stroma"), box(5, 0, 10, 10, "Fat")) == [True, False, False]
    assert hidden(small, box(0, 0, 5.9, 10, "Stroma")) == [False, False]
    assert hidden(box(1, 4, 2, 6, "Tumor"), crossed) == [True, False]
    assert hidden(box(4.8, 0.5, 5.2, 1, "Tumor"), crossed) == [False, False]


def test_a_count_bounds_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visible_areas, "MOST_PAIRS", 100)
    stacked = [box(0, 0, 10, 10, "ab"[k % 2]) for k in range(50)]
    assert not any(hidden(*stacked))


def test_classes_that_end_without_a_pixel_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A class that is wholly painted over was once learned from no pixel, without a word."""
    caplog.set_level(logging.INFO)
    for slide in "ab":
        write_geojson(tmp_path / f"{slide}.geojson", box(4, 4, 6, 6, "Tumor"), box(0, 0, 9, 9, "Stroma"))
    write_geojson(tmp_path / "c.geojson", box(0, 0, 9, 9, "Stroma"))
    annotations(tmp_path, "a", "b", "c")
    assert "2 areas are completely painted over by later ones: a (1 Tumor), b (1 Tumor)" in caplog.text
    assert "classes without a pixel on any slide: Tumor" in caplog.text
    caplog.clear()
    annotations(tmp_path, "a", "b", "c", class_map=("Tumor=tissue", "Stroma=tissue"))
    assert "painted over" not in caplog.text
    assert "without a pixel" not in caplog.text


def test_what_lies_off_the_slide(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", box(3000, 3000, 3300, 3300, "x"), box(-50, 0, -5, 9, "x"))
    write_geojson(tmp_path / "b.geojson", box(900, 0, 1100, 100, "x"), box(2000, 0, 2100, 100, "x"))
    write_geojson(tmp_path / "c.geojson", box(0, 0, 1000, 800, "x"))
    write_geojson(tmp_path / "d.geojson")
    found = annotations(tmp_path, "a", "b", "c", "d")
    with pytest.raises(SlideError, match=r"a\.geojson lies completely outside of its slide: .* 1000 x 800 px"):
        found.outside("a", 1000, 800)
    assert found.outside("b", 1000, 800) == (
        "66.7% of the annotated area lies outside of the slide, 1 of 2 areas wholly"
    )
    assert found.outside("c", 1000, 800) == found.outside("d", 1000, 800) == ""
    assert found.outside("c", 1005, 800, Bounds(5, 0, 1000, 800)) == ""
    assert "wholly" in found.outside("c", 1000, 800, Bounds(500, 0, 500, 800))
    with pytest.raises(SlideError, match="completely outside"):
        found.outside("c", 1000, 800, Bounds(1000, 0, 0, 0))


def test_a_polygon_that_crosses_itself_very_often_costs_no_memory() -> None:
    """Its valid area would have a point for each of 25 million crossings."""
    star = [(1000 * (k % 2) + k / 100, k) for k in range(10_000)]
    star += [(k, 1000 * (k % 2) + k / 100) for k in range(10_000)]
    assert hidden(box(400, 400, 500, 500, "Tumor"), area([star], "Stroma")) == [False, False]
