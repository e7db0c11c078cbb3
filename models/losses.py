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


class ClassLoss(nn.Module):
    """The loss of each item by its class: cross entropy, or its focal form (Lin et al. 2017, eq. 4).

    Args:
        class_weights: (C,), of each item's loss by its class; None weighs all alike.
        label_smoothing: share of the target that is spread over all classes (Szegedy et al. 2016, section 7), each
            with its own weight.
        gamma: exponent of the focal form, 1 or more; 0: cross entropy.

    Raises:
        ValueError: the focal form with smoothed labels, which it is not defined for.
    """

    class_weights: Tensor | None

    def __init__(
        self, class_weights: Tensor | None = None, *, label_smoothing: float = 0.0, gamma: float = 0.0
    ) -> None:
        super().__init__()
        if gamma and label_smoothing:
            raise ValueError(f"focal loss is of one class an item; got label_smoothing {label_smoothing:g}: leave it 0")
        self.register_buffer("class_weights", class_weights)
        self.label_smoothing = label_smoothing
        self.gamma = gamma

    def of_items(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return (n, ...) of ``logits`` (n, C, ...), float32 or float64, with ``classes`` int64 (n, ...)."""
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        if not self.gamma:
            return F.cross_entropy(
                logits, classes, weight=weights, reduction="none", label_smoothing=self.label_smoothing
            )
        unweighted = F.cross_entropy(logits, classes, reduction="none")
        loss = (-torch.expm1(-unweighted)).pow(self.gamma) * unweighted  # 1 - p, where p = exp(-cross entropy)
        return loss if weights is None else loss * weights[classes]


class TileClassLoss(ClassLoss):
    """The loss of one label per tile; see ``ClassLoss``."""

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss () of ``logits`` (n, C) with ``labels`` int64 (n,).

        Raises:
            ValueError: logits of another form.
        """
        if not isinstance(logits, Tensor) or logits.dim() != 2:
            raise ValueError(
                f"a tile classifier gives logits (n, classes); this model gives {_form(logits)}: "
                "choose a classification --model, or --task segment with annotations"
            )
        return self.of_items(_in_full(logits), labels).mean()


class PixelClassLoss(ClassLoss):
    """The loss of one class per pixel, plus soft Dice.

    The Dice term (Milletari et al. 2016, section 3) is taken per tile and per class, then averaged; a class that a tile
    does not hold counts there only by what is wrongly predicted. Both terms are made of sums over pixels, so that a
    tile may be computed box by box: ``sums`` of each box, added, then ``value``. Taken over a whole batch, Dice
    would depend on how the batch is cut into microbatches. Pixels of ``IGNORE`` count in neither; class weights and
    smoothed labels are of the first term alone.

    Args:
        dice: False leaves that term out.
        class_weights, label_smoothing, gamma: as for ``ClassLoss``.
    """

    def __init__(
        self,
        class_weights: Tensor | None = None,
        *,
        dice: bool = True,
        label_smoothing: float = 0.0,
        gamma: float = 0.0,
    ) -> None:
        super().__init__(class_weights, label_smoothing=label_smoothing, gamma=gamma)
        self.dice = dice

    def forward(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return the mean loss () of ``logits`` (n, C, h, w) with ``classes`` uint8 (n, h, w).

        Raises:
            ValueError: logits of another form or size.
        """
        return self.value(self.sums(logits, classes), classes.shape[-2] * classes.shape[-1])

    def sums(self, logits: Tensor, classes: Tensor) -> Tensor:
        """Return what a box of the tile adds to the loss: float64 (n, 1) of its pixels' losses, with Dice (n, 1 + 2C),
        overlap and size of each class after that; ``logits`` and ``classes`` are as for ``forward``.

        Raises:
            ValueError: logits of another form or size.
        """
        if not isinstance(logits, Tensor) or logits.dim() != 4 or logits.shape[-2:] != classes.shape[-2:]:
            raise ValueError(
                f"a segmentation model gives logits (n, classes, h, w) of the tile's size {tuple(classes.shape[-2:])}; "
                f"this one gives {_form(logits)}: choose a segmentation --model such as unet, or --task classify"
            )
        logits = _in_full(logits)
        counted = classes != IGNORE
        target = classes.long().masked_fill(~counted, 0)
        of_pixels = (self.of_items(logits, target) * counted).sum((1, 2))[:, None]
        if not self.dice:
            return of_pixels.double()
        probability = logits.softmax(1) * counted[:, None]
        truth = F.one_hot(target, logits.shape[1]).movedim(-1, 1) * counted[:, None]
        overlap = (probability * truth).sum((2, 3))
        size = (probability + truth).sum((2, 3))
        return torch.cat((of_pixels, overlap, size), 1).double()  # many boxes add up

    def value(self, sums: Tensor, pixels: int) -> Tensor:
        """Return the mean loss () of tiles of ``pixels`` px from the ``sums`` of all their boxes."""
        of_pixels, overlap, size = sums.tensor_split((1, 1 + sums.shape[1] // 2), 1)
        loss = of_pixels.mean() / pixels
        if not self.dice:
            return loss
        dice = (2 * overlap + 1) / (size + 1)
        return loss + (1 - dice).mean()


def _form(outputs: object) -> str:
    """Return the shape of a tensor, or the name of the type of anything else."""
    return str(tuple(outputs.shape)) if isinstance(outputs, Tensor) else type(outputs).__name__


def _in_full(logits: Tensor) -> Tensor:
    """``logits`` in float32 at least."""
    return logits if logits.dtype == torch.float64 else logits.float()


def balanced_weights(counts: NDArray[np.int64]) -> Tensor:
    """Return weights (C,) inverse to the class counts; their mean over the counted items is 1. Absent classes weigh
    0."""
    present = counts > 0
    weights = np.where(present, counts.sum() / np.maximum(counts, 1) / present.sum(), 0.0)
    return torch.from_numpy(weights).float()
