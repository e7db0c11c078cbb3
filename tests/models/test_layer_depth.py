from __future__ import annotations

import pytest
import torch
from torch import nn

from models.layer_depth import freeze, layer_decay_scales, layers_of
from models.registry import build_model


@pytest.mark.parametrize(
    ("name", "first", "count", "last"),
    [
        ("resnet18", ("conv1.weight", "bn1.weight", "bn1.bias"), 10, ("fc.weight", "fc.bias")),
        ("timm:test_vit", ("cls_token", "pos_embed", "patch_embed.proj.weight"), 8, ("head.weight", "head.bias")),
        ("torchvision:mobilenet_v2", ("features.0.0.weight", "features.0.1.weight"), 20, ("classifier.1.weight",)),
        ("unet:resnet18", ("encoder.conv1.weight", "encoder.bn1.weight"), 15, ("head.weight", "head.bias")),
    ],
)
def test_blocks_are_layers_in_the_order_of_the_model(
    name: str, first: tuple[str, ...], count: int, last: tuple[str, ...]
) -> None:
    with torch.device("meta"):
        model = build_model(name, classes=2)
    layers = layers_of(model)
    assert [name for layer in layers for name in layer] == [name for name, _ in model.named_parameters()]
    assert (layers[0][: len(first)], len(layers), layers[-1][: len(last)]) == (first, count, last)


def test_the_rate_falls_from_layer_to_layer() -> None:
    model = build_model("resnet18", classes=2)
    scales = layer_decay_scales(model, 0.5)
    assert scales.keys() == dict(model.named_parameters()).keys()
    assert [scales[name] for name in ("fc.bias", "layer4.1.bn2.bias", "layer4.0.conv1.weight")] == [1.0, 0.5, 0.25]
    assert scales["conv1.weight"] == scales["bn1.bias"] == 0.5**9
    with pytest.raises(ValueError, match=r"--layer-decay 0\.5 .* this model has 1"):
        layer_decay_scales(nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)), 0.5)


def test_a_parameter_of_two_modules_is_in_the_first_layer() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2))
    model[1].weight = model[0].weight
    assert layers_of(model) == [("0.weight",), ("2.weight", "2.bias")]


def test_frozen_batch_norms_keep_their_statistics_and_others_do_not() -> None:
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


def test_what_cannot_be_frozen_is_named() -> None:
    model = build_model("resnet18", classes=2)
    with pytest.raises(ValueError, match=r"--freeze layer5: the model has no parameters there; did you mean .*layer4"):
        freeze(model, ("layer5",))
    with pytest.raises(ValueError, match="leaves no parameter of the model to be trained"):
        freeze(model, ("trunk", "fc"))
