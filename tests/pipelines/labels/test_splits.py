"""Splits and folds of any set of patients: nobody and no site on two sides, every class trained on, fractions kept."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold

from pipelines.labels.folds import assign_groups, fold_splits, site_splits
from pipelines.labels.splits import Splits, fixed_splits, make_splits

patients_of_slides = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=120
)  # (patient, class) of each slide
fractions = st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.34]), st.sampled_from([0.0, 0.1, 0.25]))


def as_mappings(rows: list[tuple[int, int]]) -> tuple[dict[str, str], dict[str, int]]:
    return {f"s{i}": f"p{p}" for i, (p, _) in enumerate(rows)}, {f"s{i}": c for i, (_, c) in enumerate(rows)}


@settings(max_examples=200, deadline=None)
@given(rows=patients_of_slides, parts=fractions, seed=st.integers(0, 5))
def test_any_set(rows: list[tuple[int, int]], parts: tuple[float, float], seed: int) -> None:
    patient, label = as_mappings(rows)
    splits = make_splits(patient, label, validation=parts[0], test=parts[1], seed=seed)
    assert set(splits.split) == set(patient)
    assert splits.patient_overlap() == 0
    assert {label[s] for s in splits.slides("train")} == set(label.values())
    for name, fraction in (("val", parts[0]), ("test", parts[1])):
        if fraction == 0:
            assert splits.slides(name) == ()
    reordered = dict(reversed(patient.items()))
    assert make_splits(reordered, label, validation=parts[0], test=parts[1], seed=seed).split == splits.split


@settings(max_examples=100, deadline=None)
@given(
    classes=st.lists(st.integers(1, 40), min_size=1, max_size=4),  # patients of each class, one slide or more each
    parts=fractions,
    seed=st.integers(0, 5),
)
def test_fractions_within_one_patient_per_class(classes: list[int], parts: tuple[float, float], seed: int) -> None:
    rows = [(100 * c + p, c) for c, n in enumerate(classes) for p in range(n) for _ in range(1 + p % 3)]
    patient, label = as_mappings(rows)
    splits = make_splits(patient, label, validation=parts[0], test=parts[1], seed=seed)
    for name, fraction in (("val", parts[0]), ("test", parts[1])):
        got: defaultdict[int, set[str]] = defaultdict(set)
        for slide in splits.slides(name):
            got[label[slide]].add(patient[slide])
        for c, n in enumerate(classes):
            assert abs(len(got[c]) - n * fraction) <= 1
            if fraction and n >= 3:
                assert got[c]


def test_four_slides_two_classes() -> None:
    slides = ["a", "b", "c", "d"]
    splits = make_splits({s: s for s in slides}, {"a": 0, "b": 0, "c": 1, "d": 1}, seed=1)
    label = {"a": 0, "b": 0, "c": 1, "d": 1}
    for name in ("train", "val"):
        assert sorted(label[s] for s in splits.slides(name)) == [0, 1]


def test_without_classes_two_patients_are_enough() -> None:
    splits = make_splits({"a": "a", "b": "b"}, seed=1)
    assert sorted(splits.split.values()) == ["train", "val"]
    splits = make_splits({f"s{i}": f"p{i // 2}" for i in range(20)}, validation=0.2, test=0.1, seed=1)
    assert [len(splits.slides(n)) for n in ("train", "val", "test")] == [14, 4, 2]


def test_the_seed_decides() -> None:
    patient = {f"s{i}": f"p{i}" for i in range(20)}
    by_seed = {make_splits(patient, seed=seed).slides("val") for seed in range(10)}
    assert len(by_seed) > 5


def test_another_slide_of_a_patient_changes_nothing() -> None:
    patient = {f"s{i}": f"p{i}" for i in range(20)}
    before = make_splits(patient, seed=3).split
    after = make_splits(patient | {"extra": "p4"}, seed=3).split
    assert after == before | {"extra": before["s4"]}


def test_too_few_patients_are_said(caplog: pytest.LogCaptureFixture) -> None:
    splits = make_splits({"a": "a", "b": "b", "c": "c"}, {"a": 0, "b": 0, "c": 1}, validation=0.3, test=0.3, seed=0)
    assert splits.split["c"] == "train"
    assert "too few patients of class 0 (2) for every split: none in test" in caplog.text
    assert "too few patients of class 1 (1) for every split: none in val and test" in caplog.text


def test_a_class_that_only_mixed_patients_have_is_trained_on() -> None:
    # c has three patients, each also of a rarer class; left alone, all three could validate
    patient, label = {}, {}
    for i, rare in enumerate((1, 2, 3)):
        patient |= {f"mixed{i}": f"m{i}", f"mixed{i}c": f"m{i}", f"rare{i}": f"r{i}"}
        label |= {f"mixed{i}": rare, f"mixed{i}c": 0, f"rare{i}": rare}
    for seed in range(40):
        splits = make_splits(patient, label, validation=0.5, seed=seed)
        assert {label[s] for s in splits.slides("train")} == {0, 1, 2, 3}


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0), (0.5, 0.5), (0, 1), (float("nan"), 0)])
def test_fractions_out_of_range(validation: float, test: float) -> None:
    with pytest.raises(ValueError, match="fractions are at least 0 and together below 1"):
        make_splits({"a": "a"}, validation=validation, test=test, seed=0)


def test_no_slides() -> None:
    with pytest.raises(ValueError, match="at least one slide"):
        make_splits({}, seed=0)


def test_saved_and_loaded(tmp_path: Path) -> None:
    patient = {"a,1": "p", "b": 'q"', "ü": "p"}
    for label in ({"a,1": 0, "b": 1, "ü": 0}, None):
        splits = make_splits(patient, label, seed=1)
        splits.save(tmp_path / "splits.csv")
        assert (tmp_path / "splits.csv").read_text().splitlines()[0] == "slide,patient,label,split"
        assert Splits.load(tmp_path / "splits.csv") == splits
        assert Splits.load(tmp_path / "splits.csv", patient) == splits


def load(tmp_path: Path, text: str, patient: dict[str, str] | None = None) -> Splits:
    (tmp_path / "splits.csv").write_text(text)
    return Splits.load(tmp_path / "splits.csv", patient)


def test_a_users_own_file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    splits = load(tmp_path, "Image;Split\na.svs;training\nb.svs;Validation\nold;test\n", {"a": "p", "b": "q"})
    assert splits.split == {"a": "train", "b": "val"}
    assert splits.patient == {"a": "p", "b": "q"}
    assert "left out, not among the slides of this run: old" in caplog.text


def test_all_faults_of_a_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"split file .*splits\.csv") as caught:
        load(
            tmp_path,
            "slide,split\na,trian\nb,train\nb,test\nc,train\nd,val\n",
            {s: s for s in "abe"} | {"c": "p", "d": "p"},
        )
    message = str(caught.value)
    assert "line 2: a split is train, val or test; got 'trian'" in message
    assert "line 4: slide 'b' is in train and in test" in message
    assert "slides without a line: e; add a line for each, or delete the file" in message
    assert "patient 'p' is on two sides (c in train, d in val)" in message


def test_the_runs_patients_count_before_the_files(tmp_path: Path) -> None:
    text = "slide,patient,split\na,p,train\nb,q,val\n"
    assert load(tmp_path, text).patient_overlap() == 0
    with pytest.raises(ValueError, match="patient 'same' is on two sides"):
        load(tmp_path, text, {"a": "same", "b": "same"})


def test_overlap_is_counted() -> None:
    split = {"a": "train", "b": "val", "c": "val", "d": "test", "e": "train"}
    assert Splits(split, {"a": "p", "b": "p", "c": "q", "d": "q", "e": "r"}).patient_overlap() == 2


def test_nothing_to_train_on(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no slide is in train"):
        load(tmp_path, "slide,split\na,val\n")


def test_given_splits_stay_as_they_are() -> None:
    given = {"a": "train", "b": "train", "c": "val", "d": "test"}
    found = fixed_splits(given, {s: s for s in given}, {"a": 0, "b": 1, "c": 0, "d": 1}, validation=0.5, seed=0)
    assert found.split == given


def test_without_a_folder_of_it_validation_is_drawn_from_train() -> None:
    given = {f"s{k}": "test" if k < 2 else "train" for k in range(10)}
    label = {slide: k % 2 for k, slide in enumerate(given)}
    found = fixed_splits(given, {s: s for s in given}, label, validation=0.25, seed=0)
    assert found.slides("test") == ("s0", "s1")
    assert len(found.slides("val")) == 2
    assert len(found.slides("train")) == 6


def test_given_splits_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="patients with slides in two of them: p; put all"):
        fixed_splits({"a": "train", "b": "val"}, {"a": "p", "b": "p"}, {}, validation=0.2, seed=0)
    with pytest.raises(ValueError, match="no usable slide is in train; got test, val"):
        fixed_splits({"a": "test", "b": "val"}, {"a": "a", "b": "b"}, {}, validation=0.2, seed=0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=40, max_size=120),
    folds=st.integers(2, 6),
    test=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 5),
)
def test_every_patient_validates_once(rows: list[tuple[int, int]], folds: int, test: float, seed: int) -> None:
    patient = {f"s{i}": f"p{p}" for i, (p, _) in enumerate(rows)}
    label = {f"s{i}": c for i, (_, c) in enumerate(rows)}
    if len(set(patient.values())) < folds + 1:
        return
    runs = [fold_splits(patient, label, folds=folds, fold=k, test=test, seed=seed) for k in range(folds)]
    validated = Counter(slide for run in runs for slide in run.slides("val"))
    tested = {run.slides("test") for run in runs}
    assert len(tested) == 1
    assert bool(next(iter(tested))) == bool(test)
    assert validated == Counter(set(patient) - set(next(iter(tested))))
    for run in runs:
        assert run.patient_overlap() == 0
        assert run.slides("train")
        assert run.slides("val")
    reordered = dict(reversed(patient.items()))
    assert fold_splits(reordered, label, folds=folds, fold=0, test=test, seed=seed).split == runs[0].split


def test_classes_are_even_among_folds_to_one_patient() -> None:
    patient = {f"s{i}": f"p{i}" for i in range(47)}
    label = {slide: 0 if i < 30 else 1 if i < 40 else 2 for i, slide in enumerate(patient)}
    runs = [fold_splits(patient, label, folds=5, fold=k, seed=3) for k in range(5)]
    for number in range(3):
        counts = [sum(label[slide] == number for slide in run.slides("val")) for run in runs]
        assert max(counts) - min(counts) <= 1
    assert {len(run.slides("val")) for run in runs} <= {9, 10}
    assert runs[0].split != fold_splits(patient, label, folds=5, fold=0, seed=4).split


def sites_of_many_sizes(seed: int) -> tuple[dict[str, str], dict[str, int], dict[str, str]]:
    rng = np.random.default_rng(seed)
    rows = [(k, site) for site in range(12) for k in range(int(rng.integers(2, 30)))]
    slides = [f"{site}-{k}" for k, site in rows]
    label = {slide: int(rng.random() < 0.2 + 0.05 * site) for slide, (_, site) in zip(slides, rows, strict=True)}
    return {slide: slide for slide in slides}, label, {slide: slide.split("-")[0] for slide in slides}


def test_sites_stay_whole_and_are_shared_out_as_evenly_as_by_scikit_learn() -> None:
    ours, theirs = [], []
    for seed in range(10):
        patient, label, site = sites_of_many_sizes(seed)
        runs = [fold_splits(patient, label, site, folds=4, fold=k, seed=seed) for k in range(4)]
        assert {run.site_overlap() for run in runs} == {0}
        assert Counter(slide for run in runs for slide in run.slides("val")) == Counter([*patient])
        ours.append(unevenness([run.slides("val") for run in runs], label))
        slides = sorted(patient)
        labels, sites = [label[s] for s in slides], [site[s] for s in slides]
        parts = StratifiedGroupKFold(4, shuffle=True, random_state=seed).split(slides, labels, sites)
        theirs.append(unevenness([tuple(slides[i] for i in held) for _, held in parts], label))
    assert np.mean(ours) <= np.mean(theirs)


def unevenness(parts: list[tuple[str, ...]], label: dict[str, int]) -> float:
    counts = np.array([[sum(label[s] == c for s in part) for c in (0, 1)] for part in parts])
    return float(counts.std(0).sum())


def test_sites_by_fractions() -> None:
    patient, label, site = sites_of_many_sizes(1)
    splits = site_splits(patient, label, site, validation=0.2, test=0.1, seed=0)
    assert splits.site_overlap() == splits.patient_overlap() == 0
    assert len(splits.slides("val")) / len(patient) == pytest.approx(0.2, abs=0.05)
    assert len(splits.slides("test")) / len(patient) == pytest.approx(0.1, abs=0.05)
    # the same slides without regard to sites: nearly every site is then on two sides
    assert fold_splits(patient, label, folds=5, fold=0, seed=0).split != splits.split


def test_a_patient_of_two_sites_joins_them() -> None:
    patient = {"a": "p", "b": "p", "c": "q", "d": "r", "e": "s", "f": "t"}
    site = {"a": "north", "b": "south", "c": "south", "d": "east", "e": "west", "f": "north"}
    runs = [fold_splits(patient, None, site, folds=3, fold=k, seed=0) for k in range(3)]
    assert sorted(run.slides("val") for run in runs) == [("a", "b", "c", "f"), ("d",), ("e",)]
    with pytest.raises(ValueError, match=r"4 parts need at least 4 sites .*; got 3: "):
        fold_splits(patient, None, site, folds=4, fold=0, seed=0)


def test_what_cannot_be_is_refused_by_name() -> None:
    patient = {"a": "p", "b": "q"}
    with pytest.raises(ValueError, match="for every slide, column site of the labels; without: b"):
        fold_splits(patient, None, {"a": "north"}, folds=2, fold=0, seed=0)
    with pytest.raises(ValueError, match="3 parts need at least 3 patients; got 2"):
        fold_splits(patient, folds=3, fold=0, seed=0)
    with pytest.raises(ValueError, match="the one that validates is 0 to 1; got 2 of 2"):
        fold_splits(patient, folds=2, fold=2, seed=0)
    with pytest.raises(ValueError, match="together below 1"):
        site_splits(patient, None, {"a": "x", "b": "y"}, validation=0.6, test=0.4, seed=0)


def test_a_class_that_a_fold_cannot_learn_is_told(caplog: pytest.LogCaptureFixture) -> None:
    patient = {f"s{i}": f"p{i}" for i in range(9)}
    label = {slide: int(slide == "s0") for slide in patient}
    for fold in range(3):
        fold_splits(patient, label, folds=3, fold=fold, seed=0)
    assert caplog.text.count("all patients of class 1 validate: it is not learned in this run") == 1
    assert caplog.text.count("no patient of class 1 validates") == 2


def test_no_part_is_left_empty() -> None:
    dealt = assign_groups(np.full((3, 1), 10), np.array([0.7, 0.2, 0.1]))
    assert sorted(dealt.tolist()) == [0, 1, 2]
