"""From a folder of drawings to the class ids of a tile."""

import dataclasses
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import imagecodecs
import numpy as np
import pytest
import tifffile

import pipelines.labels.annotation_files
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.labels.annotation_files import AnnotationCache
from pipelines.labels.annotations import read_annotations
from pipelines.labels.class_names import ClassMap
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import SlideError
from tests.helpers.drawings import annotations_in, area, blank_slide, box, mask_of, write_geojson
from tests.helpers.real import NUCLEI


def write_png(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(imagecodecs.png_encode(np.asarray(pixels, np.uint8)))


def test_geojson_later_on_top_ignore_background_and_holes(tmp_path):
    hole = [(2, 2), (4, 2), (4, 4), (2, 4)]
    write_geojson(
        tmp_path / "a.geojson",
        area([[(0, 0), (8, 0), (8, 8), (0, 8)], hole], "Tumor"),
        box(6, 0, 10, 3, "Stroma"),
        box(0, 6, 2, 8, "Ignore*"),
        box(5, 5, 7, 7, "Background"),
    )
    found = annotations_in(tmp_path, "a")
    assert found.classes == ("background", "Stroma", "Tumor")
    expected = np.zeros((10, 12), np.uint8)
    expected[:8, :8] = 2
    expected[2:4, 2:4] = expected[5:7, 5:7] = 0
    expected[:3, 6:10] = 1
    expected[6:8, :2] = 255
    np.testing.assert_array_equal(mask_of(found, "a", blank_slide(50, 40), Region(0, 0, 12, 10, 0.5)), expected)


def test_classes_are_those_of_all_slides(tmp_path):
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5, "b"))
    write_geojson(tmp_path / "b.geojson", box(0, 0, 5, 5, "a"), box(0, 0, 5, 5, "excluded"))
    found = annotations_in(tmp_path, "a", "b")
    assert found.classes == ("background", "a", "b")
    assert mask_of(found, "a", blank_slide(50, 40), Region(0, 0, 1, 1, 0.5)) == 2
    assert mask_of(found, "b", blank_slide(50, 40), Region(0, 0, 1, 1, 0.5)) == 255


def test_geojson_counts_from_the_bounds(tmp_path):
    write_geojson(tmp_path / "a.geojson", box(10, 20, 30, 50))
    slide = blank_slide(4000, 3000, bounds=Bounds(1000, 700, 2000, 1500))
    mask = mask_of(annotations_in(tmp_path, "a"), "a", slide, Region(1000, 700, 100, 100, 0.5))
    assert np.argwhere(mask)[[0, -1]].tolist() == [[20, 10], [49, 29]]


@pytest.mark.parametrize("reduced", [1, 2, 8])
@pytest.mark.parametrize("kind", ["tiff", "png"])
def test_masks_of_any_size_cover_the_slide(tmp_path, reduced, kind):
    values = (np.add.outer(np.arange(1200 // reduced), np.arange(1600 // reduced)) % 3).astype(np.uint8)
    if kind == "tiff":
        tifffile.imwrite(tmp_path / "a.tif", values, tile=(64, 64), compression="deflate")
    else:
        write_png(tmp_path / "a_mask.png", values)
    found = annotations_in(tmp_path, "a")
    assert found.classes == ("background", "class_1", "class_2")
    padded = np.pad(values, 700)
    for region in (Region(0, 0, 1600, 1200, 0.5), Region(333, 97, 120, 90, 0.5), Region(-50, 1000, 300, 200, 1.0)):
        step = region.mpp / 0.5
        x = np.floor((region.l0_x + (np.arange(region.width) + 0.5) * step) / reduced).astype(int)
        y = np.floor((region.l0_y + (np.arange(region.height) + 0.5) * step) / reduced).astype(int)
        got = mask_of(found, "a", blank_slide(1600, 1200), region)
        np.testing.assert_array_equal(got, padded[y + 700][:, x + 700], err_msg=str(region))


def test_a_mask_of_the_bounds_lies_on_the_bounds_and_one_of_another_slide_is_named(tmp_path):
    write_png(tmp_path / "a.png", np.eye(100) * 255)
    found = annotations_in(tmp_path, "a")
    slide = blank_slide(4000, 2000, bounds=Bounds(1000, 700, 1000, 1000))
    mask = mask_of(found, "a", slide, Region(1010, 700, 20, 20, 0.5))
    np.testing.assert_array_equal(mask, np.kron([[0, 0], [1, 0]], np.ones((10, 10))))
    with pytest.raises(SlideError, match=r"a\.png must have the proportions .* 100 x 100 px, .* 4000 x 2000"):
        mask_of(found, "a", blank_slide(4000, 2000), Region(0, 0, 5, 5, 0.5))


def test_ignored_values_and_named_ids(tmp_path, caplog):
    write_png(tmp_path / "a.png", [[0, 4, 255], [0, 9, 9]])
    (tmp_path / "classes.txt").write_text("# id name\n0 glass\n9: tumour bed\n4\tstroma\n255 ignore\n255 void\n")
    found = annotations_in(tmp_path, "a")
    assert found.classes == ("background", "stroma", "tumour bed")
    for line in ("line 2: pixels of 0 are background: glass", "line 6: pixels of 255 are ignored: void"):
        assert f"classes.txt {line} is not learned" in caplog.text
    assert mask_of(found, "a", blank_slide(3, 2), Region(0, 0, 3, 2, 0.5)).tolist() == [[0, 1, 255], [0, 2, 2]]


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (None, r"a\.png has 7, 9\nName the ids in .*classes\.txt"),
        ("1 x\n7 y\n", r"1 x, 7 y, .*\n?.*a\.png has 9"),
        ("tumour\n", r"classes\.txt line 1: expected an id .* got 'tumour'"),
        ("1 x\n1 y\n", r"line 2: id 1 is 'y' here and 'x' before"),
    ],
)
def test_ids_without_a_name(tmp_path, names, words):
    write_png(tmp_path / "a.png", [[0, 1, 7, 9]])
    if names is not None:
        (tmp_path / "classes.txt").write_text(names)
    with pytest.raises(ValueError, match=words):
        annotations_in(tmp_path, "a")


def test_masks_and_geojson_together(tmp_path):
    write_png(tmp_path / "a.png", [[0, 2], [3, 255]])
    (tmp_path / "classes.txt").write_text("2 tumour\n3 stroma\n")
    write_geojson(tmp_path / "b.geojson", box(0, 0, 1, 1, "stroma"), box(1, 0, 2, 1, "fat"))
    found = annotations_in(tmp_path, "a", "b")
    assert found.classes == ("background", "tumour", "stroma", "fat")
    masks = [mask_of(found, name, blank_slide(2, 2), Region(0, 0, 2, 2, 0.5)).tolist() for name in "ab"]
    assert masks == [[[0, 1], [2, 255]], [[2, 3], [0, 0]]]
    assert found.visible == {"a": {"tumour", "stroma"}, "b": {"stroma", "fat"}}


@pytest.mark.parametrize(
    ("values", "known", "classes"),
    [
        ((0, 1, 255), None, ("foreground",)),
        ((0, 1, 2), None, ("class_1", "class_2")),
        ((0, 2), ("class_1", "class_2"), ("class_1", "class_2")),
        ((0, 1), ("class_1", "class_2"), ("class_1", "class_2")),
        ((0, 1), ("foreground",), ("foreground",)),
    ],
)
def test_names_of_values_do_not_depend_on_which_masks_there_are(values, known, classes, tmp_path):
    cv2.imwrite(str(tmp_path / "a.png"), np.array([values], np.uint8))
    specs = [SlideSpec("a", Path("a.svs"))]
    found = read_annotations(pipelines.labels.annotation_files.annotations_in(tmp_path, specs), specs, {}, known=known)
    assert found.classes == ("background", *classes)


@pytest.mark.parametrize(
    ("values", "entry", "ids"), [((0, 1, 2), "class_2=ignore", {1: 1, 2: 255}), ((0, 255), "*=tumor", {255: 1})]
)
def test_masks_mean_the_same_to_a_model_as_in_its_training(values, entry, ids, tmp_path):
    """An evaluation refused the first, and ignored the class of the second."""
    cv2.imwrite(str(tmp_path / "a.png"), np.array([values], np.uint8))
    specs, class_map = [SlideSpec("a", Path("a.svs"))], ClassMap.parse((entry,))
    files = pipelines.labels.annotation_files.annotations_in(tmp_path, specs)
    trained = read_annotations(files, specs, {}, class_map=class_map)
    scored = read_annotations(files, specs, {}, class_map=class_map, known=trained.classes[1:])
    assert trained.mask_ids == scored.mask_ids == ids


def test_another_spelling_that_the_star_would_take_is_refused_in_evaluation_too(tmp_path):
    write_geojson(tmp_path / "a.geojson", box(0, 0, 1, 1, "Tumour"))
    specs, class_map = [SlideSpec("a", Path("a.svs"))], ClassMap.parse(("T=tumour", "*=background"))
    files = pipelines.labels.annotation_files.annotations_in(tmp_path, specs)
    with pytest.raises(ValueError, match="would take other spellings of tumour: Tumour"):
        read_annotations(files, specs, {}, class_map=class_map, known=["tumour"])


@pytest.mark.parametrize("ids", [[0, 1], [0, 1, 2]])
def test_a_class_that_is_an_id_in_one_mask_and_255_in_another(ids, tmp_path):
    """255 was ignored, so that the class of some slides was lost without a word."""
    write_png(tmp_path / "a.png", [ids])
    write_png(tmp_path / "b.png", [[0, 255]])
    with pytest.raises(ValueError, match=r"besides 0 in 1 mask \(.*b\.png\), and .* as .*a\.png\. .*`1 foreground`"):
        annotations_in(tmp_path, "a", "b")
    write_png(tmp_path / "a.png", [[*ids, 255]])
    assert len(annotations_in(tmp_path, "a", "b").classes) == len(ids)
    write_png(tmp_path / "a.png", [ids])
    (tmp_path / "classes.txt").write_text("1 x\n2 y\n")
    assert annotations_in(tmp_path, "a", "b").mask_ids == {1: 1, 2: 2}


def test_the_shipped_nuclei(caplog):
    slides = find_slides(NUCLEI, mpp=0.5)
    found = find_labels(NUCLEI, slides)
    assert found.paths == annotations_in(NUCLEI / "masks", *slides).paths
    assert found.classes == ("background", "foreground")
    assert set(found.paths) == {spec.slide_id for spec in slides}
    assert not any((found.patient, found.failed, found.unlabelled, caplog.records))
    with slides[0].open() as slide:
        region = Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp)
        mask = mask_of(found, slides[0].slide_id, slide, region)
    stored = imagecodecs.png_decode((NUCLEI / "masks" / slides[0].path.name).read_bytes())
    np.testing.assert_array_equal(mask, stored // 255)


def test_a_damaged_file_takes_its_slide_out(tmp_path, caplog):
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    (tmp_path / "b.geojson").write_text("{")
    (tmp_path / "c.tif").write_bytes(b"II*\0")
    found = annotations_in(tmp_path, "a", "b", "c", "d")
    assert (set(found.paths), set(found.failed), found.unlabelled) == ({"a"}, {"b", "c"}, ("d",))
    for words in ("b.geojson is damaged", "c.tif cannot be read", "without an annotation: 1 slide: d"):
        assert words in caplog.text


def test_what_cannot_be_read_later_is_named(tmp_path):
    path = write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    found, slide = annotations_in(tmp_path, "a"), blank_slide(50, 40)
    for out in (np.zeros((5, 4), np.uint8), np.zeros((4, 5), np.int64)):
        with pytest.raises(ValueError, match=r"out must be uint8 \(4, 5\)"):
            found.read_mask("a", slide, Region(0, 0, 5, 4, 0.5), out)
    with pytest.raises(ValueError, match=r"mpp 0\.1 cannot be had"):
        mask_of(found, "a", slide, Region(0, 0, 5, 5, 0.1))
    path.unlink()
    with pytest.raises(SlideError, match=r"a\.geojson cannot be read"):
        mask_of(pickle.loads(pickle.dumps(found)), "a", slide, Region(0, 0, 5, 5, 0.5))  # the copy has nothing cached


def test_what_fits_nothing_is_said(tmp_path, caplog):
    write_geojson(tmp_path / "a.svs.geojson", box(0, 0, 5, 5), {"type": "Feature", "geometry": None})
    write_geojson(tmp_path / "sub" / "B_mask.geojson", box(0, 0, 5, 5))
    write_geojson(tmp_path / "nobody.geojson", box(0, 0, 5, 5))
    found = annotations_in(tmp_path, "a", "b")
    assert set(found.paths) == {"a", "b"}
    assert "for slides that are not there: 1 file: nobody.geojson" in caplog.text
    assert "1 points, lines and empty features have no area" in caplog.text


def test_folders_that_do_not_help(tmp_path):
    with pytest.raises(ValueError, match="--annotations must be a folder"):
        annotations_in(tmp_path / "gone", "a")
    path = write_geojson(tmp_path / "other.geojson", box(0, 0, 5, 5))
    with pytest.raises(ValueError, match=r"(?s)nothing for the slides.*a\.geojson.*for other\."):
        annotations_in(tmp_path, "a")
    (tmp_path / "a.dcm").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Other \.dcm files are no segmentations \(SEG\)"):
        annotations_in(tmp_path, "a")
    (tmp_path / "a.dcm").unlink()
    point = {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}}
    path = write_geojson(path.with_name("a.geojson"), point)
    with pytest.raises(ValueError, match=r"they draw 0 \(and 1 points or lines\)"):
        annotations_in(tmp_path, "a")
    path.write_text("{")
    with pytest.raises(ValueError, match=r"no annotation can be read; the first: .*a\.geojson is damaged"):
        annotations_in(tmp_path, "a")


def test_two_files_for_one_slide(tmp_path):
    write_geojson(tmp_path / "x" / "a.geojson", box(0, 0, 5, 5, "x"))
    write_png(tmp_path / "x" / "a.png", np.eye(4))
    assert annotations_in(tmp_path, "a").classes == ("background", "x")
    write_geojson(tmp_path / "y" / "a.geojson", box(0, 0, 5, 5, "y"))
    with pytest.raises(ValueError, match=r"slide 'a' has .*x.a\.geojson and .*y.a\.geojson\nkeep one"):
        annotations_in(tmp_path, "a")


@pytest.mark.parametrize("where", ["slides", "slides/Annotations", "slides/deep", "slides/deep/masks"])
@pytest.mark.parametrize("kind", ["geojson", "json", "mask"])
def test_annotations_beside_the_slides(tmp_path, where, kind):
    root = tmp_path / "slides"
    write_png(root / "deep" / "a.png", np.full((4, 4, 3), 255))
    if kind == "mask":
        write_png(tmp_path / where / "a_mask.png", np.eye(4))
    else:
        write_geojson(tmp_path / where / f"a.{kind}", box(0, 0, 2, 2))
    (root / "predict.json").write_text("{}")  # as app.predict --out slides leaves it
    write_png(root / "masks" / "a.png", np.eye(4))
    assert find_labels(root, find_slides(root)).paths["a"].parent == tmp_path / where


def test_patients_come_from_the_table(tmp_path):
    root = tmp_path / "slides"
    specs = [SlideSpec(slide, root / f"{slide}.svs") for slide in "ab"]
    for slide in "ab":
        write_geojson(root / f"{slide}.geojson", box(0, 0, 5, 5))
    (root / "labels.csv").write_text("slide,patient\na,p1\nb,\n")
    assert find_labels(root, specs).patient == {"a": "p1"}
    (tmp_path / "t.csv").write_text("image;case_id;label\na;p1;x\nb;p1;y\n")
    both = find_labels(root, specs, labels=tmp_path / "t.csv", annotations=root)
    assert both.classes[0] == "background"
    assert both.patient == {"a": "p1", "b": "p1"}


def test_many_threads(tmp_path):
    ids = [f"s{i}" for i in range(6)]
    rng = np.random.default_rng(0)
    values = {i: rng.integers(0, 3, (300, 400)).astype(np.uint8) for i in ids}
    for i in ids[:3]:
        tifffile.imwrite(tmp_path / f"{i}.tif", values[i], tile=(64, 64), compression="deflate")
    for i in ids[3:]:
        values[i][:] = 0
        values[i][10:200, 30:300] = 1
        write_geojson(tmp_path / f"{i}.geojson", box(30, 10, 300, 200, "class_1"))
    found = dataclasses.replace(annotations_in(tmp_path, *ids), _cache=AnnotationCache(files=2))
    slide = blank_slide(400, 300)

    def read(job):
        slide_id, x, y = ids[job % 6], job * 37 % 250, job * 53 % 200
        got = mask_of(found, slide_id, slide, Region(x, y, 150, 100, 0.5))
        return np.array_equal(got, values[slide_id][y : y + 100, x : x + 150])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(300)))


def test_the_cache_is_bounded_and_reads_once(tmp_path, monkeypatch):
    paths = [write_geojson(tmp_path / f"{i}.geojson", *[box(0, 0, 5, 5)] * 100) for i in range(4)]
    reads = []
    module = pipelines.labels.annotation_files
    real = module.read_geojson
    monkeypatch.setattr(module, "read_geojson", lambda path: (reads.append(path), real(path))[1])

    def read_of(cache, asked):
        reads.clear()
        for path in asked:
            cache.get(path)
        return list(reads)

    cache = AnnotationCache(files=2)
    with ThreadPoolExecutor(8) as pool:
        assert len({id(a) for a in pool.map(cache.get, [paths[0]] * 50)}) == 1
    assert reads == paths[:1]
    # 2 pushes 1 out, 0 stays: it was used after 1
    assert read_of(cache, [paths[i] for i in (1, 0, 2, 0, 1)]) == [paths[i] for i in (1, 2, 1)]
    small = AnnotationCache(files=9, total_bytes=real(paths[0]).nbytes * 2)
    assert read_of(small, [paths[i] for i in (0, 1, 0, 2, 0)]) == paths[:3]
    many = [paths[0].with_name(f"n{i}.geojson") for i in range(100)]  # as many slides may be open at once
    for path in many:
        path.write_bytes(paths[0].read_bytes())
    assert read_of(AnnotationCache(), many * 3) == many
