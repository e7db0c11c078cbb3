from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score

from app.training.metrics import auc, balanced_accuracy, dice_by_slide, mean_defined, rows_by, slide_scores
from app.training.validation import _segmentation, _slide_rows, spread
from tests.helpers.counted import visited

PROBABILITY = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
SLIDE = np.array([4, 4, 2, 2, 2])


def test_slide_scores_by_mean_max_and_top_k() -> None:
    numbers, mean = slide_scores(PROBABILITY, SLIDE, "mean", 1)
    assert numbers.tolist() == [2, 4]
    assert mean == pytest.approx(np.array([[1.4 / 3, 1.6 / 3], [0.55, 0.45]]))
    assert slide_scores(PROBABILITY, SLIDE, "max", 1)[1] == pytest.approx(np.array([[0.6, 0.7], [0.9, 0.8]]))
    assert slide_scores(PROBABILITY, SLIDE, "top-k", 2)[1] == pytest.approx(np.array([[0.55, 0.6], [0.55, 0.45]]))


def test_top_k_beyond_the_tiles_is_the_mean() -> None:
    assert slide_scores(PROBABILITY, SLIDE, "top-k", 9)[1] == pytest.approx(
        slide_scores(PROBABILITY, SLIDE, "mean", 1)[1]
    )


@given(seed=st.integers(0, 1000))
def test_two_class_auc_is_that_of_the_second_class(seed: int) -> None:
    rng = np.random.default_rng(seed)
    score = rng.random((12, 2))
    score /= score.sum(1, keepdims=True)
    label = np.arange(12) % 2
    assert auc(score, label) == pytest.approx(roc_auc_score(label, score[:, 1]))


def test_auc_of_three_classes_is_one_against_the_rest() -> None:
    score = np.eye(3)[[0, 1, 2, 0]]
    assert auc(score, np.array([0, 1, 2, 0])) == 1.0
    expected = np.mean([roc_auc_score(np.array([0, 0, 1, 1]) == c, score[:, c]) for c in (0, 1)])
    assert auc(score, np.array([0, 0, 1, 1])) == pytest.approx(expected)


def test_scores_that_nothing_defines_are_none() -> None:
    assert auc(PROBABILITY, np.zeros(5, int)) is None
    assert balanced_accuracy(np.empty((0, 2)), np.empty(0, int)) is None
    assert mean_defined(np.array([np.nan, np.nan])) is None


def test_balanced_accuracy_weighs_classes_alike() -> None:
    assert balanced_accuracy(PROBABILITY, np.array([0, 1, 0, 0, 0])) == pytest.approx((3 / 4 + 1) / 2)


def test_dice_is_undefined_only_where_a_class_is_neither_true_nor_predicted() -> None:
    dice = dice_by_slide(np.array([[5.0, 0.0, 0.0]]), np.array([[20.0, 4.0, 0.0]]))
    assert dice[0, :2].tolist() == [0.5, 0.0]
    assert np.isnan(dice[0, 2])


def test_rows_by_number() -> None:
    numbers, rows = rows_by(np.array([4, 2, 4, 2]))
    assert numbers.tolist() == [2, 4]
    assert [own.tolist() for own in rows] == [[1, 3], [0, 2]]
    assert rows_by(np.empty(0, np.int64))[1] == []


def _dataset(slides: int) -> SimpleNamespace:
    ids = [str(k) for k in range(slides)]
    splits = SimpleNamespace(split=dict.fromkeys(ids, "val"))
    return SimpleNamespace(classes=("a", "b"), tiles=SimpleNamespace(slides=ids, slide=None), splits=splits)


@pytest.mark.parametrize("what", ["slide_scores", "spread", "slide_rows", "segmentation"])
def test_each_tile_is_visited_as_often_whatever_the_number_of_slides(what: str) -> None:
    def per_tile(slides: int) -> float:
        slide, data = np.repeat(np.arange(slides), 10), _dataset(slides)
        values = np.random.default_rng(0).random((len(slide), 4))
        readable = np.ones(len(slide), bool)

        def work(slide: Any, values: Any, readable: Any) -> None:
            data.tiles.slide = slide
            if what == "slide_scores":
                slide_scores(values, slide, "top-k", 5)
            elif what == "spread":
                spread(data, np.arange(len(slide)), 5)
            elif what == "slide_rows":
                list(_slide_rows(data, slide, readable))
            else:
                _segmentation(data, np.arange(len(slide)), slide, readable, values, None)

        return visited(work, slide, values, readable) / len(slide)

    assert per_tile(400) < 1.3 * per_tile(100)
