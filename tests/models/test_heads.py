"""Pooling heads: what they compute, where they go, what they refuse, and which weights load into them."""

import copy
import math

import pytest
import torch
from torch import nn

from benchmarks.in_boxes import planned_regions, streamed
from models.heads import HIDDEN, LARGEST_BOUND, AttentionPool, GeneralisedMean
from models.registry import build_model
from models.weights import load_weights, read_weights
from parallel.team.boxed_nodes import PlannedRegion

POOLED = ("avgpool.pool.value.weight", "avgpool.pool.gate.weight", "avgpool.pool.score.weight")


def test_attention_is_the_softmax_of_gated_scores():
    torch.manual_seed(0)
    pool, x = AttentionPool(5).double(), torch.randn(2, 5, 3, 4, dtype=torch.float64)
    rows = x.flatten(2).transpose(1, 2)
    value, gate, score = (part.weight.flatten(1) for part in (pool.value, pool.gate, pool.score))
    weights = torch.softmax(torch.tanh(rows @ value.T) * torch.sigmoid(rows @ gate.T) @ score.T, 1)
    torch.testing.assert_close(pool(x).flatten(1), (rows * weights).sum(1), rtol=1e-13, atol=1e-14)


def test_scores_up_to_the_bound_keep_their_digits_and_beyond_it_nothing_is_a_number():
    """Every score as low as it can be: the weights are exp(-2 x bound), all alike."""
    pool, x = AttentionPool(1), torch.full((1, 1, 4, 4), 1e4)
    x[0, 0, 0, 0] = 1e4 + 512
    for part, each in ((pool.value, -1.0), (pool.gate, 1.0), (pool.score, LARGEST_BOUND / HIDDEN)):
        nn.init.constant_(part.weight, each)
    assert float(pool.score.weight.detach().abs().sum()) == LARGEST_BOUND
    torch.testing.assert_close(pool(x).flatten(), torch.tensor([1e4 + 32]))
    nn.init.constant_(pool.score.weight, 1.001 * LARGEST_BOUND / HIDDEN)
    assert math.isnan(pool(x).detach())


def test_generalised_mean_begins_as_a_cubic_mean_and_ends_as_an_average_or_a_maximum():
    pool, x = GeneralisedMean().double(), torch.rand(2, 3, 5, 4, dtype=torch.float64) + 0.1
    torch.testing.assert_close(pool(x), x.pow(3).mean((2, 3), keepdim=True).pow(1 / 3))
    for power, expected in ((1.0, x.mean((2, 3), keepdim=True)), (2000.0, x.amax((2, 3), keepdim=True))):
        nn.init.constant_(pool.power, power)
        torch.testing.assert_close(pool(x), expected, rtol=2e-3, atol=0)


@pytest.mark.parametrize(
    ("name", "head", "size", "box"),
    [("resnet20_v2", "gem", (37, 50), 24), ("timm:resnet10t", "attention", (67, 90), 40)],
)
def test_heads_in_boxes_are_exact(name, head, size, box):
    torch.manual_seed(0)
    plain = build_model(name, classes=3, norm="frozen", head=head).double().train()
    images = torch.randn(1, 3, *size, dtype=torch.float64)
    expected, gradients = _step(plain, images)
    assert all(bool(gradient.any()) for key, gradient in gradients.items() if "pool" in key)
    ours = streamed(copy.deepcopy(plain), box, tuple(images.shape))
    (plan,) = planned_regions(ours, tuple(images.shape))
    assert isinstance(plan, PlannedRegion)
    assert plan.run.region.ends_at is None  # the head is within the region
    found, ours_gradients = _step(ours, images)
    torch.testing.assert_close(found, expected, rtol=1e-11, atol=1e-12)
    for key, gradient in gradients.items():
        assert float((ours_gradients[key] - gradient).abs().max()) <= 1e-10 * float(gradient.abs().max()), key


def _step(model, images):
    model.zero_grad()
    output = model(images)
    output.square().sum().backward()
    return output.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def test_a_map_with_channels_last_is_pooled_too():
    """Also of tiles of another size than the library's: a tile of 224 px was refused by the model for 448 px."""
    model = build_model("timm:swin_tiny_patch4_window7_224", classes=2, head="attention", side=448).eval()
    with torch.no_grad():
        assert model(torch.randn(1, 3, 448, 448)).shape == (1, 2)


@pytest.mark.parametrize("name", ["unet_w4", "torchvision:densenet121", "timm:vit_tiny_patch16_224"])
def test_models_without_a_global_pool_are_refused_by_name(name):
    with torch.device("meta"), pytest.raises(ValueError, match=f"--head gem cannot be had for model {name}: it has no"):
        build_model(name, classes=2, head="gem")


def test_weights_of_another_head_load_but_for_the_pooling(tmp_path):
    torch.manual_seed(1)
    average, attention = (build_model("resnet18", classes=2, head=head) for head in ("average", "attention"))
    torch.save(average.state_dict(), tmp_path / "average.pt")
    torch.save(attention.state_dict(), tmp_path / "attention.pt")

    def left(head, path):
        model = build_model("resnet18", classes=2, head=head)
        return model, load_weights(model, read_weights(tmp_path / path)).left

    assert left("attention", "average.pt")[1] == tuple(f"{key} (--head, not in the file)" for key in POOLED)
    loaded, others = left("average", "attention.pt")
    assert others == tuple(f"{key} (another --head, not in the model)" for key in POOLED)
    assert torch.equal(loaded.conv1.weight, attention.conv1.weight)
    gem = left("gem", "attention.pt")[1]
    assert [line.split()[0] for line in gem] == ["avgpool.pool.power", *POOLED]
