"""Lesions found, by the rules of CAMELYON16, on cases that can be counted by hand."""

from __future__ import annotations

import numpy as np
import pytest

from app.evaluation.areas import SlideHits, _major_axes, froc, hits
from tests.helpers.counted import visited

MPP = 10.0


def lesions(*boxes):
    mask = np.zeros((200, 200), bool)
    for left, top, right, bottom in boxes:
        mask[top:bottom, left:right] = True
    return mask


def test_hits_misses_and_false_alarms():
    mask = lesions((10, 10, 50, 50), (100, 100, 150, 150))
    result = hits(mask, MPP, [(20, 20, 0.9), (30, 30, 0.7), (80, 80, 0.6), (300, 20, 0.2)])
    assert result == SlideHits(2, (0.9,), (0.6, 0.2), objects=2, detections=4)


def test_lesions_near_each_other_are_one():
    assert hits(lesions((10, 10, 50, 50), (56, 10, 96, 50)), MPP, []).lesions == 1  # 60 um apart
    assert hits(lesions((10, 10, 50, 50), (59, 10, 99, 50)), MPP, []).lesions == 2  # 90 um apart


def test_isolated_cells_are_neither_found_nor_false():
    mask = lesions((10, 10, 50, 50), (120, 120, 125, 125))
    assert hits(mask, MPP, [(122, 122, 0.8)]) == SlideHits(1, (), (), isolated=1, objects=2, detections=1)


def test_holes_belong_to_their_lesion():
    ring = lesions((10, 10, 60, 60)) & ~lesions((25, 25, 45, 45))
    assert hits(ring, MPP, [(35, 35, 0.5)]) == SlideHits(1, (0.5,), (), objects=1, detections=1)


def test_the_curve_by_hand():
    # four lesions on two slides; thresholds 0.9 0.8 0.6 0.4
    curve = froc([SlideHits(3, (0.9, 0.4), (0.8,)), SlideHits(1, (0.6,), (0.4, 0.4))])
    assert curve.false_per_slide.tolist() == [0, 0, 0.5, 0.5, 1.5]
    assert curve.sensitivity.tolist() == [0, 0.25, 0.25, 0.5, 0.75]
    # at 1/4: between (0, 1/4) and (1/2, 1/4); at 1/2: 1/2; at 1: between 1/2 and 3/4; beyond 1.5: 3/4
    assert curve.score == pytest.approx(np.mean([0.25, 0.5, 0.625, 0.75, 0.75, 0.75]))


def test_no_lesion_has_no_score():
    assert froc([SlideHits(0, (), (0.5,))]).score is None


def test_objects_that_merge_have_no_curve():
    nuclei = lesions(*((x, y, x + 2, y + 2) for x in range(0, 60, 4) for y in range(0, 60, 4)))
    curve = froc([hits(nuclei, MPP, [(5, 5, 0.9), (150, 150, 0.8)])])
    assert (curve.score, curve.lesions, curve.detections) == (None, 1, 2)
    assert "225 annotated objects merge into 1" in curve.reason
    assert "no lesion" in froc([hits(lesions((9, 9, 12, 12)), MPP, [])]).reason


def test_major_axes_are_those_of_each_component():
    def axis(mask):
        rows, columns = np.nonzero(mask)
        spread = np.cov(np.stack([columns, rows]), bias=True) + np.eye(2) / 12
        return 4 * np.sqrt(np.linalg.eigvalsh(spread)[-1])

    labels = np.zeros((90, 90), np.int32)
    labels[5:40, 7:12], labels[50, 60] = 1, 3
    labels[np.arange(50, 80), np.arange(10, 40)] = 2
    np.testing.assert_allclose(_major_axes(labels), [axis(labels == n) for n in (1, 2, 3)])


@pytest.mark.parametrize("objects", [4, 64])
def test_each_px_is_visited_as_often_whatever_the_number_of_objects(objects):
    side = round(objects**0.5)
    labels = np.zeros((128, 128), np.int32)
    for k in range(objects):
        y, x = (128 // side * place for place in divmod(k, side))
        labels[y : y + 64 // side, x : x + 64 // side] = k + 1
    visits = visited(lambda counted: _major_axes(counted), labels)
    assert visits <= 60 * labels.size


def test_the_curve_looks_at_each_detection_as_often_whatever_their_number():
    def of(count):
        false = visited(lambda counted: froc([SlideHits(1, (0.5,), counted)]), np.linspace(0, 1, count))
        return false / count

    assert of(2000) < 1.2 * of(500)


def test_the_curve_is_that_of_another_implementation():
    monai = pytest.importorskip("monai.metrics.froc")
    rng = np.random.default_rng(7)
    for _ in range(20):
        slides = rng.integers(2, 6)
        lesions = rng.integers(0, 4, slides)
        lesions[0] += 1
        found = [tuple(rng.random(rng.integers(0, count + 1)).round(1)) for count in lesions]
        false = [tuple(rng.random(rng.integers(0, 12)).round(1)) for _ in range(slides)]
        ours = froc([SlideHits(int(n), tp, fp) for n, tp, fp in zip(lesions, found, false, strict=True)])
        theirs = monai.compute_froc_curve_data(np.concatenate(false), np.concatenate(found), lesions.sum(), slides)
        # From the highest threshold as ours is; the lowest, which only ours has, is its last.
        for own, their in zip((ours.false_per_slide, ours.sensitivity), theirs, strict=True):
            np.testing.assert_allclose(own[1:-1], their[::-1][1:])
