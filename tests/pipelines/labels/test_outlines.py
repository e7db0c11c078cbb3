"""Outlines of masks: the same mask when painted again, and valid polygons."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import shapely
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import pipelines.labels.conversion
from pipelines.backends.mask import ArrayMask
from pipelines.labels.conversion import outlines
from pipelines.labels.drawing import Origin, make_polygon_set
from pipelines.labels.rasterize import PixelGrid, paint

SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(arrays(np.uint8, SHAPES, elements=st.integers(0, 2)), st.integers(1, 4))
def test_painted_again_they_are_the_mask(pixels: np.ndarray, band_rows: int) -> None:
    rows, pipelines.labels.conversion.BAND_ROWS = pipelines.labels.conversion.BAND_ROWS, band_rows
    try:
        polygons_by_value = outlines(ArrayMask(Path("mask.png"), pixels))
    finally:
        pipelines.labels.conversion.BAND_ROWS = rows
    assert set(polygons_by_value) == set(np.unique(pixels).tolist()) - {0}
    painted = np.zeros_like(pixels)
    for value, polygons in polygons_by_value.items():
        shapes = [shapely.Polygon(outer, holes) for outer, *holes in polygons]
        assert all(shape.is_valid for shape in shapes)
        assert sum(shape.area for shape in shapes) == (pixels == value).sum()
        drawing = make_polygon_set(polygons, [str(value)] * len(polygons), {}, Origin.LEVEL0)
        grid = PixelGrid(0, 0, 1, 1, pixels.shape[1], pixels.shape[0])
        paint(drawing, np.array([value], np.uint8), grid, (0, 0), painted)
    np.testing.assert_array_equal(painted, pixels)


def test_an_island_in_a_hole_is_an_area_of_its_own() -> None:
    pixels = np.ones((9, 9), np.uint8)
    pixels[1:8, 1:8] = 0
    pixels[3:6, 3:6] = 1
    pixels[4, 4] = 0
    (outer, hole), (island, pit) = outlines(ArrayMask(Path("mask.png"), pixels))[1]
    assert [len(ring) for ring in (outer, hole, island, pit)] == [4, 4, 4, 4]
    assert sorted(map(tuple, hole.tolist())) == [(1, 1), (1, 8), (8, 1), (8, 8)]
    assert sorted(map(tuple, pit.tolist())) == [(4, 4), (4, 5), (5, 4), (5, 5)]
