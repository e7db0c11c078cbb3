"""Tiles that the report of a run shows: which are chosen, and masks that do not depend on boxes or ranks."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from app.training.example_pictures import CELLS, GAP_PX, PICTURE_PX, _CellTargets, _count
from app.training.examples import EACH, certain_examples, dice_examples
from parallel.space.grid import Span
from tests.app.conftest import QUICK, Train, summary_of

SEGMENT = (*QUICK, "--model", "tests.helpers.tiny_models:segmenter", "--steps", "2")


def test_wrong_tiles_come_first_and_those_of_other_slides_before_a_second() -> None:
    probability = np.array([[0.9, 0.1], [0.95, 0.05], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
    labels, slide = np.array([0, 0, 0, 0, 0]), np.array([0, 0, 1, 1, 0])
    shown = certain_examples(np.arange(10, 15), slide, probability, labels)
    assert [(example.row, example.prediction) for example in shown] == [(13, 1), (14, 1), (11, 0), (12, 0), (10, 0)]
    assert [example.score for example in shown] == [0.7, 0.55, 0.95, 0.8, 0.9]
    assert len(certain_examples(np.arange(50), np.zeros(50, int), np.full((50, 2), 0.5), np.zeros(50, int))) == EACH
    assert certain_examples(np.arange(0), slide[:0], probability[:0], labels[:0]) == ()


def test_tiles_of_lowest_and_highest_dice_without_those_that_have_no_class() -> None:
    overlap = np.array([[3.0], [0.0], [0.0], [4.0], [1.0]])
    size = np.array([[8.0], [6.0], [0.0], [8.0], [8.0]])
    shown = dice_examples(np.arange(5), np.array([0, 0, 0, 1, 1]), overlap, size)
    assert [(example.row, example.score) for example in shown] == [(1, 0.0), (4, 0.25), (0, 0.75), (3, 1.0)]
    many = dice_examples(np.arange(50), np.zeros(50, int), np.arange(50.0)[:, None], np.full((50, 1), 200.0))
    assert [example.row for example in many] == [0, 1, 2, 3, 49, 48, 47, 46]


def test_cells_are_counted_alike_in_parts_of_a_tile() -> None:
    torch.manual_seed(0)
    logits, cells = torch.randn(2, 3, 200, 300), _CellTargets((2, 200, 300))
    spans = [(Span(0, 70), Span(0, 300)), (Span(70, 200), Span(0, 128)), (Span(70, 200), Span(128, 300))]
    parts = [_count(3, logits[:, :, y.start : y.stop, x.start : x.stop], cells.box(y, x)) for y, x in spans]
    counts = sum(parts).reshape(2, 3, CELLS, CELLS)  # type: ignore[union-attr]
    assert counts.sum() == 2 * 200 * 300
    predicted = logits.argmax(1)
    assert counts[1, 2, 5, 7] == (predicted[1, 8:10, 17:19] == 2).sum()  # rows and columns of that cell


@pytest.fixture(scope="module")
def plain(segment_slides: Path, train: Train, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process."""
    out = tmp_path_factory.mktemp("plain") / "run"
    done = train("--slides", segment_slides, *SEGMENT, "--out", out)
    assert done.returncode == 0, done.stderr
    return out


def test_a_tile_stands_beside_its_true_and_its_predicted_mask(plain: Path) -> None:
    examples, drawn = summary_of(plain)["examples"], []
    assert 1 <= len(examples) <= 2 * EACH
    for example in examples:
        picture = cv2.imread(str(plain / example["picture"]))
        assert picture is not None
        assert picture.shape == (PICTURE_PX, 3 * PICTURE_PX + 2 * GAP_PX, 3)
        tile, true = picture[:, :PICTURE_PX], picture[:, PICTURE_PX + GAP_PX : 2 * PICTURE_PX + GAP_PX]
        drawn.append(np.abs(tile.astype(int) - true).max())
    assert max(drawn) > 60, "of some tile a mask is drawn"


@pytest.mark.parametrize(
    "strategy",
    [("--stream", "128"), pytest.param(("--ranks", "2", "--parallel", "spatial"), marks=pytest.mark.process)],
)
def test_masks_of_a_run_are_those_of_one_process(
    strategy: tuple[str, ...], plain: Path, segment_slides: Path, train: Train, train_ranks: Train, tmp_path: Path
) -> None:
    start = train_ranks if "--ranks" in strategy else train
    done = start("--slides", segment_slides, *SEGMENT, *strategy, "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    examples, others = (summary_of(run)["examples"] for run in (plain, tmp_path))
    place = ("slide", "l0_x", "l0_y")
    assert [[one[key] for key in place] for one in others] == [[one[key] for key in place] for one in examples]
    for one, other in zip(examples, others, strict=True):
        first, second = cv2.imread(str(plain / one["picture"])), cv2.imread(str(tmp_path / other["picture"]))
        assert first is not None
        assert second is not None
        assert np.abs(first.astype(int) - second).mean() < 1


def test_a_classifier_shows_what_it_said(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    done = train("--slides", classify_slides, *QUICK, "--steps", "2", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    examples = summary_of(tmp_path / "run")["examples"]
    assert {example["truth"] for example in examples} <= set(summary_of(tmp_path / "run")["classes"])
    assert all((tmp_path / "run" / example["picture"]).stat().st_size > 1000 for example in examples)
    assert "Tiles of the last validation" in (tmp_path / "run" / "report.html").read_text()
