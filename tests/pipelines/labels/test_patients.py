"""Patients of slides: named, recognised, matched by a pattern, or unknown."""

from __future__ import annotations

import pytest

from pipelines.labels.class_names import known_patients, patient_note, pattern_fault


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
def test_tcga_barcodes(slide: str, patient: str | None) -> None:
    assert known_patients([slide], {}) == ({} if patient is None else {slide: patient})


def test_a_table_goes_before_a_pattern_and_a_pattern_before_barcodes() -> None:
    slides = ["P1_a", "P1_b", "other", "TCGA-AA-0001-x"]
    assert known_patients(slides, {"P1_b": "p7"}, r"^(P\d+)_") == {"P1_a": "P1", "P1_b": "p7"}
    assert known_patients(slides, {}, r"P\d+|TCGA-..-\d+") == {
        "P1_a": "P1",
        "P1_b": "P1",
        "TCGA-AA-0001-x": "TCGA-AA-0001",
    }
    assert known_patients(["a1", "abx"], {}, "a(b)?.") == {"abx": "b"}  # a1 matches, without a patient in it


def test_a_pattern_that_finds_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"--patient-pattern 'X\.' finds no patient .*'a'"):
        known_patients(["b", "a"], {}, "X.")
    assert known_patients(["a"], {"a": "p"}, "X.") == {"a": "p"}
    assert "regular expression" in (pattern_fault("(") or "")
    assert pattern_fault(None) is None


def test_what_is_said_of_unknown_patients() -> None:
    assert patient_note({"a": "p", "b": "p"}, ["a", "b"]) is None
    assert (patient_note({}, ["a", "b"]) or "").startswith("patients unknown: slides are split one by one")
    assert "patients of 1 of 2 slides unknown: these are resampled one by one (b)" in (
        patient_note({"a": "p"}, ["a", "b"], "resampled") or ""
    )
