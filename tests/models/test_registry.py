"""Every name that ``--model`` takes: builds with every norm, has the published size, gives logits of any tile."""

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

import models
from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, verify
from models.blocks import ChannelNorm, FrozenBatchNorm2d
from models.registry import build_model, model_names
from tests.helpers.lanes import long_where

NORMS = {
    "batch": nn.BatchNorm2d,
    "group": nn.GroupNorm,
    "instance": nn.InstanceNorm2d,
    "frozen": FrozenBatchNorm2d,
    "layer": ChannelNorm,
}
SMALL = ("resnet18", "resnet50", "resnet20_v2", "unet_w4", "unet(1,8)", "amoebanet(3,16)")
"""Of each kind, and of each kind of block."""


@pytest.mark.parametrize(
    ("name", "norm"),
    [
        *long_where([(name, "batch") for name in model_names()], ("resnet1001_v2", "batch")),
        *itertools.product(SMALL, [norm for norm in NORMS if norm != "batch"]),
    ],
)
def test_every_name_builds_and_every_kind_with_every_norm(name, norm):
    assert Path(models.__file__).parents[1] == Path(__file__).parents[2]
    with torch.device("meta"):
        model = build_model(name, classes=4, norm=norm)
        if name in SMALL:
            logits = model.eval()(torch.empty(2, 3, 64, 64))
            assert logits.shape == ((2, 4, 64, 64) if name.startswith("unet") else (2, 4))
    assert {type(module) for module in model.modules()} & set(NORMS.values()) == {NORMS[norm]}


@pytest.mark.parametrize(
    ("name", "classes", "published"),
    long_where(
        [
            ("resnet18", 1000, "11.689512M"),  # torchvision's documentation, "Num params" of each ResNet
            ("resnet34", 1000, "21.797672M"),
            ("resnet50", 1000, "25.557032M"),
            ("resnet101", 1000, "44.549160M"),
            ("resnet152", 1000, "60.192808M"),
            ("resnet20_v2", 10, "0.570602M"),  # the Keras example, trainable parameters
            ("resnet56_v2", 10, "1.663338M"),
            ("resnet110_v2", 10, "3.302442M"),  # 3.30M and 30.35M of GEMS
            ("resnet1001_v2", 10, "30.347658M"),
            ("amoebanet(18,208)", 1000, "81.5M"),  # torchgpipe's memory benchmark
            ("amoebanet(18,416)", 1000, "319.0M"),
            ("amoebanet(36,544)", 1000, "1.06B"),
            ("unet(6,72)", 1, "362.2M"),
            ("unet(11,128)", 1, "2.21B"),
            ("unet(24,128)", 1, "4.99B"),
            ("unet(24,160)", 1, "7.80B"),
            ("unet(48,160)", 1, "15.82B"),
        ],
        ("resnet1001_v2", 10, "30.347658M"),
        ("amoebanet(36,544)", 1000, "1.06B"),
    ),
)
def test_parameter_counts_are_the_published_ones(name, classes, published):
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in build_model(name, classes=classes).parameters())
    digits, unit = len(published.partition(".")[2]) - 1, {"M": 1e6, "B": 1e9}[published[-1]]
    assert f"{count / unit:.{digits}f}{published[-1]}" == published


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("resnet18", [(33, 33), (64, 100), (129, 65)]),
        ("resnet20_v2", [(8, 8), (17, 30), (33, 21)]),
        ("amoebanet(3,8)", [(1, 1), (33, 47), (64, 100), (129, 65)]),
        ("unet_w4", [(16, 16), (32, 48), (80, 16)]),
        ("unet(1,4)", [(64, 64), (96, 64)]),
    ],
)
def test_tiles_of_any_size_have_logits(name, sizes):
    model = build_model(name, classes=3).eval()
    for size in sizes:
        assert model(torch.rand(2, 3, *size)).shape == ((2, 3, *size) if name.startswith("unet") else (2, 3))


def test_numbers_in_names_reach_the_model():
    with torch.device("meta"):
        assert len(build_model("resnet29_v2", classes=2).layers) == 9
        assert build_model("unet_w24", classes=2).head.in_channels == 24
        convolutions = [m for m in build_model("unet(3, 8)", classes=2).modules() if isinstance(m, nn.Conv2d)]
        assert len(convolutions) == 11 * 3 + 1, "eleven cells of 3 and the head"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("resnet50v2", "unknown model 'resnet50v2'; did you mean resnet50"),
        ("nothing", "known are resnet18, .*torchvision:NAME, timm:NAME, package.module:factory"),
        ("resnet51", "18, 34, 50, 101, 152; got 51"),
        ("resnet111_v2", r"9n\+2.*got 111: the nearest are 110 and 119"),
        ("resnet2_v2", "the nearest are 11 and 20"),
        ("resnet0_v2", "the nearest are 11 and 20"),
        ("amoebanet(0,64)", "multiple of 3.*got L 0, D 64: use L [36], D"),
        ("amoebanet(4,64)", "multiple of 3.*got L 4, D 64: use L [36], D"),
        ("amoebanet(6,7)", "multiple of 3.*got L 6, D 7: use L [36], D"),
        ("unet(0,64)", "C even, at least 2; got B 0, C 64"),
        ("unet(5,63)", "C even, at least 2; got B 5, C 63"),
        ("unet(5,0)", "C even, at least 2; got B 5, C 0"),
        ("torchvision:resnt50", "not in torchvision; did you mean resnet50"),
        ("torchvision:", "not in torchvision; known are alexnet, .* more"),
        ("torchvision:fasterrcnn_resnet50_fpn", "neither a classifier nor a segmenter"),
        ("timm:resnt18", "not in timm; did you mean resnet18"),
    ],
)
def test_unknown_names_and_sizes_are_refused_with_close_ones(name, words):
    with pytest.raises(ValueError, match=words):
        build_model(name, classes=2)


def test_a_model_without_classes_is_refused():
    with pytest.raises(ValueError, match="at least one class; got classes 0"):
        build_model("resnet18", classes=0)


@pytest.mark.long
@pytest.mark.parametrize(("model", "tile"), [("amoebanet(3,16)", 64), ("smp:Unet(resnet18)", 32)])
def test_two_stages_are_exact(model, tile):
    asked = StrategySettings("1f1b", ranks=2, batch=4, microbatches=2)
    result = verify(VerifyCommand(asked, model=model, tile=tile, steps=1))
    assert result["passed"], result
