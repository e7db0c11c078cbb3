"""Painted polygons against a ray per pixel centre."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely.geometry import shape

from pipelines.backends.level_reader import memory_slide
from pipelines.labels import drawing as drawing_module
from pipelines.labels import rasterize
from pipelines.labels.drawing import PolygonSet
from pipelines.labels.geojson import read_geojson
from pipelines.labels.rasterize import PixelGrid, paint
from pipelines.slides.geometry import Region
from tests.helpers.drawings import Ring, area, blank_slide, box, edge_distance, inside, write_geojson

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"

coordinate = st.one_of(st.integers(-20, 70).map(float), st.floats(-20, 70, allow_nan=False, width=32))
ring = st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=9)
polygon = st.lists(ring, min_size=1, max_size=3)  # rings anywhere: they may cross themselves and each other


def painted(drawing: PolygonSet, grid: PixelGrid, ids: list[int] | None = None) -> np.ndarray:
    out = np.zeros((grid.height, grid.width), np.uint8)
    paint(drawing, np.array(ids or range(1, len(drawing.classes) + 1), np.uint8), grid, (0, 0), out)
    return out


def drawing_of(tmp: Path, *polygons: list[Ring]) -> PolygonSet:
    return read_geojson(write_geojson(tmp / "d.geojson", *(area(rings, f"c{i}") for i, rings in enumerate(polygons))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("rasterize")


@settings(max_examples=100, deadline=None)
@given(
    polygons=st.lists(polygon, min_size=1, max_size=4),
    origin=st.tuples(st.integers(-9, 30), st.integers(-9, 30)),
    step=st.sampled_from([1.0, 0.5, 1.7, 4.0]),
    run=st.sampled_from([64, 3, 1]),
)
def test_a_pixel_has_the_class_of_the_last_polygon_around_its_centre(
    folder: Path, polygons: list[list[Ring]], origin: tuple[int, int], step: float, run: int
) -> None:
    """Whether polygons are found whole, or edge by edge, by their rows."""
    grid = PixelGrid(float(origin[0]), float(origin[1]), step, step, 33, 21)
    x, y = grid.centres_x(), grid.centres_y()
    expected = np.zeros((21, 33), np.uint8)
    certain = np.ones((21, 33), bool)
    for value, rings in enumerate(polygons, start=1):
        expected[inside(rings, x, y)] = value
        certain &= edge_distance(rings, x, y) > 1e-6  # on the edge itself rounding decides
    with mock.patch.object(drawing_module, "RUN_EDGES", run):
        got = painted(drawing_of(folder, *polygons), grid)
    np.testing.assert_array_equal(got[certain], expected[certain])


@settings(max_examples=60, deadline=None)
@given(middle=st.lists(st.tuples(coordinate, coordinate), min_size=1, max_size=6))
def test_neighbours_leave_no_gap_and_no_overlap(folder: Path, middle: list[tuple[float, float]]) -> None:
    line = [(25.0, -30.0), *sorted(middle, key=lambda p: p[1]), (25.0, 90.0)]
    left, right = [[*line, (-30.0, 90.0), (-30.0, -30.0)]], [[*line, (90.0, 90.0), (90.0, -30.0)]]
    grid = PixelGrid(0, 0, 1, 1, 50, 50)
    times = sum((painted(drawing_of(folder, side), grid) > 0).astype(int) for side in (left, right))
    assert (times == 1).all()


def test_a_box_on_pixel_borders_is_exact(tmp_path: Path) -> None:
    got = painted(drawing_of(tmp_path, [[(3, 2), (3, 6), (9, 6), (9, 2)]]), PixelGrid(0, 0, 1, 1, 12, 8))
    expected = np.zeros((8, 12), np.uint8)
    expected[2:6, 3:9] = 1
    np.testing.assert_array_equal(got, expected)


def test_nothing_drawn_leaves_everything(tmp_path: Path) -> None:
    grid = PixelGrid(1000, 1000, 1, 1, 5, 4)
    out = np.full((4, 5), 7, np.uint8)
    paint(drawing_of(tmp_path, [[(3, 2), (3, 6), (9, 6)]]), np.array([1], np.uint8), grid, (0, 0), out)
    paint(read_geojson(write_geojson(tmp_path / "empty.geojson")), np.array([], np.uint8), grid, (0, 0), out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "name", ["histoqc-holed.geojson", "histoqc-multipolygon.json", "dlup-qupath05.geojson", "qupath-brush.json"]
)
def test_real_drawings_against_shapely(name: str) -> None:
    drawing = read_geojson(SAMPLES / name)
    left, top = drawing.box[:, :2].min(axis=0)
    right, bottom = drawing.box[:, 2:].max(axis=0)
    step = max(right - left, bottom - top) / 190
    grid = PixelGrid(left - 5 * step, top - 5 * step, step, step, 200, 200)
    x, y = np.meshgrid(grid.centres_x(), grid.centres_y())
    expected = np.zeros((200, 200), np.uint8)
    document = json.loads((SAMPLES / name).read_text())
    features = document if isinstance(document, list) else document.get("features", [document])
    for feature in features:
        expected[shapely.contains_xy(shape(feature["geometry"]), x, y)] = 1
    assert 0.05 < expected.mean() < 0.95
    got = painted(drawing, grid, [1] * len(drawing.classes))
    edges = shapely.linestrings(np.stack([drawing.start, drawing.end], axis=1))
    certain = shapely.distance(shapely.union_all(edges), shapely.points(x, y)) > 1e-6
    np.testing.assert_array_equal(got[certain], expected[certain])


def test_a_tile_is_cut_out_of_the_whole(tmp_path: Path) -> None:
    drawing = read_geojson(SAMPLES / "histoqc-holed.geojson")
    whole = painted(drawing, PixelGrid(10000, 16700, 8, 8, 430, 350))
    tile = painted(drawing, PixelGrid(10000 + 8 * 211, 16700 + 8 * 97, 8, 8, 128, 128))
    np.testing.assert_array_equal(tile, whole[97 : 97 + 128, 211 : 211 + 128])
    assert 0 < tile.mean() < 1


@pytest.mark.parametrize("mpp", [0.5, 0.503, 1.0, 1.4, 2.0, 4.0, 7.0])
@pytest.mark.parametrize("origin", [(0, 0), (13, 7), (-21, 38)])
def test_the_mask_lies_on_the_pixels(tmp_path: Path, mpp: float, origin: tuple[int, int]) -> None:
    """A box that is black on the slide and drawn in the annotation: the two agree wherever a pixel is not mixed."""
    level0 = np.full((512, 512, 3), 255, np.uint8)
    level0[128:320, 64:256] = 0
    slide = memory_slide([level0, level0[::4, ::4]], 0.5)
    region = Region(*origin, 60, 50, mpp)
    grid = PixelGrid.of(slide, region)
    got = painted(read_geojson(write_geojson(tmp_path / "d.geojson", box(64, 128, 256, 320))), grid)
    pixels = slide.read(region)[:, :, 0]
    pure = (pixels == 0) | (pixels == 255)
    assert pure.mean() > 0.8
    np.testing.assert_array_equal(got[pure] == 1, pixels[pure] == 0)


def test_a_grid_begins_at_a_px_of_the_level() -> None:
    level0 = np.zeros((512, 512, 3), np.uint8)
    grid = PixelGrid.of(memory_slide([level0, level0[::4, ::4]], 0.5), Region(13, 7, 60, 50, 2.0))
    assert (grid.l0_x, grid.l0_y, grid.l0_step_x, grid.l0_step_y) == (12, 8, 4, 4)


def test_large_coordinates_keep_their_precision(tmp_path: Path) -> None:
    rings = [[(99_000.25, 98_000.5), (99_040.75, 98_003.5), (99_012.5, 98_031.25)]]
    grid = PixelGrid.of(blank_slide(100_000, 100_000), Region(98_990, 97_990, 64, 64, 0.5))
    got = painted(drawing_of(tmp_path, rings), grid)
    np.testing.assert_array_equal(got > 0, inside(rings, grid.centres_x(), grid.centres_y()))


def test_halves_of_a_tile_are_the_tile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile with many crossings is painted in parts, which bounds the memory, and not a pixel differs."""
    rng = np.random.default_rng(1)
    rings = [[tuple(p) for p in rng.uniform(0, 100, (6, 2)).tolist()] for _ in range(40)]
    drawing = read_geojson(
        write_geojson(tmp_path / "a.geojson", *(area([r], "ab"[k % 2]) for k, r in enumerate(rings)))
    )
    grid = PixelGrid.of(blank_slide(100, 100), Region(3, 5, 64, 77, 0.6))
    whole, parts = np.zeros((2, 77, 64), np.uint8)
    paint(drawing, np.array([1, 2], np.uint8), grid, (0, 0), whole)
    monkeypatch.setattr(rasterize, "CROSSINGS_AT_ONCE", 50)
    paint(drawing, np.array([1, 2], np.uint8), grid, (0, 0), parts)
    np.testing.assert_array_equal(whole, parts)
    assert len(np.unique(whole)) == 3


def test_a_polygon_that_crosses_itself_very_often_is_refused(tmp_path: Path) -> None:
    """Of 100,000 points it took 3 GB and seconds for each tile."""
    zigzag = [(k % 100, 1000 * (k % 2)) for k in range(30_000)]
    drawing = read_geojson(write_geojson(tmp_path / "a.geojson", area([zigzag])))
    with pytest.raises(ValueError, match="crossings of edges with the rows of one tile of 512 x 512 px"):
        paint(
            drawing, np.ones(1, np.uint8), PixelGrid.of(blank_slide(512, 512), Region(0, 0, 512, 512, 0.5)), (0, 0),
            np.zeros((512, 512), np.uint8),
        )  # fmt: skip
