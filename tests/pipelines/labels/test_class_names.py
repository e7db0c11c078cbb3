"""Class maps from the command line to the mask of a tile, tile labels from areas, patients in names of slides."""

import imagecodecs
import numpy as np
import pytest

from pipelines.labels.class_names import (
    ClassMap,
    TileLabel,
    known_patients,
    patient_note,
    pattern_fault,
    positive_class,
)
from pipelines.slides.geometry import Region
from tests.helpers.drawings import annotations_in, blank_slide, box, mask_of, write_geojson


@pytest.fixture
def folder(tmp_path):
    drawn = [box(k, 0, k + 1, 1, name) for k, name in enumerate(["Tumor", "DCIS", "Fat", "Necrosis", "Ignore*"])]
    write_geojson(tmp_path / "a.geojson", *drawn)
    (tmp_path / "b.png").write_bytes(imagecodecs.png_encode(np.array([[1, 2, 3, 0, 255]], np.uint8)))
    (tmp_path / "classes.txt").write_text("1 tumour\n2 Fat\n3 ignored ink\n")
    return tmp_path


@pytest.mark.parametrize(
    ("entries", "classes", "drawn", "stored"),
    [
        ([], "background tumour Fat DCIS Necrosis Tumor", [5, 3, 2, 4, 255], [1, 2, 255, 0, 255]),
        (
            ["Tumor=tumour", "DCIS = tumour", "Fat=background", "Necrosis=ignore"],
            "background tumour",
            [1, 1, 0, 255, 255],
            [1, 0, 255, 0, 255],
        ),
        (
            ["Tumor=tumour", "tumour=tumour", "*=rest", "Ignore*=ink"],  # the star stands for what is not listed
            "background tumour rest ink",
            [1, 2, 2, 2, 3],
            [1, 2, 255, 0, 255],
        ),
        # learned names stay: b's tumour was once background
        (["Tumor=tumour", "*=background"], "background tumour", [1, 0, 0, 0, 255], [1, 0, 255, 0, 255]),
    ],
)
def test_names_lead_to_one_class_to_the_background_and_out(folder, entries, classes, drawn, stored):
    truth = annotations_in(folder, "a", "b", class_map=entries)
    assert truth.classes == tuple(classes.split())
    for slide_id, expected in (("a", drawn), ("b", stored)):
        mask = mask_of(truth, slide_id, blank_slide(5, 1), Region(0, 0, 5, 1, 0.5))
        assert mask[0].tolist() == expected


def test_a_name_that_nothing_has_and_entries_that_are_no_map_are_refused(folder):
    with pytest.raises(ValueError, match=r"--class-map names tumor, which no label or annotation has.*Tumor"):
        annotations_in(folder, "a", "b", class_map=["tumor=tumour"])
    for entries in (("Tumor",), ("=x",), ("x=",), ("x=y", "x=z"), ("Tumor=tumour DCIS=tumour",)):
        with pytest.raises(ValueError, match="--class-map"):
            ClassMap.parse(entries)


def test_other_spellings_that_the_star_would_take_are_refused():
    """They were background without a word."""
    with pytest.raises(ValueError, match=r'other spellings of Tumor: TUMOR\. .*too: "TUMOR=tumour"'):
        ClassMap.parse(("Tumor=tumour", "*=background")).check(["Tumor", "TUMOR", "Stroma"])
    with pytest.raises(ValueError, match=r'other spellings of tumour: Tumour\. .*too: "Tumour=tumour"'):
        ClassMap.parse(("T=tumour", "*=background")).check(["T", "Tumour"])
    ClassMap.parse(("Tumor=rest", "*=rest")).check(["Tumor", "TUMOR", "Rest"])


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
def test_tile_labels(rule, classes):
    assert TileLabel.parse(rule).classes(AREAS).tolist() == classes


@pytest.mark.parametrize("rule", ["", "most", "0", "1.1", "nan", "-0.5"])
def test_rules_that_are_none(rule):
    with pytest.raises(ValueError, match="--tile-label is majority, any, or a fraction"):
        TileLabel.parse(rule)


@pytest.mark.parametrize(
    ("classes", "named", "positive"),
    [
        (("cancer", "normal"), None, 0),
        (("Benign", "malignant"), None, 1),
        (("0", "1"), None, 1),
        (("0.0", "1.0"), None, 1),
        (("1,0", "0,0"), None, 0),
        (("NEGATIVE", "background"), None, None),
        (("a", "b"), None, None),
        (("a", "b"), "b", 1),
        (("cancer", "normal"), "normal", 1),
        (("a", "b", "normal"), None, None),
        (("a", "b"), "c", "--positive-class is one of two classes"),
        (("a", "b", "c"), "a", "--positive-class is one of two classes"),
    ],
)
def test_the_positive_class(classes, named, positive):
    if isinstance(positive, str):
        with pytest.raises(ValueError, match=positive):
            positive_class(classes, named)
    else:
        assert positive_class(classes, named) == positive


@pytest.mark.parametrize(
    ("slide", "patient"),
    [
        ("TCGA-AA-0001-01Z-00-DX1.5b3a", "TCGA-AA-0001"),
        ("tcga-aa-0001-11a-ts2", "TCGA-AA-0001"),
        ("train/LUAD/TCGA-AA-0001-01Z-00-DX2", "TCGA-AA-0001"),
        ("he_TCGA-AA-0001", "TCGA-AA-0001"),
        ("TCGA-AA-00012", None),
        ("XTCGA-AA-0001", None),
        ("patient_007", None),
    ],
)
def test_tcga_barcodes(slide, patient):
    assert known_patients([slide], {}) == ({} if patient is None else {slide: patient})


def test_a_table_goes_before_a_pattern_and_a_pattern_before_barcodes():
    slides, barcode = ["P1_a", "P1_b", "other", "TCGA-AA-0001-x"], {"TCGA-AA-0001-x": "TCGA-AA-0001"}
    assert known_patients(slides, {"P1_b": "p7"}, r"^(P\d+)_") == {"P1_a": "P1", "P1_b": "p7"}
    assert known_patients(slides, {}, r"P\d+|TCGA-..-\d+") == {"P1_a": "P1", "P1_b": "P1"} | barcode
    assert known_patients(["a1", "abx"], {}, "a(b)?.") == {"abx": "b"}  # a1 matches, without a patient in it
    with pytest.raises(ValueError, match=r"--patient-pattern 'X\.' finds no patient .*'a'"):
        known_patients(["b", "a"], {}, "X.")
    assert known_patients(["a"], {"a": "p"}, "X.") == {"a": "p"}
    assert "regular expression" in pattern_fault("(")
    assert pattern_fault(None) is None


def test_what_is_said_of_unknown_patients():
    assert patient_note({"a": "p", "b": "p"}, ["a", "b"]) is None
    assert patient_note({}, ["a", "b"]).startswith("patients unknown: slides are split one by one")
    assert "1 of 2 slides unknown: these are resampled one by one (b)" in patient_note({"a": "p"}, "ab", "resampled")
