"""Painted polygons against a ray per pixel centre; areas off the slide and areas painted over."""

import json
import logging
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import shapely
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely.geometry import shape

from pipelines.labels import drawing as drawing_module
from pipelines.labels import drawing as visible_areas
from pipelines.labels import rasterize
from pipelines.labels.drawing import Origin, areas_within, make_polygon_set, painted_over
from pipelines.labels.geojson import read_geojson
from pipelines.labels.rasterize import PixelGrid, paint
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import annotations_in, area, blank_slide, box, edge_distance, inside, write_geojson
from tests.helpers.memory_slide import memory_slide

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"

coordinate = st.one_of(st.integers(-20, 70).map(float), st.floats(-20, 70, allow_nan=False, width=32))
ring = st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=9)
polygon = st.lists(ring, min_size=1, max_size=3)  # rings anywhere: they may cross themselves and each other


def painted(drawing, grid, ids=None):
    out = np.zeros((grid.height, grid.width), np.uint8)
    paint(drawing, np.array(ids or range(1, len(drawing.classes) + 1), np.uint8), grid, (0, 0), out)
    return out


def drawing_of(tmp, *polygons):
    return read_geojson(write_geojson(tmp / "d.geojson", *(area(rings, f"c{i}") for i, rings in enumerate(polygons))))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("rasterize")


@settings(max_examples=100, deadline=None)
@given(
    polygons=st.lists(polygon, min_size=1, max_size=4),
    origin=st.tuples(st.integers(-9, 30), st.integers(-9, 30)),
    step=st.sampled_from([1.0, 0.5, 1.7, 4.0]),
    run=st.sampled_from([64, 3, 1]),
)
def test_a_pixel_has_the_class_of_the_last_polygon_around_its_centre(folder, polygons, origin, step, run):
    """Polygons are found whole, or edge by edge, by their rows."""
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
def test_neighbours_leave_no_gap_and_no_overlap(folder, middle):
    line = [(25.0, -30.0), *sorted(middle, key=lambda p: p[1]), (25.0, 90.0)]
    left, right = [[*line, (-30.0, 90.0), (-30.0, -30.0)]], [[*line, (90.0, 90.0), (90.0, -30.0)]]
    grid = PixelGrid(0, 0, 1, 1, 50, 50)
    times = sum((painted(drawing_of(folder, side), grid) > 0).astype(int) for side in (left, right))
    assert (times == 1).all()


def test_a_box_on_pixel_borders_is_exact_and_nothing_drawn_leaves_everything(tmp_path):
    got = painted(drawing_of(tmp_path, [[(3, 2), (3, 6), (9, 6), (9, 2)]]), PixelGrid(0, 0, 1, 1, 12, 8))
    expected = np.zeros((8, 12), np.uint8)
    expected[2:6, 3:9] = 1
    np.testing.assert_array_equal(got, expected)
    grid, out = PixelGrid(1000, 1000, 1, 1, 5, 4), np.full((4, 5), 7, np.uint8)
    paint(drawing_of(tmp_path, [[(3, 2), (3, 6), (9, 6)]]), np.array([1], np.uint8), grid, (0, 0), out)
    paint(read_geojson(write_geojson(tmp_path / "empty.geojson")), np.array([], np.uint8), grid, (0, 0), out)
    assert (out == 7).all()


@pytest.mark.parametrize(
    "name", ["histoqc-holed.geojson", "histoqc-multipolygon.json", "dlup-qupath05.geojson", "qupath-brush.json"]
)
def test_real_drawings_against_shapely(name):
    drawing = read_geojson(SAMPLES / name)
    left, top = drawing.box[:, :2].min(axis=0)
    right, bottom = drawing.box[:, 2:].max(axis=0)
    step = max(right - left, bottom - top) / 190
    grid = PixelGrid(left - 5 * step, top - 5 * step, step, step, 200, 200)
    x, y = np.meshgrid(grid.centres_x(), grid.centres_y())
    expected = np.zeros((200, 200), np.uint8)
    document = json.loads((SAMPLES / name).read_text())
    features = document if isinstance(document, list) else document.get("features", [document])
    for geometry in (shape(feature["geometry"]) for feature in features):
        shapely.prepare(geometry)
        expected[shapely.contains_xy(geometry, x, y)] = 1
    assert 0.05 < expected.mean() < 0.95
    got = painted(drawing, grid, [1] * len(drawing.classes))
    edges = shapely.STRtree(shapely.linestrings(np.stack([drawing.start, drawing.end], axis=1)))
    points = shapely.points(x, y).ravel()
    certain = (edges.query_nearest(points, return_distance=True, all_matches=False)[1] > 1e-6).reshape(x.shape)
    np.testing.assert_array_equal(got[certain], expected[certain])


@pytest.mark.parametrize("mpp", [0.5, 0.503, 1.0, 1.4, 2.0, 4.0, 7.0])
@pytest.mark.parametrize("origin", [(0, 0), (13, 7), (-21, 38)])
def test_the_mask_lies_on_the_pixels(tmp_path, mpp, origin):
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


def test_a_grid_begins_at_a_px_of_the_level():
    level0 = np.zeros((512, 512, 3), np.uint8)
    grid = PixelGrid.of(memory_slide([level0, level0[::4, ::4]], 0.5), Region(13, 7, 60, 50, 2.0))
    assert (grid.l0_x, grid.l0_y, grid.l0_step_x, grid.l0_step_y) == (12, 8, 4, 4)


def test_large_coordinates_keep_their_precision(tmp_path):
    rings = [[(99_000.25, 98_000.5), (99_040.75, 98_003.5), (99_012.5, 98_031.25)]]
    grid = PixelGrid.of(blank_slide(100_000, 100_000), Region(98_990, 97_990, 64, 64, 0.5))
    got = painted(drawing_of(tmp_path, rings), grid)
    np.testing.assert_array_equal(got > 0, inside(rings, grid.centres_x(), grid.centres_y()))


def test_halves_of_a_tile_are_the_tile(tmp_path, monkeypatch):
    """A tile with many crossings is painted in parts, which bounds the memory, and not a pixel differs."""
    rings = np.random.default_rng(1).uniform(0, 100, (40, 6, 2)).tolist()
    drawing = drawing_of(tmp_path, *([ring] for ring in rings))
    grid, ids = PixelGrid.of(blank_slide(100, 100), Region(3, 5, 64, 77, 0.6)), [1 + k % 2 for k in range(40)]
    whole = painted(drawing, grid, ids)
    monkeypatch.setattr(rasterize, "CROSSINGS_AT_ONCE", 50)
    np.testing.assert_array_equal(painted(drawing, grid, ids), whole)
    assert len(np.unique(whole)) == 3


def test_a_polygon_that_crosses_itself_very_often_is_refused(tmp_path):
    """A comb of 100,000 points took 3 GB and seconds for each tile."""
    drawing = drawing_of(tmp_path, [[(k % 100, 1000 * (k % 2)) for k in range(30_000)]])
    with pytest.raises(ValueError, match="crossings of edges with the rows of one tile of 512 x 512 px"):
        painted(drawing, PixelGrid.of(blank_slide(512, 512), Region(0, 0, 512, 512, 0.5)))


def hidden(*features):
    names = [feature["properties"]["classification"]["name"] for feature in features]
    coordinates = json.loads(json.dumps([feature["geometry"]["coordinates"] for feature in features]))
    drawing = make_polygon_set(coordinates, names, {}, Origin.BOUNDS)
    return painted_over(drawing, drawing.polygon_class).tolist()


def test_areas_within_are_those_of_shapely():
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


def test_what_is_painted_over():
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


def test_the_search_is_bounded(monkeypatch):
    """The valid area of a polygon that crosses itself very often has 25 million points."""
    star = [(1000 * (k % 2) + k / 100, k) for k in range(10_000)]
    star += [(y, x) for x, y in star]
    assert hidden(box(400, 400, 500, 500, "Tumor"), area([star], "Stroma")) == [False, False]
    monkeypatch.setattr(visible_areas, "MOST_PAIRS", 100)
    assert not any(hidden(*(box(0, 0, 10, 10, "ab"[k % 2]) for k in range(50))))


def test_classes_that_end_without_a_pixel_are_named(tmp_path, caplog):
    """A class that is wholly painted over was once learned from no pixel, without a word."""
    caplog.set_level(logging.INFO)
    for slide in "ab":
        write_geojson(tmp_path / f"{slide}.geojson", box(4, 4, 6, 6, "Tumor"), box(0, 0, 9, 9, "Stroma"))
    write_geojson(tmp_path / "c.geojson", box(0, 0, 9, 9, "Stroma"))
    annotations_in(tmp_path, "a", "b", "c")
    assert "2 areas are completely painted over by later ones: a (1 Tumor), b (1 Tumor)" in caplog.text
    assert "classes without a pixel on any slide: Tumor" in caplog.text
    caplog.clear()
    annotations_in(tmp_path, "a", "b", "c", class_map=("Tumor=tissue", "Stroma=tissue"))
    assert "painted over" not in caplog.text
    assert "without a pixel" not in caplog.text


def test_what_lies_off_the_slide(tmp_path):
    write_geojson(tmp_path / "a.geojson", box(3000, 3000, 3300, 3300, "x"), box(-50, 0, -5, 9, "x"))
    write_geojson(tmp_path / "b.geojson", box(900, 0, 1100, 100, "x"), box(2000, 0, 2100, 100, "x"))
    write_geojson(tmp_path / "c.geojson", box(0, 0, 1000, 800, "x"))
    write_geojson(tmp_path / "d.geojson")
    found = annotations_in(tmp_path, "a", "b", "c", "d")
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


@pytest.mark.parametrize(
    ("ring", "width"),
    [
        ([(1234.567 + 77.7 * np.cos(turn), 345.678 + 77.7 * np.sin(turn)) for turn in np.linspace(0, 6, 30)], 1000),
        ([(120000.123, 5.1), (120000.125, 905.7), (120010.9, 903.3), (120012.4, 7.7)], 100_000),
    ],
    ids=["round", "an edge that is almost upright"],
)
def test_a_drawing_with_decimals_to_the_right_of_its_slide_lies_off_it(tmp_path, ring, width):
    """Rounding errors were taken for an area on the slide, which was then learned as all background."""
    write_geojson(tmp_path / "a.geojson", area([ring], "x"))
    with pytest.raises(SlideError, match="lies completely outside of its slide"):
        annotations_in(tmp_path, "a").outside("a", width, 1000)
