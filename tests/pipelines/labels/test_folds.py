"""Folds of any set of patients: everybody validates once, nobody and no site on two sides, classes evenly shared."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.model_selection import StratifiedGroupKFold

from pipelines.labels.folds import assign_groups, fold_splits, site_splits


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
