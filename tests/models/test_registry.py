from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torchvision
from torch import nn

import models
from models.blocks import ChannelNorm, FrozenBatchNorm2d
from models.registry import build_model, model_names
from models.resnet_v2 import ResNetV2
from models.unet_gpipe import UNetGPipe
from tests.helpers.lanes import long_where
from tests.helpers.models import parameter_count


def test_models_is_our_package() -> None:
    assert Path(models.__file__).parents[1] == Path(__file__).parents[2]


SMALL = ("resnet18", "resnet50", "resnet20_v2", "unet_w4", "unet(1,8)", "amoebanet(3,16)")
"""Of each kind, and of each kind of block."""


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        *long_where([(name, "batch") for name in model_names()], ("resnet1001_v2", "batch")),
        *itertools.product(SMALL, ("group", "instance", "frozen", "layer")),
    ],
)
def test_every_name_builds_and_every_kind_with_every_norm(name: str, norm: str) -> None:
    with torch.device("meta"):
        model = build_model(name, classes=4, norm=norm, in_channels=5)  # type: ignore[arg-type]
        logits = model.eval()(torch.empty(2, 5, 64, 64))
    assert logits.shape == ((2, 4, 64, 64) if name.startswith("unet") else (2, 4))
    kinds = {type(module) for module in model.modules()}
    wanted = {
        "batch": nn.BatchNorm2d,
        "group": nn.GroupNorm,
        "instance": nn.InstanceNorm2d,
        "frozen": FrozenBatchNorm2d,
        "layer": ChannelNorm,
    }
    assert kinds & set(wanted.values()) == {wanted[norm]}


@pytest.mark.parametrize("name", ["resnet18", "resnet20_v2", "unet_w8", "amoebanet(3,16)"])
def test_group_norm_makes_a_tile_independent_of_its_batch(name: str) -> None:
    torch.manual_seed(0)
    model = build_model(name, classes=2, norm="group").double()
    x = torch.rand(2, 3, 32, 32, dtype=torch.float64)
    torch.testing.assert_close(model(x)[:1], model(x[:1]))
    assert not list(model.buffers())


def test_numbers_in_names_reach_the_model() -> None:
    with torch.device("meta"):
        assert len(build_model("resnet29_v2", classes=2).layers) == 9
        assert build_model("unet_w24", classes=2).head.in_channels == 24
        model = build_model("unet(3, 8)", classes=2)
        spelled = UNetGPipe(3, 8, classes=2, norm="batch")
    assert parameter_count(model) == parameter_count(spelled)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("resnet50v2", "unknown model 'resnet50v2'; did you mean resnet50"),
        ("nothing", "known are resnet18, .*torchvision:NAME, timm:NAME, package.module:factory"),
        ("resnet51", "got 51"),
        ("resnet111_v2", "the nearest are 110 and 119"),
        ("torchvision:resnt50", "not in torchvision; did you mean resnet50"),
        ("torchvision:", "not in torchvision; known are alexnet, .* more"),
        ("torchvision:fasterrcnn_resnet50_fpn", "neither a classifier nor a segmenter"),
        ("timm:resnt18", "not in timm; did you mean resnet18"),
    ],
)
def test_unknown_names_are_refused_with_close_ones(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, classes=2)


def test_a_model_without_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one class; got classes 0"):
        build_model("resnet18", classes=0)


def test_seed_decides_the_weights() -> None:
    def build() -> ResNetV2:
        torch.manual_seed(3)
        model = build_model("resnet20_v2", classes=2)
        assert isinstance(model, ResNetV2)
        return model

    torch.testing.assert_close(build().state_dict(), build().state_dict(), rtol=0, atol=0)


def test_ours_and_torchvisions_resnet_agree_in_shape() -> None:
    with torch.device("meta"):
        ours, theirs = build_model("resnet34", classes=7), build_model("torchvision:resnet34", classes=7)
    assert isinstance(theirs, torchvision.models.ResNet)
    assert [p.shape for p in ours.parameters()] == [p.shape for p in theirs.parameters()]
