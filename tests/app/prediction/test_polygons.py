"""Areas have the edges, holes and sizes of the px they are made of, and are valid."""

from __future__ import annotations

import numpy as np
import shapely
from hypothesis import given
from hypothesis import strategies as st
from shapely.geometry import shape

from app.prediction.area_files import collection, feature, largest_areas, peaks, polygons_of, without_saddles


def test_a_square_with_a_hole():
    mask = np.zeros((6, 7), bool)
    mask[1:5, 2:6] = True
    mask[2, 3] = False
    (polygon,) = polygons_of(mask)
    assert sorted(map(tuple, polygon.outer.tolist())) == [(2, 1), (2, 5), (6, 1), (6, 5)]
    assert [sorted(map(tuple, hole.tolist())) for hole in polygon.holes] == [[(3, 2), (3, 3), (4, 2), (4, 3)]]
    assert polygon.area == 15


@given(st.lists(st.lists(st.booleans(), min_size=6, max_size=6), min_size=5, max_size=5))
def test_any_mask_is_valid_polygons_of_its_area(rows):
    mask = without_saddles(np.array(rows))
    assert not (np.array(rows) & ~mask).any()
    polygons = polygons_of(mask)
    shapes = [shape(feature(polygon, "a", (1, 2, 3), {})["geometry"]) for polygon in polygons]
    assert all(geometry.is_valid for geometry in shapes)
    assert sum(polygon.area for polygon in polygons) == mask.sum() == sum(geometry.area for geometry in shapes)
    y, x = np.nonzero(mask)
    points = shapely.points(x + 0.5, y + 0.5)
    assert sum(np.count_nonzero(shapely.contains(geometry, points)) for geometry in shapes) == mask.sum()


def test_the_peak_of_each_area():
    mask = np.array([[1, 1, 0, 0], [0, 1, 0, 1], [0, 0, 0, 1]], bool)
    values = np.array([[9, 50, 200, 0], [0, 30, 0, 80], [0, 0, 0, 90]], np.uint8)
    assert sorted(peaks(mask, polygons_of(mask), values)) == [(1, 0, 50), (3, 2, 90)]
    assert peaks(mask & False, [], values) == []


def test_geojson_is_what_qupath_writes():
    (polygon,) = polygons_of(np.ones((2, 3), bool))
    document = collection([feature(polygon.scaled(10.0, (25.0, 100.0)), "tumour", (1, 2, 3), {"Area µm^2": 125.0})])
    (written,) = document["features"]
    assert written["geometry"]["type"] == "Polygon"
    (ring,) = written["geometry"]["coordinates"]
    assert ring[0] == ring[-1]
    assert shape(written["geometry"]).exterior.is_ccw
    assert shape(written["geometry"]).bounds == (0, 0, 25, 20)  # cut off at the slide's edge
    assert written["properties"]["classification"]["name"] == "tumour"
    assert written["properties"]["measurements"] == {"Area µm^2": 125.0}
    assert document["type"] == "FeatureCollection"


def test_the_largest_areas_are_kept():
    mask = np.zeros((5, 9), bool)
    mask[0, 0] = mask[2:5, 0:2] = mask[0, 4:7] = True
    kept, left_out = largest_areas(mask, 2)
    mask[0, 0] = False
    np.testing.assert_array_equal(kept, mask)
    assert left_out == 1


def test_an_empty_mask_has_no_areas():
    assert polygons_of(np.zeros((3, 3), bool)) == []
