from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from models.losses import IGNORE, PixelClassLoss, TileClassLoss, balanced_weights


@pytest.mark.parametrize("weights", [None, torch.tensor([0.5, 2.0, 1.0])])
@pytest.mark.parametrize("kind", ["tile", "pixel"])
def test_microbatch_losses_weighted_by_size_add_up_to_the_batch(kind: str, weights: torch.Tensor | None) -> None:
    torch.manual_seed(0)
    if kind == "tile":
        loss, logits, target = TileClassLoss(weights), torch.randn(7, 3), torch.randint(0, 3, (7,))
    else:
        loss, logits = PixelClassLoss(weights), torch.randn(7, 3, 6, 5)
        target = torch.randint(0, 3, (7, 6, 5)).to(torch.uint8)
        target[2, :3] = IGNORE
    whole = loss(logits, target)
    parts = sum(loss(logits[a:b], target[a:b]) * (b - a) / 7 for a, b in ((0, 3), (3, 4), (4, 7)))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)


def test_boxes_of_pixels_add_up_to_the_tile() -> None:
    torch.manual_seed(0)
    loss, logits = PixelClassLoss(torch.tensor([0.5, 2.0, 1.0])), torch.randn(2, 3, 6, 5)
    target = torch.randint(0, 3, (2, 6, 5)).to(torch.uint8)
    target[0, :4] = IGNORE
    boxes = [(rows, columns) for rows in (slice(0, 4), slice(4, 6)) for columns in (slice(0, 2), slice(2, 5))]
    sums = torch.stack([loss.sums(logits[:, :, r, c], target[:, r, c]) for r, c in boxes]).sum(0)
    assert loss.value(sums, 30).item() == pytest.approx(loss(logits, target).item(), rel=1e-6)


def test_unweighted_tile_loss_is_cross_entropy() -> None:
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert torch.equal(TileClassLoss()(logits, labels), F.cross_entropy(logits, labels))


def test_ignored_pixels_have_no_gradient() -> None:
    logits = torch.randn(1, 2, 4, 4, requires_grad=True)
    target = torch.zeros(1, 4, 4, dtype=torch.uint8)
    target[0, 1] = IGNORE
    PixelClassLoss()(logits, target).backward()
    assert logits.grad is not None
    assert torch.count_nonzero(logits.grad[0, :, 1]) == 0
    assert torch.count_nonzero(logits.grad[0, :, 0]) > 0


def test_perfect_segmentation_loses_almost_nothing() -> None:
    target = torch.zeros(1, 8, 8, dtype=torch.uint8)
    target[0, :4] = 1
    logits = F.one_hot(target.long(), 2).movedim(-1, 1) * 50.0
    assert PixelClassLoss()(logits, target).item() < 1e-6


def test_models_of_the_other_task_are_named() -> None:
    with pytest.raises(ValueError, match="choose a classification --model"):
        TileClassLoss()(torch.zeros(1, 2, 4, 4), torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="choose a segmentation --model"):
        PixelClassLoss()(torch.zeros(1, 2), torch.zeros(1, 4, 4, dtype=torch.uint8))


def test_balanced_weights_have_mean_one_over_the_items() -> None:
    counts = np.array([30, 10, 0])
    weights = balanced_weights(counts).numpy()
    assert (weights * counts).sum() / counts.sum() == pytest.approx(1)
    assert weights[1] == pytest.approx(3 * weights[0])
    assert weights[2] == 0
