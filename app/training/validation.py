"""Validation: the model's outputs on held-out tiles, gathered over the ranks, scored per tile and per slide.

Takes an engine and a dataset; returns scores and a table of predictions. Every group of ranks computes its share; sums
are exchanged, so that the result does not depend on the number of ranks. A tile that cannot be read goes through the
model, blank, so that all ranks do the same work, and takes no part in any score.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from app.settings.cli import RunError
from app.settings.optimization import ScoreSettings
from app.training.dataset import Dataset
from app.training.metrics import (
    Example,
    auc,
    balanced_accuracy,
    certain_examples,
    dice_by_slide,
    dice_examples,
    mean_defined,
    rows_by,
    slide_scores,
)
from models.heads import BagLoss, bag_logits
from models.losses import IGNORE
from parallel.engine.step import Microbatch
from parallel.offload.copies import read_later
from parallel.stage.stage import Loss
from parallel.streaming.box_sums import SummedLoss
from parallel.trace.stage_module import as_tensor
from pipelines.labels.class_names import positive_class

if TYPE_CHECKING:
    from app.training.session import Session


@dataclass(frozen=True)
class Scores:
    """Result of one validation.

    Attributes:
        metrics: name -> value, None where the data cannot define it.
        predictions: one row per slide: slide, split, then scores, empty without a readable tile.
        criterion: name of the metric that chooses the best checkpoint of a run whose first scores these are.
        tiles, unreadable: how many were to be scored, and how many of them could not be read.
    """

    metrics: dict[str, float | None]
    predictions: list[dict[str, Any]] = field(default_factory=list)
    criterion: str = "loss"
    tiles: int = 0
    unreadable: int = 0
    examples: tuple[Example, ...] = ()

    @property
    def unscored(self) -> list[str]:
        """Slides without a readable tile."""
        return [row["slide"] for row in self.predictions if not row["tiles"]]

    def better_than(self, best: Mapping[str, Any] | None) -> bool:
        """True when these scores beat ``best`` (metric, value) by its metric, or there is nothing to beat."""
        metric = self.criterion if best is None else best["metric"]
        value = self.metrics[metric]
        if value is None or best is None:
            return value is not None
        before: float = best["value"]
        return value < before if metric == "loss" else value > before


def subsample_per_slide(dataset: Dataset, rows: NDArray[np.int64], per_slide: int) -> NDArray[np.int64]:
    """Return at most ``per_slide`` of ``rows`` for each slide, evenly spread over its tiles; 0 keeps all."""
    if per_slide == 0 or not len(rows):
        return rows
    slide = dataset.tiles.slide[rows]
    kept = []
    for own in rows_by(slide)[1]:
        mine = rows[own]
        kept.append(mine[np.unique(np.linspace(0, len(mine) - 1, min(per_slide, len(mine))).astype(int))])
    return np.concatenate(kept)


@dataclass(frozen=True)
class Outputs:
    """A microbatch of a validation.

    Attributes:
        rows: int64 (n,), the validation rows it is of.
        readable: bool (n,), of which of them all was read that this rank was to read.
    """

    microbatch: Microbatch
    rows: NDArray[np.int64]
    readable: NDArray[np.bool_]


def evaluate(session: Session, step: int) -> Scores:
    """Score the model after ``step`` updates; a RunError where its outputs are not finite."""
    loss, dataset, rows = session.loss, session.dataset, session.validation_rows
    classes, in_bags = len(dataset.classes), isinstance(loss, BagLoss)
    losses = torch.zeros(len(rows), dtype=torch.float64)
    width = classes + in_bags if dataset.task == "classify" else 2 * classes
    score = _PixelScore(loss, classes) if isinstance(loss, SummedLoss) else None
    sums = torch.zeros((len(rows), width), dtype=torch.float64)
    unread = torch.zeros(len(rows), dtype=torch.int64)
    put: Callable[[], None] | None = None
    with session.engine.predicting(), session.validation() as stream:
        for part in stream:
            unread[part.rows[~part.readable]] = 1
            output = session.engine.predict(part.microbatch, score.sums if score else None)
            if output is None or not part.readable.any():
                continue  # another rank of the group has it, or none
            before, put = put, _begin_scores(part, output, score or loss, losses, sums)
            if before is not None:
                before()  # while a GPU computes the one that was begun
    if put is not None:
        put()
    for gathered in (losses, sums, unread):
        session.placement.communicator.all_reduce(gathered)
    sums[unread > 0] = 0  # pixels and targets may be read on two ranks: each has said what it could not read
    readable = unread.numpy() == 0
    if not all(torch.isfinite(values[unread == 0]).all() for values in (losses, sums)):
        raise RunError(
            f"after {step} steps the model's outputs for validation tiles are not finite, and nothing is saved of it; "
            f"the last checkpoint is kept. Lower --lr (now {session.learning_rate(step):g}), or use --precision fp32"
        )
    tiles = _Tiles(dataset, rows, dataset.tiles.slide[rows].astype(np.int64), readable)
    mean_loss = float(losses.numpy()[readable].mean()) if readable.any() else None
    if isinstance(loss, BagLoss):
        return _of_bags(tiles, sums, loss)
    if dataset.task == "classify":
        return _of_tiles(tiles, sums.numpy(), mean_loss, session.config.score)
    return _of_pixels(tiles, sums.numpy(), mean_loss)


def _begin_scores(
    part: Outputs, output: Tensor, score: Loss | _PixelScore, losses: Tensor, sums: Tensor
) -> Callable[[], None]:
    """Begin to score the tiles of a microbatch; return what waits for a GPU and puts losses and sums in their rows."""
    assert part.microbatch.targets is not None
    kept = np.flatnonzero(part.readable)
    where = torch.from_numpy(part.rows[kept])
    if isinstance(score, _PixelScore):
        pixels, of_tiles = math.prod(part.microbatch.targets.shape[1:]), read_later(output)

        def put_sums() -> None:
            own = of_tiles()[kept]
            losses[where] = score.losses(own, pixels)
            sums[where] = own[:, -sums.shape[1] :]

        return put_sums
    if isinstance(score, BagLoss):
        of_bags = read_later(output.double())
        return lambda: sums.__setitem__(where, of_bags()[kept])
    targets = as_tensor(part.microbatch.targets)
    # One tile at a time: the mean over a microbatch cannot be taken apart again.
    each = [score(output[i : i + 1], targets[i : i + 1]) for i in kept.tolist()]
    of_losses, of_tiles = read_later(torch.stack(each).double()), read_later(output.softmax(1).double())

    def put() -> None:
        losses[where] = of_losses()
        sums[where] = of_tiles()[kept]

    return put


@dataclass(frozen=True)
class _PixelScore:
    """Sums over each tile's pixels that validation needs; sums of the tile's boxes add up to them."""

    loss: SummedLoss
    classes: int

    def sums(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return float64 (n, K + 2C): those of the loss, intersections and summed sizes of each class in px."""
        of_loss = self.loss.sums(logits, targets)  # says what is wrong with the model
        predicted = logits.argmax(1)
        counted = targets != IGNORE
        ids = range(self.classes)
        overlap = [((predicted == c) & (targets == c)).sum((1, 2)) for c in ids]
        size = [((predicted == c) & counted).sum((1, 2)) + (targets == c).sum((1, 2)) for c in ids]
        return torch.cat((of_loss.double(), torch.stack(overlap + size, 1).double()), 1)

    def losses(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the loss of each tile (n,) of ``pixels`` px."""
        return torch.stack([self.loss.value(tile[None], pixels) for tile in sums[:, : -2 * self.classes]])


@dataclass(frozen=True, eq=False)
class _Tiles:
    """Validation tiles: int64 (n,) rows of the dataset and numbers of their slides, bool (n,) whether all was read."""

    dataset: Dataset
    rows: NDArray[np.int64]
    slide: NDArray[np.int64]
    readable: NDArray[np.bool_]

    @property
    def counts(self) -> tuple[int, int]:
        """All tiles, and those that cannot be read."""
        return len(self.readable), int(np.count_nonzero(~self.readable))

    def slide_rows(self) -> Iterator[dict[str, Any]]:
        """Yield the first cells of each slide's prediction: slide, split, tiles that were scored, and others."""
        for number, own in zip(*rows_by(self.slide), strict=True):
            slide_id, read = self.dataset.tiles.slides[number], int(np.count_nonzero(self.readable[own]))
            split = self.dataset.splits.split[slide_id]
            yield {"slide": slide_id, "split": split, "tiles": read, "tiles_unreadable": len(own) - read}


def _of_tiles(tiles: _Tiles, sums: NDArray[np.float64], loss: float | None, settings: ScoreSettings) -> Scores:
    assert tiles.dataset.tile_labels is not None
    rows, slide = tiles.rows[tiles.readable], tiles.slide[tiles.readable]
    probability, labels = sums[tiles.readable], tiles.dataset.tile_labels[rows]
    metrics = {
        "loss": loss,
        "tile_auc": auc(probability, labels),
        "tile_balanced_accuracy": balanced_accuracy(probability, labels),
    }
    positive = positive_class(tiles.dataset.classes, settings.positive_class)
    of_slides = slide_scores(probability, slide, settings.slide_score, settings.top_k, positive)
    scores = _classification(tiles, metrics, *of_slides)
    return replace(scores, examples=certain_examples(rows, slide, probability, labels))


def _of_bags(tiles: _Tiles, outputs: Tensor, loss: BagLoss) -> Scores:
    """Return the scores of a classifier of bags: all tiles of a slide are one, and the heaviest is its example."""
    dataset, loss = tiles.dataset, copy.deepcopy(loss).cpu()
    numbers, bags = rows_by(tiles.slide[tiles.readable])
    outputs = outputs[torch.from_numpy(tiles.readable)]
    logits = torch.cat([bag_logits(outputs[own][None]) for own in bags]) if len(numbers) else None
    labels = torch.tensor([dataset.slide_labels[dataset.tiles.slides[number]] for number in numbers])
    value = None if logits is None else float(loss.of_items(logits, labels).mean())
    scores = np.empty((0, len(dataset.classes))) if logits is None else logits.softmax(1).numpy()
    heaviest = np.array([own[int(outputs[own, -1].argmax())] for own in bags], np.int64)
    examples = certain_examples(tiles.rows[tiles.readable][heaviest], numbers, scores, labels.numpy())
    return replace(_classification(tiles, {"loss": value}, numbers, scores), examples=examples)


def _classification(
    tiles: _Tiles, metrics: dict[str, float | None], numbers: NDArray[np.int64], scores: NDArray[np.float64]
) -> Scores:
    """Return ``metrics`` with those of slides, and a prediction for each slide."""
    dataset = tiles.dataset
    metrics |= {"slide_auc": None, "slide_balanced_accuracy": None}
    ids = [dataset.tiles.slides[number] for number in numbers]
    if dataset.slide_labels:
        truth = np.array([dataset.slide_labels[slide_id] for slide_id in ids], np.int64)
        metrics["slide_auc"] = auc(scores, truth)
        metrics["slide_balanced_accuracy"] = balanced_accuracy(scores, truth)
    score_of = dict(zip(ids, scores.tolist(), strict=True))
    predictions = []
    for row in tiles.slide_rows():
        score = score_of.get(row["slide"])
        row["label"] = dataset.classes[dataset.slide_labels[row["slide"]]] if dataset.slide_labels else None
        row["prediction"] = dataset.classes[int(np.argmax(score))] if score else None
        row |= {f"score_{name}": score[c] if score else None for c, name in enumerate(dataset.classes)}
        predictions.append(row)
    criterion = next((name for name in ("slide_auc", "tile_auc") if metrics.get(name) is not None), "loss")
    return Scores(metrics, predictions, criterion, *tiles.counts)


def _of_pixels(tiles: _Tiles, sums: NDArray[np.float64], loss: float | None) -> Scores:
    names, readable = tiles.dataset.classes, tiles.readable
    classes = len(names)
    by_slide = np.stack([sums[own].sum(0) for own in rows_by(tiles.slide)[1]])
    dice = dice_by_slide(by_slide[:, :classes], by_slide[:, classes:])
    metrics: dict[str, float | None] = {"loss": loss}
    # The background is not what anyone segments for: the mean leaves it out.
    metrics["dice"] = mean_defined(dice[:, 1:])
    metrics |= {f"dice_{name}": mean_defined(dice[:, c]) for c, name in enumerate(names)}
    predictions = [
        row | {f"dice_{name}": None if np.isnan(v) else float(v) for name, v in zip(names, of_slide, strict=True)}
        for row, of_slide in zip(tiles.slide_rows(), dice, strict=True)
    ]
    criterion = "dice" if metrics["dice"] is not None else "loss"
    overlap, size = sums[readable, 1:classes], sums[readable, classes + 1 :]
    examples = dice_examples(tiles.rows[readable], tiles.slide[readable], overlap, size)
    return Scores(metrics, predictions, criterion, *tiles.counts, examples)
