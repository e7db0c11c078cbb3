"""Scores of a validation: areas under ROC curves, balanced accuracy, Dice; for tiles and for slides.

Takes plain arrays, gives floats; a score that its data cannot define (one class only, no tile) is None, never a guess.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Labels = NDArray[np.int64]


def rows_by(number: NDArray[np.int64] | NDArray[np.int32]) -> tuple[Labels, list[Labels]]:
    """Return the distinct values of ``number`` (n,), ascending, and the rows that have each, in order: sorted once, not
    searched for each value."""
    order = np.argsort(number, kind="stable")
    numbers, first = np.unique(number[order], return_index=True)
    return numbers.astype(np.int64), np.split(order, first)[1:]


def slide_scores(
    probability: Floats, slide: Labels, how: Literal["mean", "max", "top-k"], k: int
) -> tuple[Labels, Floats]:
    """One score per slide and class from those of its tiles.

    Args:
        probability: (n, C) of each tile.
        slide: (n,) number of each tile's slide.
        how: mean over the tiles, the largest, or the mean of the ``k`` largest, for each class by itself.

    Returns:
        Slide numbers (s,), ascending, and their scores (s, C).
    """
    numbers, rows = rows_by(slide)
    scores = np.empty((len(numbers), probability.shape[1]))
    for row, own in enumerate(rows):
        tiles = np.sort(probability[own], axis=0)[::-1]
        counted = {"mean": len(tiles), "max": 1, "top-k": k}[how]
        scores[row] = tiles[:counted].mean(axis=0)
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
