"""Every format into GeoJSON and masks and back, and outlines of masks: the areas stay, holes, order and corners too."""

import threading
from pathlib import Path
from unittest import mock

import imagecodecs
import numpy as np
import pytest
import shapely
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

import pipelines.labels.conversion
from pipelines.backends.mask import ArrayMask, open_mask
from pipelines.labels.annotation_files import read_annotation
from pipelines.labels.conversion import outlines, read_areas, write_area_mask, write_areas
from pipelines.labels.drawing import Origin, make_polygon_set
from pipelines.labels.geojson import read_geojson
from pipelines.labels.rasterize import PixelGrid, paint
from pipelines.slides.geometry import Bounds
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import area, blank_slide, box, write_geojson

SAMPLES = Path(__file__).parents[2] / "data" / "annotations"
WITH_AREAS = sorted(
    path for path in SAMPLES.iterdir() if path.stem not in ("qupath-polyline", "qupath-multipoint", "asap-pointset")
)


def class_masks(drawing, l0_box, side=400):
    """bool (side, side) by class name: the painted drawing over a box of level 0."""
    left, top, right, bottom = l0_box
    grid = PixelGrid(left, top, (right - left) / side, (bottom - top) / side, side, side)
    out = np.zeros((side, side), np.uint8)
    paint(drawing, np.arange(1, len(drawing.classes) + 1, dtype=np.uint8), grid, (0, 0), out)
    return {name: out == index for index, name in enumerate(drawing.classes, start=1)}


def least_iou(drawing, other):
    """Compare the drawings of all classes."""
    assert drawing.classes == other.classes
    l0_box = np.concatenate([drawing.box[:, :2].min(axis=0) - 1, drawing.box[:, 2:].max(axis=0) + 1])
    ours, theirs = class_masks(drawing, l0_box), class_masks(other, l0_box)
    assert all(mask.any() for mask in ours.values())
    return min((ours[name] & theirs[name]).sum() / (ours[name] | theirs[name]).sum() for name in ours)


def shapes(drawing):
    """The union of all areas, as shapely has it."""
    polygons = [drawing.rings(k) for k in range(len(drawing.box))]
    return shapely.union_all([shapely.make_valid(shapely.Polygon(outer, holes)) for outer, *holes in polygons])


def drawn(folder):
    """Holes with an island, a class on top of another and below a third, and areas that are ignored."""
    outer, hole = [(10, 10), (90, 15), (80, 90), (12, 70)], [(30, 30), (60, 32), (55, 60), (28, 55)]
    return write_geojson(
        folder / "drawn.geojson",
        area([outer, hole], "Tumor"),
        box(40, 40, 50, 50, "Tumor"),
        box(5, 20, 25, 40, 'fat & "stroma"'),
        box(15, 25, 20, 60, "Tumor"),
        box(70, 70, 95, 95, "Ignore*"),
    )


@pytest.mark.parametrize("path", [None, *WITH_AREAS], ids=lambda path: getattr(path, "name", "drawn"))
def test_areas_written_as_geojson_are_those_that_were_read(tmp_path, path):
    before = read_annotation(path or drawn(tmp_path))
    write_areas(before, tmp_path / "a.geojson", None)
    after = read_areas(tmp_path / "a.geojson", None)
    assert least_iou(before, after) == 1.0
    if path:
        assert shapes(before).equals(shapes(after))


@pytest.mark.parametrize("suffix", [".tif", ".png"])
@pytest.mark.parametrize("mpp", [0.5, 1.3])
def test_masks_to_areas_and_back(tmp_path, suffix, mpp):
    slide = blank_slide(701, 523)
    size = write_area_mask(read_geojson(drawn(tmp_path)), tmp_path / f"a{suffix}", slide, mpp)
    assert (size.width, size.height) == (round(701 * 0.5 / mpp), round(523 * 0.5 / mpp))
    assert (tmp_path / "classes.txt").read_text() == '1 Tumor\n2 fat & "stroma"\n'
    write_areas(read_areas(tmp_path / f"a{suffix}", slide), tmp_path / "b.geojson", slide)
    write_area_mask(read_geojson(tmp_path / "b.geojson"), tmp_path / f"c{suffix}", slide, mpp)
    first, second = np.empty((2, size.height, size.width), np.uint8)
    for name, pixels in (("a", first), ("c", second)):
        open_mask(tmp_path / f"{name}{suffix}").sample(np.arange(size.width), np.arange(size.height), pixels)
    assert np.unique(first).tolist() == [0, 1, 2, 255]
    np.testing.assert_array_equal(first, second)


def test_a_mask_at_level_0_has_the_areas_that_were_drawn(tmp_path):
    before = read_geojson(SAMPLES / "histoqc-holed.geojson")
    before = before.moved(*(9 - before.box[:, :2].min(axis=0)).tolist(), Origin.LEVEL0)
    slide = blank_slide(*(int(side) + 9 for side in before.box[:, 2:].max(axis=0)))
    write_area_mask(before, tmp_path / "a.tif", slide, slide.mpp)
    after = shapes(read_areas(tmp_path / "a.tif", slide))
    assert after.intersection(shapes(before)).area / after.union(shapes(before)).area >= 0.999


def test_bounds_are_added_and_taken_off(tmp_path):
    slide = blank_slide(4000, 3000, bounds=Bounds(1000, 700, 2000, 1500))
    points = "".join(f'<Coordinate X="{x}" Y="{y}"/>' for x, y in ((1010, 720), (1030, 720), (1030, 750), (1010, 750)))
    annotation = f'<Annotation Type="Polygon"><Coordinates>{points}</Coordinates></Annotation>'
    (tmp_path / "a.xml").write_text(f"<ASAP_Annotations>{annotation}</ASAP_Annotations>")
    of_level_0 = read_areas(tmp_path / "a.xml", slide).box.tolist()
    assert of_level_0 == [[1010, 720, 1030, 750]]
    write_areas(read_areas(tmp_path / "a.xml", slide), tmp_path / "b.geojson", slide)
    assert read_geojson(tmp_path / "b.geojson").box.tolist() == [[10, 20, 30, 50]]
    write_area_mask(read_geojson(tmp_path / "b.geojson"), tmp_path / "m.tif", slide, 1.0)
    assert read_areas(tmp_path / "m.tif", slide).box.tolist() == of_level_0


def test_ids_of_a_folder_stay_when_classes_come_and_a_mask_of_another_slide_is_refused(tmp_path):
    (tmp_path / "classes.txt").write_text("2 Tumor\n")
    write_area_mask(read_geojson(drawn(tmp_path)), tmp_path / "a.png", blank_slide(100, 100), 0.5)
    assert (tmp_path / "classes.txt").read_text() == '1 fat & "stroma"\n2 Tumor\n'
    assert imagecodecs.png_decode((tmp_path / "a.png").read_bytes())[20, 50] == 2
    with pytest.raises(SlideError, match="proportions of its slide"):
        read_areas(tmp_path / "a.png", blank_slide(400, 100))


@pytest.mark.parametrize("moment", ["named_ids", "paint"])
def test_conversions_into_one_folder_at_once_give_no_id_twice(tmp_path, monkeypatch, moment):
    """The list was read, then painted from, and then written: another conversion in between gave the same id."""
    (tmp_path / "classes.txt").touch()
    inner = getattr(pipelines.labels.conversion, moment)

    def convert(name):
        drawing = read_geojson(write_geojson(tmp_path / f"{name}.geojson", box(10, 10, 50, 50, name)))
        write_area_mask(drawing, tmp_path / f"{name}.png", blank_slide(100, 100), 0.5)

    other = threading.Thread(target=convert, args=["stroma"])

    def then_the_other(*arguments):
        result = inner(*arguments)
        if other.ident is None:
            other.start()
            other.join(0.5)
        return result

    monkeypatch.setattr(pipelines.labels.conversion, moment, then_the_other)
    convert("tumour")
    other.join()
    assert (tmp_path / "classes.txt").read_text() == "1 tumour\n2 stroma\n"
    assert imagecodecs.png_decode((tmp_path / "stroma.png").read_bytes())[20, 20] == 2


@pytest.mark.usefixtures("without_locks")
def test_a_folder_without_locks_is_warned_of_once(tmp_path, caplog):
    for name in ("a.png", "b.png"):
        write_area_mask(read_geojson(drawn(tmp_path)), tmp_path / name, blank_slide(100, 100), 0.5)
    (warning,) = caplog.messages
    assert f"{tmp_path}: this disk has no locks: run one conversion into the folder at a time" in warning


SHAPES = st.tuples(st.integers(1, 9), st.integers(1, 9))


@given(arrays(np.uint8, SHAPES, elements=st.integers(0, 2)), st.integers(1, 4))
def test_painted_again_they_are_the_mask(pixels, band_rows):
    with mock.patch.object(pipelines.labels.conversion, "BAND_ROWS", band_rows):
        polygons_by_value = outlines(ArrayMask(Path("mask.png"), pixels))
    assert set(polygons_by_value) == set(np.unique(pixels).tolist()) - {0}
    painted = np.zeros_like(pixels)
    for value, polygons in polygons_by_value.items():
        areas = [shapely.Polygon(outer, holes) for outer, *holes in polygons]
        assert all(shape.is_valid for shape in areas)
        assert sum(shape.area for shape in areas) == (pixels == value).sum()
        drawing = make_polygon_set(polygons, [str(value)] * len(polygons), {}, Origin.LEVEL0)
        grid = PixelGrid(0, 0, 1, 1, pixels.shape[1], pixels.shape[0])
        paint(drawing, np.array([value], np.uint8), grid, (0, 0), painted)
    np.testing.assert_array_equal(painted, pixels)
