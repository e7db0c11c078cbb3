from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from models.registry import build_model
from models.unet import EncoderUNet, build_encoder_unet


@pytest.mark.parametrize(
    ("encoder", "side"),
    [("resnet18", 64), ("vgg11_bn", 40), ("convnext_pico", 64), ("inception_v3", 100)],
    ids=lambda value: str(value),
)
def test_every_pixel_gets_logits_whatever_the_encoder_gives(encoder: str, side: int) -> None:
    """Features from the full size on (VGG), from 1/2, from 1/4 (ConvNeXt), and of odd sizes (Inception)."""
    with torch.device("meta"):
        model = build_model(f"unet:{encoder}", classes=4, in_channels=5)
        assert model(torch.empty(2, 5, side, side + 32)).shape == (2, 4, side, side + 32)


def test_features_with_channels_last_are_turned() -> None:
    with torch.device("meta"):
        model = build_encoder_unet("swin_tiny_patch4_window7_224", classes=2)
        assert model.channels_last
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 2, 224, 224)


def test_each_skip_is_joined_once_deepest_first() -> None:
    with torch.device("meta"):
        graph = torch.fx.symbolic_trace(build_encoder_unet("resnet18", classes=2)).graph
    skips = [node.args[0][1] for node in graph.nodes if node.target is torch.cat]
    assert [skip.name for skip in skips] == [
        "encoder_layer3_1_act2", "encoder_layer2_1_act2", "encoder_layer1_1_act2", "encoder_act1"
    ]  # fmt: skip


def test_the_size_is_taken_before_the_encoder_runs() -> None:
    """Asked for where it is used, it would make the last stage be sent the images."""
    with torch.device("meta"):
        nodes = list(torch.fx.symbolic_trace(build_encoder_unet("resnet18", classes=2)).graph.nodes)
    images = nodes[0]
    first_module = next(k for k, node in enumerate(nodes) if node.op == "call_module")
    assert max(nodes.index(user) for user in images.users) == first_module


def test_symbolic_trace_computes_the_same_for_other_sizes() -> None:
    model = build_encoder_unet("resnet18", classes=2).eval()
    traced = torch.fx.symbolic_trace(model)
    for size in ((64, 32), (48, 80)):
        x = torch.rand(1, 3, *size)
        torch.testing.assert_close(traced(x), model(x))


def test_the_first_skip_carries_detail_to_the_output() -> None:
    """With the way through the depth cut, the logits still follow the features that are largest."""
    torch.manual_seed(0)
    encoder = nn.Module()
    encoder.forward = lambda x: [x, nn.functional.avg_pool2d(x, 2)]  # type: ignore[method-assign]
    model = EncoderUNet(encoder, [3, 3], 1, classes=1, norm="group")
    with torch.no_grad():
        model.decoder[0].convs[0][0].weight[:, :3] = 0
    x = torch.rand(1, 3, 16, 16, requires_grad=True)
    model(x)[0, 0, 8, 8].backward()
    assert x.grad is not None
    assert x.grad[0, :, 8, 8].abs().sum() > 0


def test_group_norm_reaches_encoder_and_decoder() -> None:
    with torch.device("meta"):
        model = build_model("unet:resnet18", classes=2, norm="group")
    assert not [module for module in model.modules() if isinstance(module, nn.BatchNorm2d)]


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("resnt18", "resnt18 is not in timm; did you mean resnet18"),
        ("vit_tiny_patch16_224", "several sizes, and those of vit_tiny_patch16_224 are all 1/16 of the tile: choose"),
        ("xception41", "timm takes those of xception41 out through hooks"),
    ],
)
def test_encoders_that_cannot_be_used_say_why(encoder: str, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_model(f"unet:{encoder}", classes=2)
