"""From a folder of drawings to the class ids of a tile."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile

import pipelines.labels.annotation_files
from pipelines.catalog.catalog import SlideSpec, find_slides
from pipelines.labels.annotation_files import AnnotationCache
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Bounds, Region
from pipelines.slides.slide import Slide, SlideError
from tests.helpers.drawings import area, blank_slide, box, write_geojson

NUCLEI = Path(__file__).parents[3] / "data" / "nuclei"


def specs(*ids: str, root: Path = Path("slides")) -> tuple[SlideSpec, ...]:
    return tuple(SlideSpec(i, root / f"{i}.svs") for i in ids)


def annotations(folder: Path, slides: Sequence[SlideSpec]) -> SlideAnnotations:
    found = find_labels(Path("slides"), slides, annotations=folder)
    assert isinstance(found, SlideAnnotations)
    return found


def mask_of(found: SlideAnnotations, slide_id: str, slide: Slide, region: Region) -> np.ndarray:
    out = np.full((region.height, region.width), 77, np.uint8)
    found.read_mask(slide_id, slide, region, out)
    return out


def test_geojson_later_on_top_ignore_background_and_holes(tmp_path: Path) -> None:
    hole = [(2, 2), (4, 2), (4, 4), (2, 4)]
    write_geojson(
        tmp_path / "a.geojson",
        area([[(0, 0), (8, 0), (8, 8), (0, 8)], hole], "Tumor"),
        box(6, 0, 10, 3, "Stroma"),
        box(0, 6, 2, 8, "Ignore*"),
        box(5, 5, 7, 7, "Background"),
    )
    found = annotations(tmp_path, specs("a"))
    assert found.classes == ("background", "Stroma", "Tumor")
    expected = np.zeros((10, 12), np.uint8)
    expected[:8, :8] = 2
    expected[2:4, 2:4] = 0
    expected[:3, 6:10] = 1
    expected[6:8, :2] = 255
    expected[5:7, 5:7] = 0
    np.testing.assert_array_equal(mask_of(found, "a", blank_slide(50, 40), Region(0, 0, 12, 10, 0.5)), expected)


def test_classes_are_those_of_all_slides(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5, "b"))
    write_geojson(tmp_path / "b.geojson", box(0, 0, 5, 5, "a"), box(0, 0, 5, 5, "excluded"))
    found = annotations(tmp_path, specs("a", "b"))
    assert found.classes == ("background", "a", "b")
    assert mask_of(found, "a", blank_slide(50, 40), Region(0, 0, 1, 1, 0.5)) == 2
    assert mask_of(found, "b", blank_slide(50, 40), Region(0, 0, 1, 1, 0.5)) == 255


def test_geojson_counts_from_the_bounds(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", box(10, 20, 30, 50))
    slide = blank_slide(4000, 3000, bounds=Bounds(1000, 700, 2000, 1500))
    mask = mask_of(annotations(tmp_path, specs("a")), "a", slide, Region(1000, 700, 100, 100, 0.5))
    assert np.argwhere(mask)[[0, -1]].tolist() == [[20, 10], [49, 29]]


@pytest.mark.parametrize("reduced", [1, 2, 8])
@pytest.mark.parametrize("kind", ["tiff", "png"])
def test_masks_of_any_size_cover_the_slide(tmp_path: Path, reduced: int, kind: str) -> None:
    values = (np.add.outer(np.arange(1200 // reduced), np.arange(1600 // reduced)) % 3).astype(np.uint8)
    if kind == "tiff":
        tifffile.imwrite(tmp_path / "a.tif", values, tile=(64, 64), compression="deflate")
    else:
        (tmp_path / "a_mask.png").write_bytes(imagecodecs.png_encode(values))
    found = annotations(tmp_path, specs("a"))
    assert found.classes == ("background", "class_1", "class_2")
    for region in [Region(0, 0, 1600, 1200, 0.5), Region(333, 97, 120, 90, 0.5), Region(-50, 1000, 300, 200, 1.0)]:
        scale = region.mpp / 0.5
        x = np.floor((region.l0_x + (np.arange(region.width) + 0.5) * scale) / reduced).astype(int)
        y = np.floor((region.l0_y + (np.arange(region.height) + 0.5) * scale) / reduced).astype(int)
        padded = np.pad(values, 700)
        np.testing.assert_array_equal(
            mask_of(found, "a", blank_slide(1600, 1200), region), padded[y + 700][:, x + 700], err_msg=str(region)
        )


def test_a_mask_of_the_bounds_lies_on_the_bounds(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.eye(100, dtype=np.uint8) * 255))
    slide = blank_slide(4000, 2000, bounds=Bounds(1000, 700, 1000, 1000))
    mask = mask_of(annotations(tmp_path, specs("a")), "a", slide, Region(1010, 700, 20, 20, 0.5))
    assert mask[:10].tolist() == [[0] * 20] * 10
    assert mask[10:, :10].min() == 1
    assert mask[10:, 10:].max() == 0


def test_a_mask_of_another_slide_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.eye(100, dtype=np.uint8)))
    with pytest.raises(SlideError, match=r"a\.png must have the proportions .* 100 x 100 px, .* 4000 x 2000"):
        mask_of(annotations(tmp_path, specs("a")), "a", blank_slide(4000, 2000), Region(0, 0, 5, 5, 0.5))


def test_ignored_values_and_named_ids(tmp_path: Path) -> None:
    values = np.array([[0, 4, 255], [0, 9, 9]], np.uint8)
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(values))
    (tmp_path / "classes.txt").write_text("# id name\n0 glass\n9: tumour bed\n4\tstroma\n255 ignore\n\n")
    found = annotations(tmp_path, specs("a"))
    assert found.classes == ("background", "stroma", "tumour bed")
    mask = mask_of(found, "a", blank_slide(3, 2), Region(0, 0, 3, 2, 0.5))
    assert mask.tolist() == [[0, 1, 255], [0, 2, 2]]


def test_ids_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.array([[0, 1, 7, 9]], np.uint8)))
    with pytest.raises(ValueError, match=r"a\.png has 7, 9\nName the ids in .*classes\.txt"):
        annotations(tmp_path, specs("a"))
    (tmp_path / "classes.txt").write_text("1 x\n7 y\n")
    with pytest.raises(ValueError, match=r"1 x, 7 y, .*\n?.*a\.png has 9"):
        annotations(tmp_path, specs("a"))
    (tmp_path / "classes.txt").write_text("tumour\n")
    with pytest.raises(ValueError, match=r"classes\.txt line 1: expected an id .* got 'tumour'"):
        annotations(tmp_path, specs("a"))
    (tmp_path / "classes.txt").write_text("1 x\n1 y\n")
    with pytest.raises(ValueError, match=r"line 2: id 1 is 'y' here and 'x' before"):
        annotations(tmp_path, specs("a"))


def test_masks_and_geojson_together(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(imagecodecs.png_encode(np.array([[0, 2], [3, 255]], np.uint8)))
    (tmp_path / "classes.txt").write_text("2 tumour\n3 stroma\n")
    write_geojson(tmp_path / "b.geojson", box(0, 0, 1, 1, "stroma"), box(1, 0, 2, 1, "fat"))
    found = annotations(tmp_path, specs("a", "b"))
    assert found.classes == ("background", "tumour", "stroma", "fat")
    region = Region(0, 0, 2, 2, 0.5)
    assert mask_of(found, "a", blank_slide(2, 2), region).tolist() == [[0, 1], [2, 255]]
    assert mask_of(found, "b", blank_slide(2, 2), region).tolist() == [[2, 3], [0, 0]]


def test_the_shipped_nuclei(caplog: pytest.LogCaptureFixture) -> None:
    slides = find_slides(NUCLEI, mpp=0.5)
    found = find_labels(NUCLEI, slides)
    assert isinstance(found, SlideAnnotations)
    assert found.paths == annotations(NUCLEI / "masks", slides).paths
    assert found.classes == ("background", "foreground")
    assert set(found.paths) == {spec.slide_id for spec in slides}
    assert found.patient == {}
    assert not found.failed
    assert not found.unlabelled
    assert not found.unknown
    assert not caplog.records
    with slides[0].open() as slide:
        region = Region(0, 0, slide.levels[0].width, slide.levels[0].height, slide.mpp)
        mask = mask_of(found, slides[0].slide_id, slide, region)
    stored = imagecodecs.png_decode((NUCLEI / "masks" / slides[0].path.name).read_bytes())
    np.testing.assert_array_equal(mask, stored // 255)


def test_a_damaged_file_takes_its_slide_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    (tmp_path / "b.geojson").write_text("{")
    (tmp_path / "c.tif").write_bytes(b"II*\0")
    found = annotations(tmp_path, specs("a", "b", "c", "d"))
    assert set(found.paths) == {"a"}
    assert set(found.failed) == {"b", "c"}
    assert found.unlabelled == ("d",)
    text = caplog.text
    assert "b.geojson is damaged" in text
    assert "c.tif cannot be read" in text
    assert "without an annotation: 1 slide: d" in text


def test_a_file_that_breaks_later_is_named(tmp_path: Path) -> None:
    path = write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    found = pickle.loads(pickle.dumps(annotations(tmp_path, specs("a"))))  # the copy has nothing cached
    path.unlink()
    with pytest.raises(SlideError, match=r"a\.geojson cannot be read"):
        mask_of(found, "a", blank_slide(50, 40), Region(0, 0, 5, 5, 0.5))


def test_nothing_to_learn(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", {"type": "Feature", "geometry": {"type": "Point", "coordinates": [1, 2]}})
    with pytest.raises(ValueError, match=r"they draw 0 \(and 1 points or lines\)"):
        annotations(tmp_path, specs("a"))
    (tmp_path / "a.geojson").write_text("{")
    with pytest.raises(ValueError, match=r"no annotation can be read; the first: .*a\.geojson is damaged"):
        annotations(tmp_path, specs("a"))


def test_what_fits_nothing_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_geojson(tmp_path / "a.svs.geojson", box(0, 0, 5, 5), {"type": "Feature", "geometry": None})
    write_geojson(tmp_path / "sub" / "B_mask.geojson", box(0, 0, 5, 5))
    write_geojson(tmp_path / "nobody.geojson", box(0, 0, 5, 5))
    found = annotations(tmp_path, specs("a", "b"))
    assert set(found.paths) == {"a", "b"}
    assert found.unknown == (str(tmp_path / "nobody.geojson"),)
    assert "for slides that are not there: 1 file: nobody.geojson" in caplog.text
    assert "1 points, lines and empty features have no area" in caplog.text


def test_folders_that_do_not_help(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--annotations must be a folder"):
        annotations(tmp_path / "gone", specs("a"))
    write_geojson(tmp_path / "other.geojson", box(0, 0, 5, 5))
    with pytest.raises(ValueError, match=r"(?s)nothing for the slides.*a\.geojson.*for other\."):
        annotations(tmp_path, specs("a"))
    (tmp_path / "a.dcm").write_bytes(b"")
    with pytest.raises(ValueError, match=r"Other \.dcm files are no segmentations \(SEG\)"):
        annotations(tmp_path, specs("a"))


def test_two_files_for_one_slide(tmp_path: Path) -> None:
    write_geojson(tmp_path / "x" / "a.geojson", box(0, 0, 5, 5, "x"))
    (tmp_path / "x" / "a.png").write_bytes(imagecodecs.png_encode(np.eye(4, dtype=np.uint8)))
    assert annotations(tmp_path, specs("a")).classes == ("background", "x")
    write_geojson(tmp_path / "y" / "a.geojson", box(0, 0, 5, 5, "y"))
    with pytest.raises(ValueError, match=r"slide 'a' has .*x.a\.geojson and .*y.a\.geojson\nkeep one"):
        annotations(tmp_path, specs("a"))


@pytest.mark.parametrize("where", ["slides", "slides/annotations", "slides/deep", "slides/deep/masks"])
@pytest.mark.parametrize("kind", ["geojson", "json", "mask"])
def test_annotations_beside_the_slides(tmp_path: Path, where: str, kind: str) -> None:
    root = tmp_path / "slides"
    slide = root / "deep" / "a.png"
    (tmp_path / where).mkdir(parents=True)
    slide.parent.mkdir(exist_ok=True)
    slide.write_bytes(imagecodecs.png_encode(np.full((4, 4, 3), 255, np.uint8)))
    if kind == "mask":
        (tmp_path / where / "a_mask.png").write_bytes(imagecodecs.png_encode(np.eye(4, dtype=np.uint8)))
    else:
        write_geojson(tmp_path / where / f"a.{kind}", box(0, 0, 2, 2))
    if where == "slides" and kind != "geojson":
        (root / "settings.json").write_text("{}")
    found = find_labels(root, find_slides(root))
    assert isinstance(found, SlideAnnotations)
    assert found.paths["a"].parent == tmp_path / where


def test_patients_come_from_the_table(tmp_path: Path) -> None:
    root = tmp_path / "slides"
    for slide in "ab":
        write_geojson(root / f"{slide}.geojson", box(0, 0, 5, 5))
    (root / "labels.csv").write_text("slide,patient\na,p1\nb,\n")
    assert find_labels(root, specs("a", "b", root=root)).patient == {"a": "p1"}
    (tmp_path / "t.csv").write_text("image;case_id;label\na;p1;x\nb;p1;y\n")
    both = find_labels(root, specs("a", "b", root=root), labels=tmp_path / "t.csv", annotations=root)
    assert isinstance(both, SlideAnnotations)
    assert both.patient == {"a": "p1", "b": "p1"}


def test_out_of_another_shape(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    found = annotations(tmp_path, specs("a"))
    for out in (np.zeros((5, 4), np.uint8), np.zeros((4, 5), np.int64)):
        with pytest.raises(ValueError, match=r"out must be uint8 \(4, 5\)"):
            found.read_mask("a", blank_slide(50, 40), Region(0, 0, 5, 4, 0.5), out)


def test_many_threads(tmp_path: Path) -> None:
    ids = [f"s{i}" for i in range(6)]
    rng = np.random.default_rng(0)
    values = {i: rng.integers(0, 3, (300, 400)).astype(np.uint8) for i in ids}
    for i in ids[:3]:
        tifffile.imwrite(tmp_path / f"{i}.tif", values[i], tile=(64, 64), compression="deflate")
    for i in ids[3:]:
        values[i][:] = 0
        values[i][10:200, 30:300] = 1
        write_geojson(tmp_path / f"{i}.geojson", box(30, 10, 300, 200, "class_1"))
    found = dataclasses.replace(annotations(tmp_path, specs(*ids)), _cache=AnnotationCache(files=2))
    slide = blank_slide(400, 300)

    def read(job: int) -> bool:
        slide_id, x, y = ids[job % 6], job * 37 % 250, job * 53 % 200
        got = mask_of(found, slide_id, slide, Region(x, y, 150, 100, 0.5))
        return np.array_equal(got, values[slide_id][y : y + 100, x : x + 150])

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(read, range(300)))


def test_the_cache_is_bounded_and_reads_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [write_geojson(tmp_path / f"{i}.geojson", *[box(0, 0, 5, 5)] * 100) for i in range(4)]
    reads: list[Path] = []
    cached = pipelines.labels.annotation_files
    real = cached.read_geojson
    monkeypatch.setattr(cached, "read_geojson", lambda path: (reads.append(path), real(path))[1])
    cache = AnnotationCache(files=2)
    with ThreadPoolExecutor(8) as pool:
        assert len({id(a) for a in pool.map(cache.get, [paths[0]] * 50)}) == 1
    assert reads == paths[:1]
    for i in (1, 0, 2, 0, 1):  # 2 pushes 1 out, 0 stays: it was used after 1
        cache.get(paths[i])
    assert reads == [paths[i] for i in (0, 1, 2, 1)]
    reads.clear()
    small = AnnotationCache(files=9, total_bytes=real(paths[0]).nbytes * 2)
    for i in (0, 1, 0, 2, 0):
        small.get(paths[i])
    assert reads == [paths[i] for i in (0, 1, 2)]
    assert not cache._reading, "no lock is kept of a file that nobody reads"
    assert not small._reading
    reads.clear()
    usual = AnnotationCache()
    many = [paths[0].with_name(f"n{i}.geojson") for i in range(100)]  # as many slides may be open at once
    for path in many:
        path.write_bytes(paths[0].read_bytes())
    for path in many * 3:
        usual.get(path)
    assert reads == many


def test_a_slide_without_a_fine_enough_level(tmp_path: Path) -> None:
    write_geojson(tmp_path / "a.geojson", box(0, 0, 5, 5))
    with pytest.raises(ValueError, match=r"mpp 0\.1 cannot be had"):
        mask_of(annotations(tmp_path, specs("a")), "a", blank_slide(50, 40), Region(0, 0, 5, 5, 0.1))
