"""The training losses: means over tiles, so that microbatch losses weighted by their size add up to the batch's.

Class weights multiply each tile's (pixel's) loss and are scaled so that their mean over the training set is 1; dividing
by the sum of weights of a microbatch, as ``nn.CrossEntropyLoss`` does, would make the loss depend on how the batch is
cut.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

IGNORE = 255
"""Class id of pixels that do not count."""


class TileClassLoss(nn.Module):
    """The cross entropy of one label per tile.

    Args:
        class_weights: (C,), of each tile's loss by its label; None weighs all alike.
    """

    class_weights: Tensor | None

    def __init__(self, class_weights: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("class_weights", class_weights)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss () of ``logits`` (n, C) with ``labels`` int64 (n,).

        Raises:
            ValueError: logits of another form.
        """
        if logits.dim() != 2:
            raise ValueError(
                f"a tile classifier gives logits (n, classes); this model gives {tuple(logits.shape)}: "
                "choose a classification --model, or --task segment with annotations"
            )
        loss = F.cross_entropy(logits.float(), labels, reduction="none")
        return (loss if self.class_weights is None else loss * self.class_weights[labels]).mean()


class PixelClassLoss(nn.Module):
    """The cross entropy plus soft Dice of one class per pixel.

    The Dice term (Milletari et al. 2016, section 3) is taken per tile and per class, then averaged; a class that a tile
    does not hold counts there only by what is wrongly predicted. Both terms are made of sums over pixels, so that a
    tile may be computed box by box: ``sums`` of each box, added, then ``value``.

    Args:
        class_weights: (C,), of each pixel's cross entropy by its class; None weighs all alike.
    """

    class_weights: Tensor | None

    def __init__(self, class_weights: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("class_weights", class_weights)

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss () of ``logits`` (n, C, h, w) with ``classes`` uint8 (n, h, w).

        Raises:
            ValueError: logits of another form or size.
        """
        return self.value(self.sums(logits, classes), classes.shape[-2] * classes.shape[-1])

    def sums(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return what a box of the tile adds to the loss: float64 (n, 1 + 2C), cross entropy, then overlap and size of
        each class.

        Args:
            logits: (n, C, h, w) of the box.
            classes: uint8 (n, h, w) of the box.

        Raises:
            ValueError: logits of another form or size.
        """
        form = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        if not isinstance(logits, Tensor) or logits.dim() != 4 or logits.shape[-2:] != classes.shape[-2:]:
            raise ValueError(
                f"a segmentation model gives logits (n, classes, h, w) of the tile's size {tuple(classes.shape[-2:])}; "
                f"this one gives {form}: choose a segmentation --model such as unet, or --task classify"
            )
        logits = logits if logits.dtype == torch.float64 else logits.float()
        counted = classes != IGNORE
        target = classes.long().masked_fill(~counted, 0)
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        loss = F.cross_entropy(logits, target, weight=weights, reduction="none")
        cross_entropy = (loss * counted).sum((1, 2))
        probability = logits.softmax(1) * counted[:, None]
        truth = F.one_hot(target, logits.shape[1]).movedim(-1, 1) * counted[:, None]
        overlap = (probability * truth).sum((2, 3))
        size = (probability + truth).sum((2, 3))
        return torch.cat((cross_entropy[:, None], overlap, size), 1).double()  # many boxes add up

    def value(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the mean loss () of tiles of ``pixels`` px from the ``sums`` of all their boxes."""
        cross_entropy, overlap, size = sums.tensor_split((1, 1 + sums.shape[1] // 2), 1)
        dice = (2 * overlap + 1) / (size + 1)
        return cross_entropy.mean() / pixels + (1 - dice).mean()


def balanced_weights(counts: NDArray[np.int64]) -> Tensor:
    """Return weights (C,) inverse to the class counts; their mean over the counted items is 1. Absent classes weigh
    0."""
    present = counts > 0
    weights = np.where(present, counts.sum() / np.maximum(counts, 1) / present.sum(), 0.0)
    return torch.from_numpy(weights).float()
