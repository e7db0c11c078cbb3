"""Scores of a validation, the tiles that a report shows of it, and what it waits for on a GPU."""

import contextlib
import functools
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import nn

from app.settings.optimization import ScoreSettings
from app.training import validation
from app.training.example_pictures import CELLS, GAP_PX, PICTURE_PX, _CellTargets, _count, _filled
from app.training.metrics import (
    EACH,
    auc,
    balanced_accuracy,
    certain_examples,
    dice_by_slide,
    dice_examples,
    mean_defined,
    slide_scores,
)
from app.training.validation import Outputs, Scores, evaluate
from models.losses import IGNORE, PixelClassLoss, TileClassLoss
from parallel.comm.thread_comm import LocalCommunicator
from parallel.engine.step import Microbatch
from parallel.space.cuts import Span
from tests.app.conftest import QUICK, summary_of
from tests.helpers.sim_gpu import simulated

PROBABILITY = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7], [0.5, 0.5]])
SLIDE = np.array([4, 4, 2, 2, 2])


@pytest.mark.parametrize(
    ("how", "k", "positive", "expected"),
    [
        ("mean", 1, 1, [[1.4 / 3, 1.6 / 3], [0.55, 0.45]]),
        *(("max", 1, None, [[0.6, 0.7], [0.9, 0.8]]), ("max", 1, 0, [[0.6, 0.4], [0.9, 0.1]])),
        *(("top-k", 2, None, [[0.55, 0.6], [0.55, 0.45]]), ("top-k", 2, 1, [[0.4, 0.6], [0.55, 0.45]])),
        ("top-k", 9, 1, [[1.4 / 3, 1.6 / 3], [0.55, 0.45]]),  # more than there are tiles: the mean
    ],
)
def test_slide_scores_by_mean_max_and_top_k(how, k, positive, expected):
    numbers, scores = slide_scores(PROBABILITY, SLIDE, how, k, positive)
    assert numbers.tolist() == [2, 4]
    assert scores == pytest.approx(np.array(expected))


@given(seed=st.integers(0, 1000))
def test_two_class_auc_is_that_of_the_second_class(seed):
    rng = np.random.default_rng(seed)
    score = rng.random((12, 2))
    score /= score.sum(1, keepdims=True)
    label = np.arange(12) % 2
    assert auc(score, label) == pytest.approx(roc_auc_score(label, score[:, 1]))


def test_scores_weigh_classes_alike_and_are_none_where_nothing_defines_them():
    score = np.eye(3)[[0, 1, 2, 0]]
    assert auc(score, np.array([0, 1, 2, 0])) == 1.0
    expected = np.mean([roc_auc_score(np.array([0, 0, 1, 1]) == c, score[:, c]) for c in (0, 1)])
    assert auc(score, np.array([0, 0, 1, 1])) == pytest.approx(expected)
    assert balanced_accuracy(PROBABILITY, np.array([0, 1, 0, 0, 0])) == pytest.approx((3 / 4 + 1) / 2)
    assert auc(PROBABILITY, np.zeros(5, int)) is None
    assert balanced_accuracy(np.empty((0, 2)), np.empty(0, int)) is None
    assert mean_defined(np.array([np.nan, np.nan])) is None


def test_dice_is_undefined_only_where_a_class_is_neither_true_nor_predicted():
    dice = dice_by_slide(np.array([[5.0, 0.0, 0.0]]), np.array([[20.0, 4.0, 0.0]]))
    np.testing.assert_array_equal(dice, [[0.5, 0.0, np.nan]])


SEGMENT = (*QUICK, "--model", "tests.helpers.tiny_models:segmenter", "--steps", "2")


def test_wrong_tiles_come_first_and_those_of_other_slides_before_a_second():
    probability = np.array([[0.9, 0.1], [0.95, 0.05], [0.8, 0.2], [0.3, 0.7], [0.45, 0.55]])
    labels, slide = np.array([0, 0, 0, 0, 0]), np.array([0, 0, 1, 1, 0])
    shown = certain_examples(np.arange(10, 15), slide, probability, labels)
    assert [(example.row, example.prediction) for example in shown] == [(13, 1), (14, 1), (11, 0), (12, 0), (10, 0)]
    assert [example.score for example in shown] == [0.7, 0.55, 0.95, 0.8, 0.9]
    assert len(certain_examples(np.arange(50), np.zeros(50, int), np.full((50, 2), 0.5), np.zeros(50, int))) == EACH
    assert certain_examples(np.arange(0), slide[:0], probability[:0], labels[:0]) == ()


def test_tiles_of_lowest_and_highest_dice_without_those_that_have_no_class():
    overlap = np.array([[3.0], [0.0], [0.0], [4.0], [1.0]])
    size = np.array([[8.0], [6.0], [0.0], [8.0], [8.0]])
    shown = dice_examples(np.arange(5), np.array([0, 0, 0, 1, 1]), overlap, size)
    assert [(example.row, example.score) for example in shown] == [(1, 0.0), (4, 0.25), (0, 0.75), (3, 1.0)]
    many = dice_examples(np.arange(50), np.zeros(50, int), np.arange(50.0)[:, None], np.full((50, 1), 200.0))
    assert [example.row for example in many] == [0, 1, 2, 3, 49, 48, 47, 46]


def test_cells_are_counted_alike_in_parts_of_a_tile():
    torch.manual_seed(0)
    logits, cells = torch.randn(2, 3, 200, 300), _CellTargets((2, 200, 300))
    spans = [(Span(0, 70), Span(0, 300)), (Span(70, 200), Span(0, 128)), (Span(70, 200), Span(128, 300))]
    parts = [_count(3, logits[:, :, y.start : y.stop, x.start : x.stop], cells.box(y, x)) for y, x in spans]
    counts = sum(parts).reshape(2, 3, CELLS, CELLS)
    assert counts.sum() == 2 * 200 * 300
    predicted = logits.argmax(1)
    assert counts[1, 2, 5, 7] == (predicted[1, 8:10, 17:19] == 2).sum()  # rows and columns of that cell


@pytest.mark.parametrize("side", [1, 40, 64, 100, 127, 128, 129, 1000])
def test_each_cell_of_a_small_tile_has_the_class_of_the_px_it_lies_in(side):
    cells = torch.arange(side) * CELLS // side
    source = _filled(side)
    assert set(source.tolist()) == set(cells.tolist())
    assert (source - torch.arange(CELLS)).abs().max() <= CELLS / side
    assert side < CELLS or torch.equal(source, torch.arange(CELLS))


@pytest.fixture(scope="module")
def plain(segment_slides, train, tmp_path_factory):
    """A run of one process."""
    out = tmp_path_factory.mktemp("plain") / "run"
    train("--slides", segment_slides, *SEGMENT, "--out", out)
    return out


def test_a_tile_stands_beside_its_true_and_its_predicted_mask(plain):
    examples, drawn = summary_of(plain)["examples"], []
    assert 1 <= len(examples) <= 2 * EACH
    for example in examples:
        picture = cv2.imread(str(plain / example["picture"]))
        assert picture.shape == (PICTURE_PX, 3 * PICTURE_PX + 2 * GAP_PX, 3)
        tile, true = picture[:, :PICTURE_PX], picture[:, PICTURE_PX + GAP_PX : 2 * PICTURE_PX + GAP_PX]
        drawn.append(np.abs(tile.astype(int) - true).max())
    assert max(drawn) > 60, "of some tile a mask is drawn"


@pytest.mark.parametrize(
    "strategy",
    [("--stream", "128"), pytest.param(("--ranks", "2", "--parallel", "spatial"), marks=pytest.mark.process)],
)
def test_masks_of_a_run_are_those_of_one_process(strategy, plain, segment_slides, train, train_ranks, tmp_path):
    start = train_ranks if "--ranks" in strategy else train
    start("--slides", segment_slides, *SEGMENT, *strategy, "--out", tmp_path)
    examples, others = (summary_of(run)["examples"] for run in (plain, tmp_path))
    place = ("slide", "l0_x", "l0_y")
    assert [[one[key] for key in place] for one in others] == [[one[key] for key in place] for one in examples]
    for one, other in zip(examples, others, strict=True):
        first, second = cv2.imread(str(plain / one["picture"])), cv2.imread(str(tmp_path / other["picture"]))
        assert np.abs(first.astype(int) - second).mean() < 1


def test_a_classifier_shows_what_it_said(classify_slides, train, tmp_path):
    train("--slides", classify_slides, *QUICK, "--steps", "2", "--out", tmp_path / "run")
    examples = summary_of(tmp_path / "run")["examples"]
    assert {example["truth"] for example in examples} <= set(summary_of(tmp_path / "run")["classes"])
    assert all((tmp_path / "run" / example["picture"]).stat().st_size > 1000 for example in examples)
    assert "Tiles of the last validation" in (tmp_path / "run" / "report.html").read_text()


COUNT, SIZE, CLASSES = 4, 2, 3


class Engine:
    """Only ``predict``; notes its calls."""

    def __init__(self, device, pixels, notes):
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, CLASSES, 3, padding=1)] + ([] if pixels else [nn.AdaptiveAvgPool2d(1), nn.Flatten()])
        self.net, self.notes = nn.Sequential(*layers).to(device), notes

    def predicting(self):
        return contextlib.nullcontext()

    @torch.no_grad()
    def predict(self, microbatch, sums):
        self.notes.append("begun")
        output = self.net(microbatch.images)
        return output if sums is None else sums(output, microbatch.targets)


def session_of(engine, loss, dataset, rows, microbatches):
    parts = {"engine": engine, "loss": loss, "dataset": dataset, "validation_rows": rows, "validation": microbatches}
    place, config = SimpleNamespace(communicator=LocalCommunicator()), SimpleNamespace(score=ScoreSettings())
    return SimpleNamespace(placement=place, config=config, **parts)


def scores(device, pixels, notes):
    """Losses and sums of a validation of which one tile cannot be read."""
    rows, readable = np.arange(COUNT * SIZE), np.ones(COUNT * SIZE, bool)
    readable[3] = False
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(COUNT * SIZE, 3, 6, 6, generator=generator).to(device)
    targets = torch.randint(CLASSES, (COUNT * SIZE, 6, 6) if pixels else (COUNT * SIZE,), generator=generator)
    targets = targets.to(torch.uint8 if pixels else torch.int64).to(device)

    @contextlib.contextmanager
    def microbatches():
        cuts = [slice(first, first + SIZE) for first in range(0, COUNT * SIZE, SIZE)]
        parts = [(Microbatch(images[cut], targets[cut], (SIZE, 3, 6, 6)), rows[cut], readable[cut]) for cut in cuts]
        yield (Outputs(*part) for part in parts)

    tiles = SimpleNamespace(slide=np.zeros(COUNT * SIZE, np.int64))
    dataset = SimpleNamespace(classes=list(range(CLASSES)), task="segment" if pixels else "classify", tiles=tiles)
    engine = Engine(device, pixels, notes)
    loss = PixelClassLoss() if pixels else TileClassLoss(None)
    return evaluate(session_of(engine, loss, dataset, rows, microbatches), 1)


def test_ignored_px_are_in_no_dice():
    logits = torch.tensor([0.0, 1.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 4)  # class 1 everywhere
    targets = torch.tensor([[[1, 1, 0, IGNORE], [1, 0, IGNORE, IGNORE]]], dtype=torch.uint8)
    part = Outputs(Microbatch(None, targets, (1, 3, 2, 4)), np.arange(1), np.ones(1, bool))
    engine = SimpleNamespace(
        predicting=contextlib.nullcontext, predict=lambda microbatch, sums: sums(logits, microbatch.targets)
    )
    tiles, splits = SimpleNamespace(slide=np.zeros(1, np.int64), slides=["s"]), SimpleNamespace(split={"s": "val"})
    dataset = SimpleNamespace(classes=("background", "gland"), task="segment", tiles=tiles, splits=splits)
    opened = functools.partial(contextlib.nullcontext, iter([part]))
    metrics = evaluate(session_of(engine, PixelClassLoss(), dataset, np.arange(1), opened), 1).metrics
    assert (metrics["dice_background"], metrics["dice_gland"]) == (0, 2 * 3 / (3 + 5))


def test_the_best_is_chosen_by_one_metric_all_along():
    """Of slides without a lesion, Dice is defined only where the model is wrong: its 0 was taken for the best."""
    by_loss, by_auc = {"metric": "loss", "value": 0.5}, {"metric": "slide_auc", "value": 0.8}
    assert not Scores({"loss": 0.6, "dice": 0.0}, criterion="dice").better_than(by_loss)
    assert Scores({"loss": 0.4, "dice": 0.0}, criterion="dice").better_than(by_loss)
    assert not Scores({"tile_auc": 0.9, "slide_auc": None}, criterion="tile_auc").better_than(by_auc)
    assert Scores({"tile_auc": 0.7, "slide_auc": 0.85}, criterion="slide_auc").better_than(by_auc)
    assert Scores({"loss": 0.9, "dice": 0.0}, criterion="dice").better_than(None)
    assert not Scores({"loss": None}).better_than(None)


@pytest.mark.parametrize("pixels", [False, True], ids=["tiles", "pixels"])
def test_a_microbatch_is_waited_for_when_the_next_is_begun(pixels, monkeypatch):
    monkeypatch.setattr(validation, "_of_tiles", lambda *given: given[-3:-1])
    monkeypatch.setattr(validation, "_of_pixels", lambda *given: given[-2:])
    expected_sums, expected_loss = scores(torch.device("cpu"), pixels, [])
    notes = []
    with simulated(1, late=0) as gpus:
        event = torch.cuda.Event.synchronize
        monkeypatch.setattr(torch.cuda.Event, "synchronize", lambda self: (notes.append("waited"), event(self)))
        sums, loss = scores(torch.device("cuda", 0), pixels, notes)
        assert not gpus.found
        assert not [place for place in gpus.process.hazards.syncs if "copy to the host" in place]
    waited = ["waited"] * (1 if pixels else 2)
    assert notes == ["begun", *(["begun", *waited] * (COUNT - 1)), *waited]
    assert np.allclose(sums, expected_sums)
    assert loss == pytest.approx(expected_loss)
