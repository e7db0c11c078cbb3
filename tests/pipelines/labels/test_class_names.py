"""Class maps from the command line to the mask of a tile, and tile labels from areas."""

from __future__ import annotations

from pathlib import Path

import imagecodecs
import numpy as np
import pytest

from pipelines.catalog.catalog import SlideSpec
from pipelines.labels.annotations import SlideAnnotations
from pipelines.labels.class_names import ClassMap, TileLabel, positive_class
from pipelines.labels.slide_labels import find_labels
from pipelines.slides.geometry import Region
from tests.helpers.drawings import blank_slide, box, write_geojson

SPECS = tuple(SlideSpec(slide, Path(f"slides/{slide}.svs")) for slide in "ab")


def mapped(folder: Path, *entries: str) -> SlideAnnotations:
    truth = find_labels(Path("slides"), SPECS, annotations=folder, class_map=ClassMap.parse(entries))
    assert isinstance(truth, SlideAnnotations)
    return truth


def row_of(truth: SlideAnnotations, slide_id: str) -> list[int]:
    out = np.empty((1, 5), np.uint8)
    truth.read_mask(slide_id, blank_slide(5, 1), Region(0, 0, 5, 1, 0.5), out)
    return out[0].tolist()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    drawn = [box(k, 0, k + 1, 1, name) for k, name in enumerate(["Tumor", "DCIS", "Fat", "Necrosis", "Ignore*"])]
    write_geojson(tmp_path / "a.geojson", *drawn)
    (tmp_path / "b.png").write_bytes(imagecodecs.png_encode(np.array([[1, 2, 3, 0, 255]], np.uint8)))
    (tmp_path / "classes.txt").write_text("1 tumour\n2 Fat\n3 ignored ink\n")
    return tmp_path


def test_without_a_map_names_stay(folder: Path) -> None:
    truth = mapped(folder)
    assert truth.classes == ("background", "tumour", "Fat", "DCIS", "Necrosis", "Tumor")
    assert (row_of(truth, "a"), row_of(truth, "b")) == ([5, 3, 2, 4, 255], [1, 2, 255, 0, 255])


def test_names_lead_to_one_class_to_the_background_and_out(folder: Path) -> None:
    truth = mapped(folder, "Tumor=tumour", "DCIS = tumour", "Fat=background", "Necrosis=ignore")
    assert truth.classes == ("background", "tumour")
    assert (row_of(truth, "a"), row_of(truth, "b")) == ([1, 1, 0, 255, 255], [1, 0, 255, 0, 255])


def test_the_star_stands_for_what_is_not_listed(folder: Path) -> None:
    truth = mapped(folder, "Tumor=tumour", "tumour=tumour", "*=rest", "Ignore*=ink")
    assert truth.classes == ("background", "tumour", "rest", "ink")
    assert (row_of(truth, "a"), row_of(truth, "b")) == ([1, 2, 2, 2, 3], [1, 2, 255, 0, 255])


def test_a_name_that_nothing_has_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match=r"--class-map names tumor, which no label or annotation has.*Tumor"):
        mapped(folder, "tumor=tumour")


@pytest.mark.parametrize("entries", [("Tumor",), ("=x",), ("x=",), ("x=y", "x=z")])
def test_entries_that_are_no_map(entries: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="--class-map"):
        ClassMap.parse(entries)


AREAS = np.array([[50, 30, 20], [100, 0, 0], [0, 0, 0], [99, 1, 0], [0, 7, 8], [75, 0, 25]])


@pytest.mark.parametrize(
    ("rule", "classes"),
    [
        ("majority", [0, 0, -1, 0, 2, 0]),
        ("any", [1, 0, -1, 1, 2, 2]),
        ("0.25", [1, 0, -1, 0, 2, 2]),
        ("0.26", [1, 0, -1, 0, 2, 0]),
        ("1", [0, 0, -1, 0, 0, 0]),
    ],
)
def test_tile_labels(rule: str, classes: list[int]) -> None:
    assert TileLabel.parse(rule).classes(AREAS).tolist() == classes


@pytest.mark.parametrize("rule", ["", "most", "0", "1.1", "nan", "-0.5"])
def test_rules_that_are_none(rule: str) -> None:
    with pytest.raises(ValueError, match="--tile-label is majority, any, or a fraction"):
        TileLabel.parse(rule)


@pytest.mark.parametrize(
    ("classes", "named", "positive"),
    [
        (("cancer", "normal"), None, 0),
        (("Benign", "malignant"), None, 1),
        (("0", "1"), None, 1),
        (("NEGATIVE", "background"), None, None),
        (("a", "b"), None, None),
        (("a", "b"), "b", 1),
        (("cancer", "normal"), "normal", 1),
        (("a", "b", "normal"), None, None),
    ],
)
def test_the_positive_class(classes: tuple[str, ...], named: str | None, positive: int | None) -> None:
    assert positive_class(classes, named) == positive


@pytest.mark.parametrize(("classes", "named"), [(("a", "b"), "c"), (("a", "b", "c"), "a")])
def test_a_positive_class_that_is_none_of_two(classes: tuple[str, ...], named: str) -> None:
    with pytest.raises(ValueError, match="--positive-class is one of two classes"):
        positive_class(classes, named)
