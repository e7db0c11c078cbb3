"""Scores of a validation: areas under ROC curves, balanced accuracy, Dice; and the tiles that a report shows.

Takes plain arrays, returns floats; a score that its data cannot define (one class only, no tile) is None. Shown are the
tiles that the model is most certain of, right and wrong, or those of lowest and highest Dice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]
EACH = 4
"""Tiles of each kind: right and wrong, or highest and lowest Dice."""
LOOKED_AT = 1000
"""Tiles at either end of the order from which those of different slides are taken first."""


def rows_by(number: NDArray[np.int64] | NDArray[np.int32]) -> tuple[Labels, list[Labels]]:
    """Return the distinct values of ``number`` (n,), ascending, and the rows that have each, in order: sorted once, not
    searched for each value."""
    order = np.argsort(number, kind="stable")
    numbers, first = np.unique(number[order], return_index=True)
    return numbers.astype(np.int64), np.split(order, first)[1:]


def slide_scores(
    probability: Floats, slide: Labels, how: Literal["mean", "max", "top-k"], k: int, positive: int | None = None
) -> tuple[Labels, Floats]:
    """One score per slide and class from those of its tiles.

    Args:
        probability: (n, C) of each tile.
        how: mean over the tiles, the largest, or the mean of the ``k`` largest, for each class.
        positive: index of the positive class of two, from whose score that of the other follows, so that the largest
            of both add up to 1. None: each class has its own.

    Returns:
        Slide numbers (s,), ascending, and their scores (s, C).
    """
    numbers, rows = rows_by(slide)
    scores = np.empty((len(numbers), probability.shape[1]))
    for row, own in enumerate(rows):
        tiles = np.sort(probability[own], axis=0)[::-1]
        counted = {"mean": len(tiles), "max": 1, "top-k": k}[how]
        scores[row] = tiles[:counted].mean(axis=0)
    if positive is not None and how != "mean":
        scores[:, 1 - positive] = 1 - scores[:, positive]
    return numbers, scores


def auc(score: Floats, label: Labels) -> float | None:
    """Area under the ROC curve: of class 1 against 0, or the mean of one class against the rest.

    Args:
        score: (n, C), the larger the likelier.
        label: (n,) true class.
    """
    present = [c for c in range(score.shape[1]) if 0 < np.count_nonzero(label == c) < len(label)]
    if not present:
        return None
    from sklearn.metrics import roc_auc_score  # a second, for what a start of each rank need not wait

    if score.shape[1] == 2:
        return float(roc_auc_score(label == 1, score[:, 1] - score[:, 0]))
    return float(np.mean([roc_auc_score(label == c, score[:, c]) for c in present]))


def balanced_accuracy(score: Floats, label: Labels) -> float | None:
    """Mean over the present classes of the share of their items whose highest score is their own class."""
    if len(label) == 0:
        return None
    # Not sklearn's: it warns whenever a class is predicted that no label has, which small validation sets do.
    hit = score.argmax(1) == label
    return float(np.mean([hit[label == c].mean() for c in np.unique(label)]))


def dice_by_slide(overlap: Floats, size: Floats) -> Floats:
    """Dice (s, C) of intersections and summed sizes (s, C) in px; NaN where a class is neither true nor predicted."""
    with np.errstate(invalid="ignore"):
        return np.where(size > 0, 2 * overlap / size, np.nan)


def mean_defined(values: Floats) -> float | None:
    """Mean of what is not NaN; None when nothing is."""
    defined = values[~np.isnan(values)]
    return float(defined.mean()) if len(defined) else None


@dataclass(frozen=True)
class Example:
    """A validation tile to show.

    Attributes:
        row: of the dataset's tiles.
        score: probability of the predicted class, or mean Dice of the classes but the background.
        truth, prediction: class ids of a classifier; None in segmentation.
    """

    row: int
    score: float
    truth: int | None = None
    prediction: int | None = None


def certain_examples(
    rows: NDArray[np.int64], slide: NDArray[np.int64], probability: NDArray[np.float64], labels: NDArray[np.int64]
) -> tuple[Example, ...]:
    """Return the most certain wrong tiles of a classifier, then its most certain right ones.

    Args:
        rows: of the dataset's tiles, (n,).
        slide: number of each tile's slide, (n,).
        probability: of each class, (n, C).
        labels: true classes, (n,).
    """
    predicted, certainty = probability.argmax(1), probability.max(1, initial=0)
    right, order = predicted == labels, np.argsort(-certainty, kind="stable")
    chosen = [k for kind in (~right, right) for k in _of_many_slides(order[kind[order]], slide)]
    return tuple(Example(int(rows[k]), float(certainty[k]), int(labels[k]), int(predicted[k])) for k in chosen)


def dice_examples(
    rows: NDArray[np.int64], slide: NDArray[np.int64], overlap: NDArray[np.float64], size: NDArray[np.float64]
) -> tuple[Example, ...]:
    """Return the tiles of lowest Dice, then those of highest.

    Args:
        rows, slide: as in ``certain_examples``.
        overlap, size: px in both masks, and summed over both, of each class but the background, (n, C - 1).
    """
    held = np.flatnonzero((size > 0).any(1))
    dice = np.nanmean(dice_by_slide(overlap[held], size[held]), axis=1)
    order = held[np.argsort(dice, kind="stable")]
    lowest = _of_many_slides(order, slide)
    highest = [k for k in _of_many_slides(order[::-1], slide) if k not in lowest]
    value = dict(zip(held.tolist(), dice.tolist(), strict=True))
    return tuple(Example(int(rows[k]), value[k]) for k in (*lowest, *highest))


def _of_many_slides(order: NDArray[np.int64], slide: NDArray[np.int64]) -> list[int]:
    """The first ``EACH`` of ``order``, the first tile of every slide before a second one."""
    before: Counter[int] = Counter()
    ranked = []
    for place, k in enumerate(order[:LOOKED_AT].tolist()):
        number = int(slide[k])
        ranked.append((before[number], place, k))
        before[number] += 1
    return [k for _, _, k in sorted(ranked)[:EACH]]
