"""Choice of the validation tiles that the report of a run shows.

Takes the scores of a validation's tiles; returns those that the model is most certain of, right and wrong, or those of
lowest and highest Dice.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.training.metrics import dice_by_slide

EACH = 4
"""Tiles of each kind: right and wrong, or highest and lowest Dice."""

LOOKED_AT = 1000
"""Tiles at either end of the order from which those of different slides are taken first."""


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
