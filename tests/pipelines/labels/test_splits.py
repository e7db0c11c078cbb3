"""Splits, folds and split files of any set of patients: nobody and no site on two sides, every class trained on."""

import csv
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold

from pipelines.labels.folds import assign_groups, fold_splits, read_split_file, site_splits
from pipelines.labels.splits import Splits, fixed_splits, make_splits
from tests.helpers.splits import slides_in

patients_of_slides = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 4)), min_size=1, max_size=120
)  # (patient, class) of each slide
fractions = st.tuples(st.sampled_from([0.0, 0.1, 0.2, 0.34]), st.sampled_from([0.0, 0.1, 0.25]))


def as_mappings(rows):
    return {f"s{i}": f"p{p}" for i, (p, _) in enumerate(rows)}, {f"s{i}": c for i, (_, c) in enumerate(rows)}


def load(tmp_path, text, patient):
    (tmp_path / "splits.csv").write_text(text)
    return read_split_file(tmp_path / "splits.csv", patient, begun=False)


def one_each(count):
    """So many patients of one slide each."""
    return {f"s{i}": f"p{i}" for i in range(count)}


@settings(max_examples=200, deadline=None)
@given(rows=patients_of_slides, parts=fractions, seed=st.integers(0, 5))
def test_any_set(rows, parts, seed):
    patient, label = as_mappings(rows)
    splits = make_splits(patient, label, validation=parts[0], test=parts[1], seed=seed)
    assert set(splits) == set(patient)
    assert Splits(splits, patient).patient_overlap() == 0
    assert {label[s] for s in slides_in(splits, "train")} == set(label.values())
    for name, fraction in (("val", parts[0]), ("test", parts[1])):
        if fraction == 0:
            assert slides_in(splits, name) == ()
    reordered = dict(reversed(patient.items()))
    assert make_splits(reordered, label, validation=parts[0], test=parts[1], seed=seed) == splits


@settings(max_examples=100, deadline=None)
@given(
    classes=st.lists(st.integers(1, 40), min_size=1, max_size=4),  # patients of each class, one slide or more each
    parts=fractions,
    seed=st.integers(0, 5),
)
def test_fractions_within_one_patient_per_class(classes, parts, seed):
    rows = [(100 * c + p, c) for c, n in enumerate(classes) for p in range(n) for _ in range(1 + p % 3)]
    patient, label = as_mappings(rows)
    splits = make_splits(patient, label, validation=parts[0], test=parts[1], seed=seed)
    for name, fraction in (("val", parts[0]), ("test", parts[1])):
        got = defaultdict(set)
        for slide in slides_in(splits, name):
            got[label[slide]].add(patient[slide])
        for c, n in enumerate(classes):
            assert abs(len(got[c]) - n * fraction) <= 1
            if fraction and n >= 3:
                assert got[c]


def test_without_classes_two_patients_are_enough_and_with_classes_two_of_each():
    assert sorted(make_splits({"a": "a", "b": "b"}, seed=1).values()) == ["train", "val"]
    splits = make_splits({f"s{i}": f"p{i // 2}" for i in range(20)}, validation=0.2, test=0.1, seed=1)
    assert [len(slides_in(splits, n)) for n in ("train", "val", "test")] == [14, 4, 2]
    label = {"a": 0, "b": 0, "c": 1, "d": 1}
    splits = make_splits({slide: slide for slide in label}, label, seed=1)
    assert all(sorted(label[slide] for slide in slides_in(splits, name)) == [0, 1] for name in ("train", "val"))


def test_the_seed_decides_and_another_slide_of_a_patient_changes_nothing():
    assert len({slides_in(make_splits(one_each(20), seed=seed), "val") for seed in range(10)}) > 5
    before = make_splits(one_each(20), seed=3)
    assert make_splits(one_each(20) | {"extra": "p4"}, seed=3) == before | {"extra": before["s4"]}


def test_too_few_patients_are_said(caplog):
    splits = make_splits({"a": "a", "b": "b", "c": "c"}, {"a": 0, "b": 0, "c": 1}, validation=0.3, test=0.3, seed=0)
    assert splits["c"] == "train"
    assert "too few patients of class 0 (2) for every split: none in test" in caplog.text
    assert "too few patients of class 1 (1) for every split: none in val and test" in caplog.text


def test_a_class_that_only_mixed_patients_have_is_trained_on():
    # c has three patients, each also of a rarer class; left alone, all three could validate
    patient, label = {}, {}
    for i, rare in enumerate((1, 2, 3)):
        patient |= {f"mixed{i}": f"m{i}", f"mixed{i}c": f"m{i}", f"rare{i}": f"r{i}"}
        label |= {f"mixed{i}": rare, f"mixed{i}c": 0, f"rare{i}": rare}
    for seed in range(40):
        splits = make_splits(patient, label, validation=0.5, seed=seed)
        assert {label[s] for s in slides_in(splits, "train")} == {0, 1, 2, 3}


@pytest.mark.parametrize(("validation", "test"), [(-0.1, 0), (0.5, 0.5), (0, 1), (float("nan"), 0)])
def test_fractions_out_of_range(validation, test):
    with pytest.raises(ValueError, match="fractions are at least 0 and together below 1"):
        make_splits({"a": "a"}, validation=validation, test=test, seed=0)
    with pytest.raises(ValueError, match="at least one slide"):
        make_splits({}, seed=0)


@pytest.mark.parametrize("label", [{"a,1": 0, "b": 1, "ü": 0}, None])
def test_saved_and_loaded(tmp_path, label):
    patient = {"a,1": "p", "b": 'q"', "ü": "p"}
    path, split = tmp_path / "splits.csv", make_splits(patient, label, seed=1)
    Splits(split, patient, label or {}, unknown=frozenset(["ü"])).save(path)
    lines = path.read_text(encoding="utf-8").splitlines()
    assert lines[0] == "slide,patient,label,split"
    saved = {row["slide"]: (row["patient"], row["label"], row["split"]) for row in csv.DictReader(lines)}
    of_class = {slide: str((label or {}).get(slide, "")) for slide in patient}
    assert saved == {slide: (who * (slide != "ü"), of_class[slide], split[slide]) for slide, who in patient.items()}
    assert read_split_file(path, patient) == split


def test_a_users_own_file(tmp_path, caplog):
    split = load(tmp_path, "Image;Split\na.svs;training\nb.svs;Validation\nold;test\n", {"a": "p", "b": "q"})
    assert split == {"a": "train", "b": "val"}
    assert "left out, not among the slides of this run: old" in caplog.text


def test_all_faults_of_a_file(tmp_path):
    patient = {s: s for s in "abe"} | {"c": "p", "d": "p"}
    with pytest.raises(ValueError, match=r"split file .*splits\.csv") as caught:
        load(tmp_path, "slide,split\na,trian\nb,train\nb,test\nc,train\nd,val\n", patient)
    for words in (
        "line 2: a split is train, val or test; got 'trian'",
        "line 4: slide 'b' is in train and in test",
        "slides that it does not name: e; add a line for each, or delete the file",
        "patient 'p' is on two sides (c in train, d in val)",
    ):
        assert words in str(caught.value)
    with pytest.raises(ValueError, match="no slide is in train"):
        load(tmp_path, "slide,split\na,val\n", {"a": "a"})


def test_the_runs_patients_count_before_the_files(tmp_path):
    text = "slide,patient,split\na,p,train\nb,q,val\n"
    assert load(tmp_path, text, {"a": "p", "b": "q"}) == {"a": "train", "b": "val"}
    with pytest.raises(ValueError, match="patient 'same' is on two sides"):
        load(tmp_path, text, {"a": "same", "b": "same"})


def test_overlap_is_counted():
    split = {"a": "train", "b": "val", "c": "val", "d": "test", "e": "train"}
    assert Splits(split, {"a": "p", "b": "p", "c": "q", "d": "q", "e": "r"}).patient_overlap() == 2


def test_given_splits_stay_and_validation_is_drawn_from_train_without_a_folder_of_it():
    given = {"a": "train", "b": "train", "c": "val", "d": "test"}
    label = {"a": 0, "b": 1, "c": 0, "d": 1}
    assert fixed_splits(given, {s: s for s in given}, label, validation=0.5, seed=0) == given
    given = {f"s{k}": "test" if k < 2 else "train" for k in range(10)}
    label = {slide: k % 2 for k, slide in enumerate(given)}
    found = fixed_splits(given, {s: s for s in given}, label, validation=0.25, seed=0)
    assert slides_in(found, "test") == ("s0", "s1")
    assert (len(slides_in(found, "val")), len(slides_in(found, "train"))) == (2, 6)
    for given, patient, words in (
        ({"a": "train", "b": "val"}, {"a": "p", "b": "p"}, "folders of splits: patient 'p' is on two sides"),
        ({"a": "test", "b": "val"}, {"a": "a", "b": "b"}, "folders of splits: no slide is in train"),
    ):
        with pytest.raises(ValueError, match=words):
            fixed_splits(given, patient, {}, validation=0.2, seed=0)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=40, max_size=120),
    folds=st.integers(2, 6),
    test=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 5),
)
def test_every_patient_validates_once(rows, folds, test, seed):
    patient, label = as_mappings(rows)
    if len(set(patient.values())) < folds + 1:
        return
    runs = [fold_splits(patient, label, folds=folds, fold=k, test=test, seed=seed) for k in range(folds)]
    (tested,) = {slides_in(run, "test") for run in runs}
    assert bool(tested) == bool(test)
    assert Counter(slide for run in runs for slide in slides_in(run, "val")) == Counter(set(patient) - set(tested))
    for run in runs:
        assert Splits(run, patient).patient_overlap() == 0
        assert slides_in(run, "train")
        assert slides_in(run, "val")
    reordered = dict(reversed(patient.items()))
    assert fold_splits(reordered, label, folds=folds, fold=0, test=test, seed=seed) == runs[0]


def test_classes_are_even_among_folds_to_one_patient():
    patient = one_each(47)
    label = {slide: 0 if i < 30 else 1 if i < 40 else 2 for i, slide in enumerate(patient)}
    runs = [fold_splits(patient, label, folds=5, fold=k, seed=3) for k in range(5)]
    for number in range(3):
        counts = [sum(label[slide] == number for slide in slides_in(run, "val")) for run in runs]
        assert max(counts) - min(counts) <= 1
    assert {len(slides_in(run, "val")) for run in runs} <= {9, 10}
    assert runs[0] != fold_splits(patient, label, folds=5, fold=0, seed=4)


def sites_of_many_sizes(seed):
    rng = np.random.default_rng(seed)
    rows = [(k, site) for site in range(12) for k in range(int(rng.integers(2, 30)))]
    slides = [f"{site}-{k}" for k, site in rows]
    label = {slide: int(rng.random() < 0.2 + 0.05 * site) for slide, (_, site) in zip(slides, rows, strict=True)}
    return {slide: slide for slide in slides}, label, {slide: slide.split("-")[0] for slide in slides}


def test_sites_stay_whole_and_are_shared_out_as_evenly_as_by_scikit_learn():
    ours, theirs = [], []
    for seed in range(10):
        patient, label, site = sites_of_many_sizes(seed)
        runs = [fold_splits(patient, label, site, folds=4, fold=k, seed=seed) for k in range(4)]
        assert {Splits(run, patient, site=site).site_overlap() for run in runs} == {0}
        assert Counter(slide for run in runs for slide in slides_in(run, "val")) == Counter([*patient])
        ours.append(unevenness([slides_in(run, "val") for run in runs], label))
        slides = sorted(patient)
        labels, sites = [label[s] for s in slides], [site[s] for s in slides]
        parts = StratifiedGroupKFold(4, shuffle=True, random_state=seed).split(slides, labels, sites)
        theirs.append(unevenness([tuple(slides[i] for i in held) for _, held in parts], label))
    assert np.mean(ours) <= np.mean(theirs)


def unevenness(parts, label):
    counts = np.array([[sum(label[s] == c for s in part) for c in (0, 1)] for part in parts])
    return float(counts.std(0).sum())


def test_sites_by_fractions():
    patient, label, site = sites_of_many_sizes(1)
    splits = site_splits(patient, label, site, validation=0.2, test=0.1, seed=0)
    run = Splits(splits, patient, site=site)
    assert run.site_overlap() == run.patient_overlap() == 0
    assert len(slides_in(splits, "val")) / len(patient) == pytest.approx(0.2, abs=0.05)
    assert len(slides_in(splits, "test")) / len(patient) == pytest.approx(0.1, abs=0.05)
    # the same slides without regard to sites: nearly every site is then on two sides
    assert fold_splits(patient, label, folds=5, fold=0, seed=0) != splits


def test_a_patient_of_two_sites_joins_them():
    patient = {"a": "p", "b": "p", "c": "q", "d": "r", "e": "s", "f": "t"}
    site = {"a": "north", "b": "south", "c": "south", "d": "east", "e": "west", "f": "north"}
    runs = [fold_splits(patient, None, site, folds=3, fold=k, seed=0) for k in range(3)]
    assert sorted(slides_in(run, "val") for run in runs) == [("a", "b", "c", "f"), ("d",), ("e",)]
    with pytest.raises(ValueError, match=r"4 parts need at least 4 sites .*; got 3: "):
        fold_splits(patient, None, site, folds=4, fold=0, seed=0)


@pytest.mark.parametrize(
    ("site", "folds", "fold", "words"),
    [
        ({"a": "north"}, 2, 0, "for every slide, column site of the labels; without: b"),
        (None, 3, 0, "3 parts need at least 3 patients; got 2"),
        (None, 2, 2, "the one that validates is 0 to 1; got 2 of 2"),
    ],
)
def test_folds_that_cannot_be_are_refused_by_name(site, folds, fold, words):
    with pytest.raises(ValueError, match=words):
        fold_splits({"a": "p", "b": "q"}, None, site, folds=folds, fold=fold, seed=0)
    with pytest.raises(ValueError, match="together below 1"):
        site_splits({"a": "p", "b": "q"}, None, {"a": "x", "b": "y"}, validation=0.6, test=0.4, seed=0)


def test_no_part_is_left_empty():
    dealt = assign_groups(np.full((3, 1), 10), np.array([0.7, 0.2, 0.1]))
    assert sorted(dealt.tolist()) == [0, 1, 2]
