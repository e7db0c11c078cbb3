"""Scores of slides, patients and lesions: those of other libraries where they have them, and cases counted by hand."""

from dataclasses import replace

import numpy as np
import pytest
from sklearn.metrics import average_precision_score, balanced_accuracy_score, roc_auc_score

from app.evaluation import classification
from app.evaluation.areas import Froc, SlideHits, _major_axes, match_detections
from app.evaluation.classification import (
    Calibration,
    Predictions,
    auc,
    auprc,
    balanced_accuracy,
    by_patient,
    confusion,
    with_interval,
)
from tests.helpers.counted import visited


def cases_of(positive, label, patient=None):
    score = np.stack([1 - np.array(positive), np.array(positive)], 1)
    return Predictions(score, np.array(label), np.arange(len(label)) if patient is None else np.array(patient))


def test_measures_are_those_of_scikit_learn():
    random = np.random.default_rng(0)
    label = random.integers(0, 3, 60)
    score = random.dirichlet(np.ones(3), 60) + 0.3 * np.eye(3)[label]
    cases = Predictions(score, label, np.arange(60))
    one_hot = np.eye(3)[label]
    assert auc(cases) == pytest.approx(roc_auc_score(one_hot, score, average="macro"))
    assert auprc(cases) == pytest.approx(average_precision_score(one_hot, score, average="macro"))
    assert balanced_accuracy(cases) == pytest.approx(balanced_accuracy_score(label, score.argmax(1)))
    assert confusion(cases).sum(1).tolist() == np.bincount(label).tolist()


def test_a_hand_made_case():
    cases = cases_of([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1])
    assert (auc(cases), confusion(cases).tolist()) == (0.75, [[2, 0], [1, 1]])
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
    patients, mixed = by_patient(Predictions(score, np.array([0, 0, 2, 1]), np.array([0, 0, 1, 1])))
    np.testing.assert_allclose(patients.score, [[0.6, 0.2, 0.2]])
    assert (patients.label.tolist(), mixed.tolist()) == ([0], [1])  # slides of patient 1 differ in class


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


def test_a_draw_without_a_class_does_not_count():
    """A model that always says normal had a balanced accuracy of 0.5 with an interval up to 1."""
    estimate = with_interval(cases_of([0.1] * 30, [0] * 27 + [1] * 3), balanced_accuracy)
    assert (estimate.value, estimate.low, estimate.high) == (0.5, 0.5, 0.5)


def test_calibration_by_hand():
    # two cases at 0.9, of which one is right; two at 0.6, both right
    cases = cases_of([0.9, 0.9, 0.6, 0.6], [1, 0, 1, 1])
    reliability = Calibration(cases)
    np.testing.assert_allclose(reliability.confidence, [0.6, 0.9])
    np.testing.assert_allclose(reliability.accuracy, [1.0, 0.5])
    assert reliability.error == pytest.approx((2 * 0.4 + 2 * 0.4) / 4)


MPP = 10.0


def lesions(*boxes):
    mask = np.zeros((200, 200), bool)
    for left, top, right, bottom in boxes:
        mask[top:bottom, left:right] = True
    return mask


RING = lesions((10, 10, 60, 60)) & ~lesions((25, 25, 45, 45))


@pytest.mark.parametrize(
    ("mask", "detections", "expected"),
    [
        (
            lesions((10, 10, 50, 50), (100, 100, 150, 150)),
            [(20, 20, 0.9), (30, 30, 0.7), (80, 80, 0.6), (300, 20, 0.2)],
            SlideHits(2, (0.9,), (0.6, 0.2), objects=2, detections=4),
        ),
        (lesions((10, 10, 50, 50), (56, 10, 96, 50)), [], SlideHits(1, (), (), objects=2)),  # 60 um apart
        (lesions((10, 10, 50, 50), (59, 10, 99, 50)), [], SlideHits(2, (), (), objects=2)),  # 90 um apart
        (
            lesions((10, 10, 50, 50), (120, 120, 125, 125)),
            [(122, 122, 0.8)],
            SlideHits(1, (), (), isolated=1, objects=2, detections=1),
        ),
        (RING, [(35, 35, 0.5)], SlideHits(1, (0.5,), (), objects=1, detections=1)),
    ],
    ids=["hits, misses, false alarms", "near each other are one", "far", "isolated cells are neither", "holes belong"],
)
def test_which_lesions_are_found(mask, detections, expected):
    assert match_detections(mask, MPP, detections) == expected


def test_the_curve_by_hand():
    # four lesions on two slides; thresholds 0.9 0.8 0.6 0.4
    curve = Froc([SlideHits(3, (0.9, 0.4), (0.8,)), SlideHits(1, (0.6,), (0.4, 0.4))])
    assert curve.fp_per_slide.tolist() == [0, 0, 0.5, 0.5, 1.5]
    assert curve.sensitivity.tolist() == [0, 0.25, 0.25, 0.5, 0.75]
    # at 1/4: between (0, 1/4) and (1/2, 1/4); at 1/2: 1/2; at 1: between 1/2 and 3/4; beyond 1.5: 3/4
    assert curve.score == pytest.approx(np.mean([0.25, 0.5, 0.625, 0.75, 0.75, 0.75]))


def test_no_lesion_has_no_score_and_objects_that_merge_have_no_curve():
    assert Froc([SlideHits(0, (), (0.5,))]).score is None
    nuclei = lesions(*((x, y, x + 2, y + 2) for x in range(0, 60, 4) for y in range(0, 60, 4)))
    curve = Froc([match_detections(nuclei, MPP, [(5, 5, 0.9), (150, 150, 0.8)])])
    assert (curve.score, curve.lesions, curve.detections) == (None, 1, 2)
    assert "225 annotated objects merge into 1" in curve.reason
    assert "no lesion" in Froc([match_detections(lesions((9, 9, 12, 12)), MPP, [])]).reason


def test_the_curve_is_that_of_another_implementation():
    monai = pytest.importorskip("monai.metrics.froc")
    rng = np.random.default_rng(7)
    for _ in range(20):
        slides = rng.integers(2, 6)
        lesions = rng.integers(0, 4, slides)
        lesions[0] += 1
        found = [tuple(rng.random(rng.integers(0, count + 1)).round(1)) for count in lesions]
        false = [tuple(rng.random(rng.integers(0, 12)).round(1)) for _ in range(slides)]
        ours = Froc([SlideHits(int(n), tp, fp) for n, tp, fp in zip(lesions, found, false, strict=True)])
        theirs = monai.compute_froc_curve_data(np.concatenate(false), np.concatenate(found), lesions.sum(), slides)
        # From the highest threshold as ours is; the lowest, which only ours has, is its last.
        for own, their in zip((ours.fp_per_slide, ours.sensitivity), theirs, strict=True):
            np.testing.assert_allclose(own[1:-1], their[::-1][1:])


def test_patients_are_looked_at_once():
    def per_case(count):
        score = np.random.default_rng(0).random((count, 2))
        label, patient = np.arange(count) % 2, np.arange(count) // 2
        return visited(lambda *arrays: by_patient(Predictions(*arrays, 1)), score, label, patient) / count

    assert per_case(800) < 1.3 * per_case(200)


@pytest.mark.parametrize("objects", [4, 64])
def test_each_px_is_visited_as_often_whatever_the_number_of_objects(objects):
    side = round(objects**0.5)
    labels = np.zeros((128, 128), np.int32)
    for k in range(objects):
        y, x = (128 // side * place for place in divmod(k, side))
        labels[y : y + 64 // side, x : x + 64 // side] = k + 1
    visits = visited(_major_axes, labels)
    assert visits <= 60 * labels.size


def test_the_curve_looks_at_each_detection_as_often_whatever_their_number():
    def of(count):
        false = visited(lambda counted: Froc([SlideHits(1, (0.5,), counted)]), np.linspace(0, 1, count))
        return false / count

    assert of(2000) < 1.2 * of(500)
