"""Norms and other blocks of our own models; layers of any model, their rates, and what is frozen."""

import pytest
import torch
from torch import nn

from models.blocks import SideCheck, conv_norm_relu, group_count, init_convolutions, make_norm
from models.layer_depth import freeze, layer_decay_scales, layers_of
from models.registry import build_model


def test_groups_divide_the_channels_and_are_no_instance_norm():
    for channels in range(1, 300):
        groups = group_count(channels)
        assert channels % groups == 0
        assert groups <= 32
        assert channels == 1 or channels // groups >= 2
    assert [group_count(channels) for channels in (16, 64, 96, 2048, 24, 7)] == [8, 32, 32, 32, 8, 1]


def test_norms_are_what_their_names_say():
    assert isinstance(make_norm("batch", 64), nn.BatchNorm2d)
    assert make_norm("group", 64).num_groups == 32
    assert not list(make_norm("instance", 64).parameters())
    with pytest.raises(ValueError, match="batch, group, instance, frozen, layer; got 'sync'"):
        make_norm("sync", 64)


def test_frozen_norm_keeps_its_statistics_and_trains_its_scale():
    norm, x = make_norm("frozen", 4).train(), torch.rand(2, 4, 5, 5)
    assert not norm.training
    norm.running_mean.fill_(0.5)
    norm(x).sum().backward()
    torch.testing.assert_close(norm(x), (x - 0.5) / (1 + 1e-5) ** 0.5)
    assert norm.weight.grad is not None
    assert norm.num_batches_tracked == 0


def test_layer_norm_looks_at_one_px():
    x = torch.rand(2, 4, 5, 6)
    expected = (x - x.mean(1, keepdim=True)) / (x.var(1, keepdim=True, unbiased=False) + 1e-5).sqrt()
    torch.testing.assert_close(make_norm("layer", 4)(x), expected)


@pytest.mark.parametrize("norm", ["group", "instance", "frozen", "layer"])
def test_a_tile_does_not_see_its_neighbours_in_the_batch(norm):
    torch.manual_seed(0)
    block = conv_norm_relu(3, 8, norm)
    x = torch.rand(3, 3, 9, 7)
    torch.testing.assert_close(block(x)[1:2], block(x[1:2]))


@pytest.mark.parametrize(("mode", "fan"), [("fan_in", 64 * 9), ("fan_out", 128 * 9)])
def test_initial_convolutions_keep_the_variance(mode, fan):
    torch.manual_seed(0)
    conv = nn.Conv2d(64, 128, 3)
    init_convolutions(conv, mode)
    assert conv.weight.std().item() == pytest.approx((2 / fan) ** 0.5, rel=0.02)
    assert not conv.bias.any()


def test_side_check_passes_multiples_and_names_the_next_ones():
    check = SideCheck(16)
    x = torch.rand(1, 3, 32, 48)
    assert check(x) is x
    with pytest.raises(ValueError, match=r"multiples of 16 px .* 4 times; got 48 x 40 px: use --tile 32 or 48"):
        check(torch.rand(1, 3, 40, 48))
    with pytest.raises(ValueError, match="use --tile 16 or 32"):
        check(torch.rand(1, 3, 5, 16))


@pytest.mark.parametrize(
    ("name", "first", "count", "last"),
    [
        ("resnet18", ("conv1.weight", "bn1.weight", "bn1.bias"), 10, ("fc.weight", "fc.bias")),
        ("timm:test_vit", ("cls_token", "pos_embed", "patch_embed.proj.weight"), 8, ("head.weight", "head.bias")),
        ("torchvision:mobilenet_v2", ("features.0.0.weight", "features.0.1.weight"), 20, ("classifier.1.weight",)),
        ("unet:resnet18", ("encoder.conv1.weight", "encoder.bn1.weight"), 15, ("head.weight", "head.bias")),
    ],
)
def test_blocks_are_layers_in_the_order_of_the_model(name, first, count, last):
    with torch.device("meta"):
        model = build_model(name, classes=2)
    layers = layers_of(model)
    assert [name for layer in layers for name in layer] == [name for name, _ in model.named_parameters()]
    assert (layers[0][: len(first)], len(layers), layers[-1][: len(last)]) == (first, count, last)


def test_the_rate_falls_from_layer_to_layer():
    model = build_model("resnet18", classes=2)
    scales = layer_decay_scales(model, 0.5)
    assert scales.keys() == dict(model.named_parameters()).keys()
    assert [scales[name] for name in ("fc.bias", "layer4.1.bn2.bias", "layer4.0.conv1.weight")] == [1.0, 0.5, 0.25]
    assert scales["conv1.weight"] == scales["bn1.bias"] == 0.5**9
    with pytest.raises(ValueError, match=r"--layer-decay 0\.5 .* this model has 1"):
        layer_decay_scales(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), 0.5)


def test_a_parameter_of_two_modules_is_in_the_first_layer():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    assert layers_of(model) == [("0.weight",), ("2.weight", "2.bias")]


def test_frozen_batch_norms_keep_their_statistics_and_others_do_not():
    model = build_model("resnet18", classes=2)
    names = freeze(model, ("trunk",))
    assert [name for name, parameter in model.named_parameters() if parameter.requires_grad] == ["fc.weight", "fc.bias"]
    assert names == [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()(torch.randn(2, 3, 64, 64))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())

    model = build_model("resnet18", classes=2)
    freeze(model, ("conv1", "layer1.0", "layer2.0.bn1.bias"))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    model.train()(torch.randn(2, 3, 64, 64))
    moved = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert not any(key.startswith("layer1.0.") for key in moved)
    assert {"bn1.running_mean", "layer1.1.bn1.running_var", "layer2.0.bn1.running_mean"} <= moved


@pytest.mark.parametrize("head", ["attention", "gem"])
def test_a_pooling_head_is_trained_on_a_frozen_trunk(head):
    """It was frozen at random."""
    model = build_model("resnet18", classes=2, head=head)
    freeze(model, ("trunk",))
    trained = {name.partition(".")[0] for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {"avgpool", "fc"}
    assert all(parameter.requires_grad for parameter in model.avgpool.parameters())


def test_what_cannot_be_frozen_is_named():
    model = build_model("resnet18", classes=2)
    with pytest.raises(ValueError, match=r"--freeze layer5: the model has no parameters there; did you mean .*layer4"):
        freeze(model, ("layer5",))
    with pytest.raises(ValueError, match="leaves no parameter of the model to be trained"):
        freeze(model, ("trunk", "fc"))
