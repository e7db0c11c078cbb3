"""QuPath's GeoJSON in all its layouts, real files, and damaged ones."""

import json
from pathlib import Path

import numpy as np
import pytest

from pipelines.labels.annotation_files import read_annotation
from pipelines.labels.geojson import read_geojson
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import area, box, write_geojson

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"


@pytest.mark.parametrize(
    ("name", "polygons", "classes", "without_area"),
    [
        ("qupath-rectangle.json", 1, ("rectangle",), 0),
        ("qupath-brush.json", 1, ("brush",), 0),
        ("qupath-ellipse.json", 1, ("ellipse",), 0),
        ("qupath-polyline.json", 0, (), 1),
        ("qupath-multipoint.json", 0, (), 1),
        ("qupath-polygon-cell-classified.json", 4, ("Cell", "Nucleus"), 0),
        ("dlup-qupath05.geojson", 3, ("UT", "I"), 0),
        ("histoqc-holed.geojson", 1, ("foreground",), 0),
        ("histoqc-multipolygon.json", 8, ("Tumor", "Invborder"), 0),
        ("large_image-sample.geojson", 10, ("foreground",), 0),
    ],
)
def test_real_files(name, polygons, classes, without_area):
    drawing = read_geojson(SAMPLES / name)
    assert (len(drawing.box), drawing.classes, sum(drawing.left_out.values())) == (polygons, classes, without_area)
    for i in range(polygons):
        edges = slice(drawing.first_edge[i], drawing.first_edge[i + 1])
        start, end = (np.sort(points[edges], axis=0) for points in (drawing.start, drawing.end))
        np.testing.assert_array_equal(start, end, err_msg=f"polygon {i} is not closed")


def write(path, document):
    path.write_text(json.dumps(document))
    return path


FEATURE = box(1, 2, 5, 9, "Tumor")
COLLECTION = {"type": "FeatureCollection", "features": [FEATURE]}


@pytest.mark.parametrize("layout", [COLLECTION, [FEATURE], FEATURE, [COLLECTION]])
def test_the_layouts_are_one(tmp_path, layout):
    drawing = read_geojson(write(tmp_path / "d.json", layout))
    assert drawing.classes == ("Tumor",)
    np.testing.assert_array_equal(drawing.box, [[1, 2, 5, 9]])


def test_parts_of_multipolygons_and_collections_are_polygons(tmp_path):
    square, hole = box(0, 0, 9, 9)["geometry"]["coordinates"][0], box(3, 3, 6, 6)["geometry"]["coordinates"][0]
    geometry = {
        "type": "GeometryCollection",
        "geometries": [
            {"type": "MultiPolygon", "coordinates": [[square, hole], [square]]},
            {"type": "Point", "coordinates": [1, 2]},
            {"type": "GeometryCollection", "geometries": [{"type": "Polygon", "coordinates": [square]}]},
        ],
    }
    drawing = read_geojson(write(tmp_path / "d.json", {"type": "Feature", "geometry": geometry, "properties": None}))
    assert np.diff(drawing.first_edge).tolist() == [10, 5, 5]
    assert sum(drawing.left_out.values()) == 0


@pytest.mark.parametrize(
    ("properties", "name"),
    [
        ({"classification": {"name": "Tumor", "colorRGB": -1}}, "Tumor"),
        ({"classification": {"names": ["Tumor", "Positive"]}}, "Tumor: Positive"),
        ({"classification": {"name": "Tumor"}, "name": "no. 3"}, "Tumor"),
        ({"classification": "Stroma"}, "Stroma"),
        ({"name": " gland "}, "gland"),
        ({"classification": None}, "foreground"),
        ({}, "foreground"),
    ],
)
def test_class_names(tmp_path, properties, name):
    feature = box(0, 0, 2, 2) | {"properties": properties}
    assert read_geojson(write(tmp_path / "d.json", feature)).classes == (name,)


def test_heights_and_open_rings_are_accepted_and_too_few_points_cost_themselves(tmp_path):
    """A stray click once cost the annotations of its whole slide."""
    feature = area([[(0, 0, 7), (4, 0, 7), (4, 4, 7)]])  # GeoJSON allows a third value
    drawing = read_geojson(write(tmp_path / "d.json", feature))
    np.testing.assert_array_equal(drawing.end, [[4, 0], [4, 4], [0, 0]])
    stray = [area([]), area([[]]), area([[(1, 1), (2, 2)]]), area([[(0, 0), (9, 0), (9, 9)], [(1, 1)]], "b")]
    parts = {"type": "MultiPolygon", "coordinates": [[[(0, 0), (5, 0), (5, 5)]], [], [[(1, 1)]]]}
    features = box(0, 0, 5, 5, "a"), *stray, {"type": "Feature", "geometry": parts}
    drawing = read_geojson(write_geojson(tmp_path / "a.geojson", *features))
    assert drawing.classes == ("a", "b", "foreground")
    assert len(drawing.polygon_class) == 3
    assert drawing.left_out == {"polygon of fewer than 3 points": 5}


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"", "not JSON"),
        (b"\xff\xfe\x00", "not JSON"),
        (b'{"type": "FeatureCollection", "features": [', "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b"<html></html>", "not JSON"),
        (b"7", "found 'int'"),
        (b'{"version": "2.0"}', "expected a FeatureCollection"),
        (b'{"type": "FeatureCollection"}', "features"),
        (b'[{"type": "Feature"}]', "feature 1: KeyError: 'geometry'"),
        (json.dumps([box(0, 0, 1, 1), {"type": "Feature", "geometry": {"type": "Circle"}}]).encode(), "feature 2"),
        (json.dumps(area([[(0, 0), (1, 1), (float("nan"), 2)]])).encode(), "a coordinate is not a finite number"),
        (json.dumps(area([["ab", "cd", "ef"]])).encode(), "ValueError"),
        (json.dumps(area([[1, 2, 3]])).encode(), "TypeError"),
        (json.dumps(box(0, 0, 1, 1) | {"properties": [1]}).encode(), "AttributeError"),
    ],
)
def test_damaged_files_are_named(tmp_path, content, complaint):
    path = tmp_path / "broken.geojson"
    path.write_bytes(content)
    with pytest.raises(SlideError, match=r"broken\.geojson is damaged") as caught:
        read_geojson(path)
    assert complaint in str(caught.value)
    path.unlink()
    with pytest.raises(SlideError, match=r"broken\.geojson cannot be read"):
        read_annotation(path)
