"""Scores of slides and patients: scikit-learn's where it has them, and cases that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from app.evaluation import classification
from app.evaluation.classification import (
    Cases,
    auc,
    auprc,
    balanced_accuracy,
    by_patient,
    calibration,
    confusion,
    with_interval,
)
from tests.helpers.counted import visited


def cases_of(positive, label, patient=None):
    score = np.stack([1 - np.array(positive), np.array(positive)], 1)
    return Cases(score, np.array(label), np.arange(len(label)) if patient is None else np.array(patient))


def test_measures_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    label = random.integers(0, 3, 60)
    score = random.dirichlet(np.ones(3), 60) + 0.3 * np.eye(3)[label]
    cases = Cases(score, label, np.arange(60))
    one_hot = np.eye(3)[label]
    assert auc(cases) == pytest.approx(roc_auc_score(one_hot, score, average="macro"))
    assert auprc(cases) == pytest.approx(average_precision_score(one_hot, score, average="macro"))
    assert balanced_accuracy(cases) == pytest.approx(balanced_accuracy_score(label, score.argmax(1)))
    assert confusion(cases).sum(1).tolist() == np.bincount(label).tolist()


def test_a_hand_made_case():
    cases = cases_of([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    assert auc(cases) == 0.75
    assert balanced_accuracy(cases) == 0.75
    assert confusion(cases).tolist() == [[2, 0], [1, 1]]
    assert auc(cases_of([0.1, 0.4], [1, 1])) is None
    assert balanced_accuracy(cases_of([0.1, 0.6], [1, 1])) == 0.5


@pytest.mark.parametrize("positive", [0, 1])
def test_a_patient_has_the_positive_class_where_one_slide_has_it(positive):
    column = [0.1, 0.9, 0.3]
    cases = cases_of(column if positive else [1 - p for p in column], [0, 1, 0] if positive else [1, 0, 1], [0, 0, 1])
    patients, mixed = by_patient(replace(cases, positive=positive))
    np.testing.assert_allclose(patients.score[:, positive], [0.9, 0.3])
    np.testing.assert_allclose(patients.score.sum(1), 1)
    assert (patients.label == positive).tolist() == [True, False]
    assert not len(mixed)
    assert auc(patients) == 1


def test_patients_of_more_classes_have_the_mean():
    score = np.array([[0.8, 0.1, 0.1], [0.4, 0.3, 0.3], [0, 0, 1], [0, 1, 0]])
    patients, mixed = by_patient(Cases(score, np.array([0, 0, 2, 1]), np.array([0, 0, 1, 1])))
    np.testing.assert_allclose(patients.score, [[0.6, 0.2, 0.2]])
    assert (patients.label.tolist(), mixed.tolist()) == ([0], [1])  # slides of patient 1 differ in class


def test_average_precision_is_of_the_positive_class():
    cases = cases_of([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 0])
    for positive in (0, 1):
        expected = average_precision_score(cases.label == positive, cases.score[:, positive])
        assert auprc(replace(cases, positive=positive)) == pytest.approx(expected, abs=1e-12)


def test_patients_are_looked_at_once():
    def per_case(count):
        score = np.random.default_rng(0).random((count, 2))
        label, patient = np.arange(count) % 2, np.arange(count) // 2
        return visited(lambda *arrays: by_patient(Cases(*arrays, 1)), score, label, patient) / count

    assert per_case(800) < 1.3 * per_case(200)


def test_the_interval_is_over_patients(monkeypatch):
    monkeypatch.setattr(classification, "RESAMPLES", 200)
    random = np.random.default_rng(1)
    label = np.tile([0, 1], 20)
    positive = np.clip(label * 0.3 + random.random(40) * 0.7, 0, 1)
    once = cases_of(positive, label)
    estimate = with_interval(once, auc)
    assert estimate.low < estimate.value == auc(once) < estimate.high
    # the same slides ten times over are no further evidence where they are of the same patients
    copied = cases_of(np.tile(positive, 10), np.tile(label, 10), np.tile(np.arange(40), 10))
    again = with_interval(copied, auc)
    assert (again.low, again.high) == pytest.approx((estimate.low, estimate.high), abs=1e-9)
    certain = with_interval(cases_of([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1]), auc)
    assert (certain.low, certain.high) == (1, 1)


def test_calibration_by_hand():
    # two cases at 0.9, of which one is right; two at 0.6, both right
    cases = cases_of([0.9, 0.9, 0.6, 0.6], [1, 0, 1, 1])
    reliability = calibration(cases)
    np.testing.assert_allclose(reliability.confidence, [0.6, 0.9])
    np.testing.assert_allclose(reliability.accuracy, [1.0, 0.5])
    assert reliability.error == pytest.approx((2 * 0.4 + 2 * 0.4) / 4)
