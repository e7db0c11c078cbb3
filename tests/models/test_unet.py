from __future__ import annotations

import pytest
import torch
import torch.fx
from torch import nn

from models.registry import build_model
from models.unet import EncoderUNet, UNet, build_encoder_unet


def test_has_the_papers_23_convolutional_layers_and_widths() -> None:
    """Ronneberger et al. 2015, section 2: "In total the network has 23 convolutional layers"."""
    with torch.device("meta"):
        model = UNet(classes=2)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convs) == 23
    assert max(conv.out_channels for conv in convs) == 1024


@pytest.mark.parametrize("size", [(16, 16), (32, 48), (80, 16)])
def test_every_pixel_gets_logits(size: tuple[int, int]) -> None:
    assert UNet(classes=3, base=4)(torch.rand(2, 3, *size)).shape == (2, 3, *size)


def test_depth_sets_the_multiple_of_the_sides() -> None:
    model = UNet(classes=2, base=2, depth=2)
    assert model(torch.rand(1, 3, 20, 12)).shape == (1, 2, 20, 12)
    with pytest.raises(ValueError, match=r"multiples of 4 px .* 2 times; got 18 x 20 px"):
        model(torch.rand(1, 3, 20, 18))


def test_skips_carry_full_resolution_to_the_output() -> None:
    """With the way through the depth cut, the logits still follow the input px by px."""
    torch.manual_seed(0)
    model = UNet(classes=1, base=4, norm="group")
    nn.init.zeros_(model.decoder[-1].up.weight)
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    model(x)[0, 0, 16, 16].backward()
    assert x.grad is not None
    assert x.grad[0, :, 16, 16].abs().sum() > 0


def test_symbolic_trace_computes_the_same_and_keeps_the_check() -> None:
    model = UNet(classes=2, base=4).eval()
    traced = torch.fx.symbolic_trace(model)
    x = torch.rand(1, 3, 32, 16)
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(ValueError, match="got 20 x 16 px"):
        traced(torch.rand(1, 3, 16, 20))


@pytest.mark.parametrize(("base", "depth"), [(0, 4), (8, 0)])
def test_empty_networks_are_refused(base: int, depth: int) -> None:
    with pytest.raises(ValueError, match=f"at least 1; got base {base}, depth {depth}"):
        UNet(classes=2, base=base, depth=depth)


def test_first_logits_are_of_order_one() -> None:
    """With fan-out initialisation those of two classes had a standard deviation of 8, and the loss started at 7."""
    torch.manual_seed(0)
    logits = UNet(classes=2)(torch.rand(1, 3, 32, 32))
    assert 0.3 < logits.std().item() < 3


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
