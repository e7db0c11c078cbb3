import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torchvision
from monai.losses import DiceCELoss, FocalLoss

from models.losses import IGNORE, ClassLoss, PixelClassLoss, TileClassLoss, balanced_weights

WEIGHTS = torch.tensor([0.5, 2.0, 1.0])
TILE_LOSSES = (TileClassLoss(), TileClassLoss(WEIGHTS, label_smoothing=0.1), TileClassLoss(WEIGHTS, gamma=2.0))
PIXEL_LOSSES = (
    PixelClassLoss(),
    PixelClassLoss(WEIGHTS, label_smoothing=0.1),
    PixelClassLoss(WEIGHTS, dice=False, gamma=2.0),
)


@pytest.mark.parametrize("loss", [*TILE_LOSSES, *PIXEL_LOSSES])
def test_microbatch_losses_weighted_by_size_add_up_to_the_batch(loss):
    torch.manual_seed(0)
    if isinstance(loss, TileClassLoss):
        logits, target = torch.randn(7, 3), torch.randint(0, 3, (7,))
    else:
        logits = torch.randn(7, 3, 6, 5)
        target = torch.randint(0, 3, (7, 6, 5)).to(torch.uint8)
        target[2, :3] = IGNORE
    whole = loss(logits, target)
    parts = sum(loss(logits[a:b], target[a:b]) * (b - a) / 7 for a, b in ((0, 3), (3, 4), (4, 7)))
    assert parts.item() == pytest.approx(whole.item(), rel=1e-6)


@pytest.mark.parametrize("loss", PIXEL_LOSSES)
def test_boxes_of_pixels_add_up_to_the_tile(loss):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6, 5)
    target = torch.randint(0, 3, (2, 6, 5)).to(torch.uint8)
    target[0, :4] = IGNORE
    boxes = [(rows, columns) for rows in (slice(0, 4), slice(4, 6)) for columns in (slice(0, 2), slice(2, 5))]
    sums = torch.stack([loss.sums(logits[:, :, r, c], target[:, r, c]) for r, c in boxes]).sum(0)
    assert loss.value(sums, 30).item() == pytest.approx(loss(logits, target).item(), rel=1e-6)


def test_unweighted_tile_loss_is_cross_entropy():
    logits, labels = torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
    assert torch.equal(TileClassLoss()(logits, labels), F.cross_entropy(logits, labels))


def test_ignored_pixels_have_no_gradient_and_a_perfect_segmentation_almost_no_loss():
    logits, target = torch.randn(1, 2, 4, 4, requires_grad=True), torch.zeros(1, 4, 4, dtype=torch.uint8)
    target[0, 1] = IGNORE
    PixelClassLoss()(logits, target).backward()
    assert torch.count_nonzero(logits.grad[0, :, 1]) == 0
    assert torch.count_nonzero(logits.grad[0, :, 0]) > 0
    target = torch.zeros(1, 8, 8, dtype=torch.uint8)
    target[0, :4] = 1
    assert PixelClassLoss()(F.one_hot(target.long(), 2).movedim(-1, 1) * 50.0, target).item() < 1e-6


def test_models_of_the_other_task_are_named():
    for logits, form in ((torch.zeros(1, 2, 4, 4), r"\(1, 2, 4, 4\)"), ({"logits": torch.zeros(1, 2)}, "dict")):
        with pytest.raises(ValueError, match=f"this model gives {form}: choose a classification --model"):
            TileClassLoss()(logits, torch.zeros(1, dtype=torch.long))
    with pytest.raises(ValueError, match="choose a segmentation --model"):
        PixelClassLoss()(torch.zeros(1, 2), torch.zeros(1, 4, 4, dtype=torch.uint8))


def test_balanced_weights_have_mean_one_over_the_items():
    counts = np.array([30, 10, 0])
    weights = balanced_weights(counts).numpy()
    assert (weights * counts).sum() / counts.sum() == pytest.approx(1)
    assert weights[1:] == pytest.approx([3 * weights[0], 0])


def of_pixels(classes=3):
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(4, classes, 6, 5, generator=generator, dtype=torch.float64)
    return logits.requires_grad_(), torch.randint(0, classes, (4, 6, 5), generator=generator, dtype=torch.uint8)


def assert_alike(ours, theirs, logits, tolerance=1e-12):
    """The same value and gradient."""
    expected, found = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (theirs, ours))
    assert ours.item() == pytest.approx(theirs.item(), rel=tolerance)
    assert torch.allclose(found, expected, rtol=0, atol=tolerance * float(expected.abs().max()))


def test_dice_and_cross_entropy_are_those_of_monai():
    logits, target = of_pixels()
    theirs = DiceCELoss(softmax=True, to_onehot_y=True, smooth_nr=1.0, smooth_dr=1.0)(logits, target[:, None].long())
    assert_alike(PixelClassLoss()(logits, target), theirs, logits)


@pytest.mark.parametrize("gamma", [1.0, 2.0, 3.5])
def test_focal_loss_is_that_of_monai(gamma):
    """MONAI computes it in float32."""
    logits, target = of_pixels()
    monai = FocalLoss(gamma=gamma, use_softmax=True, to_onehot_y=True, reduction="none")
    theirs = monai(logits, target[:, None].long()).sum(1).mean()
    assert_alike(PixelClassLoss(dice=False, gamma=gamma)(logits, target), theirs, logits, 1e-6)


def test_focal_loss_of_two_classes_is_torchvisions_of_their_difference():
    logits, labels = (3 * torch.randn(9, 2, dtype=torch.float64)).requires_grad_(), torch.arange(9) % 2
    difference = logits[:, 1] - logits[:, 0]
    theirs = torchvision.ops.sigmoid_focal_loss(difference, labels.double(), alpha=-1, gamma=2.0, reduction="mean")
    assert_alike(TileClassLoss(gamma=2.0)(logits, labels), theirs, logits)
    weights = torch.tensor([0.5, 2.0])
    weighted = torchvision.ops.sigmoid_focal_loss(difference, labels.double(), alpha=-1, gamma=2.0)
    assert_alike(TileClassLoss(weights, gamma=2.0)(logits, labels), (weighted * weights[labels]).mean(), logits)


def test_smoothed_labels_are_torchs_and_leave_ignored_pixels_out():
    logits, target = of_pixels()
    target[0, :2] = IGNORE
    options = {"weight": WEIGHTS.double(), "reduction": "sum", "label_smoothing": 0.2, "ignore_index": IGNORE}
    theirs = F.cross_entropy(logits, target.long(), **options) / target.numel()
    assert_alike(PixelClassLoss(WEIGHTS, dice=False, label_smoothing=0.2)(logits, target), theirs, logits)


def test_a_certain_item_has_a_gradient_in_its_focal_loss():
    logits = torch.tensor([[60.0, -60.0], [-60.0, 60.0]], requires_grad=True)
    TileClassLoss(gamma=1.0)(logits, torch.tensor([0, 0])).backward()
    assert logits.grad.tolist() == [[0.0, 0.0], [-0.5, 0.5]]
    with pytest.raises(ValueError, match=r"label_smoothing 0\.1: leave it 0"):
        ClassLoss(label_smoothing=0.1, gamma=2.0)
