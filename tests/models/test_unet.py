"""U-Nets of the paper, of torchgpipe and over encoders of timm: skips, sizes, traces."""

import pytest
import torch
import torch.fx
from torch import nn

from models.registry import build_model
from models.unet import EncoderUNet, UNet, build_encoder_unet


def test_has_the_papers_23_convolutional_layers_and_widths():
    """Ronneberger et al. 2015, section 2: "In total the network has 23 convolutional layers"."""
    with torch.device("meta"):
        model = UNet(classes=2)
    convs = [module for module in model.modules() if isinstance(module, nn.Conv2d | nn.ConvTranspose2d)]
    assert len(convs) == 23
    assert max(conv.out_channels for conv in convs) == 1024


def test_depth_sets_the_multiple_of_the_sides_and_empty_networks_are_refused():
    model = UNet(classes=2, base=2, depth=2)
    assert model(torch.rand(1, 3, 20, 12)).shape == (1, 2, 20, 12)
    with pytest.raises(ValueError, match=r"multiples of 4 px .* 2 times; got 18 x 20 px"):
        model(torch.rand(1, 3, 20, 18))
    for base, depth in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match=f"at least 1; got base {base}, depth {depth}"):
            UNet(classes=2, base=base, depth=depth)


@pytest.mark.parametrize("encoder", [False, True])
def test_skips_carry_full_resolution_to_the_output(encoder):
    """With the way through the depth cut, the logits still follow the input, or the largest features, px by px."""
    torch.manual_seed(0)
    if encoder:
        features = nn.Module()
        features.forward = lambda x: [x, nn.functional.avg_pool2d(x, 2)]
        model = EncoderUNet(features, [3, 3], 1, classes=1, norm="group")
        nn.init.zeros_(model.decoder[0].convs[0][0].weight[:, :3].detach())
    else:
        model = UNet(classes=1, base=4, norm="group")
        nn.init.zeros_(model.decoder[-1].up.weight)
    x = torch.rand(1, 3, 32, 32, requires_grad=True)
    model(x)[0, 0, 16, 16].backward()
    assert x.grad[0, :, 16, 16].abs().sum() > 0


@pytest.mark.parametrize(
    ("name", "norm", "sizes", "wrong"),
    [
        ("unet_w4", "batch", [(32, 16)], (16, 20)),
        *(("unet(2,4)", norm, [(64, 96)], (64, 80)) for norm in ("batch", "group", "instance")),
        ("unet:resnet18", "batch", [(64, 32), (48, 80)], None),
    ],
)
def test_symbolic_trace_computes_the_same_and_keeps_the_check(name, norm, sizes, wrong):
    model = build_model(name, classes=2, norm=norm).eval()
    traced = torch.fx.symbolic_trace(model)
    for size in sizes:
        x = torch.rand(1, 3, *size)
        torch.testing.assert_close(traced(x), model(x))
    if wrong:
        with pytest.raises(ValueError, match="multiples of"):
            traced(torch.rand(1, 3, *wrong))


def test_first_logits_are_of_order_one():
    """With fan-out initialisation those of two classes had a standard deviation of 8, and the loss started at 7."""
    torch.manual_seed(0)
    logits = UNet(classes=2)(torch.rand(1, 3, 32, 32))
    assert 0.3 < logits.std().item() < 3


@pytest.mark.parametrize(
    ("encoder", "side"),
    [("resnet18", 64), ("vgg11_bn", 40), ("convnext_pico", 64), ("inception_v3", 100)],
    ids=lambda value: str(value),
)
def test_every_pixel_gets_logits_whatever_the_encoder_gives(encoder, side):
    """Features from the full size on (VGG), from 1/2, from 1/4 (ConvNeXt), and of odd sizes (Inception)."""
    with torch.device("meta"):
        model = build_model(f"unet:{encoder}", classes=4)
        assert model(torch.empty(2, 3, side, side + 32)).shape == (2, 4, side, side + 32)


def test_features_with_channels_last_are_turned():
    with torch.device("meta"):
        model = build_encoder_unet("swin_tiny_patch4_window7_224", classes=2)
        assert model.channels_last
        assert model(torch.empty(1, 3, 224, 224)).shape == (1, 2, 224, 224)


@pytest.mark.parametrize(
    ("name", "skips"),
    [
        ("unet:resnet18", [f"encoder_{part}" for part in ("layer3_1_act2", "layer2_1_act2", "layer1_1_act2", "act1")]),
        ("unet(1,4)", [f"encoder_{k}" for k in (4, 3, 2, 1, 0)]),
    ],
)
def test_each_skip_is_joined_once_deepest_first(name, skips):
    with torch.device("meta"):
        graph = torch.fx.symbolic_trace(build_model(name, classes=2)).graph
    joined = [str(node.args[0][1]) for node in graph.nodes if node.target is torch.cat]
    assert len(joined) == len(skips)
    assert all(found.startswith(skip) for found, skip in zip(joined, skips, strict=True))


def test_the_size_is_taken_before_the_encoder_runs():
    """Asked for where it is used, it would make the last stage be sent the images."""
    with torch.device("meta"):
        nodes = list(torch.fx.symbolic_trace(build_encoder_unet("resnet18", classes=2)).graph.nodes)
    images = nodes[0]
    first_module = next(k for k, node in enumerate(nodes) if node.op == "call_module")
    assert max(nodes.index(user) for user in images.users) == first_module


@pytest.mark.parametrize(
    ("encoder", "message"),
    [
        ("resnt18", "resnt18 is not in timm; did you mean resnet18"),
        ("vit_tiny_patch16_224", "several sizes, and those of vit_tiny_patch16_224 are all 1/16 of the tile: choose"),
        ("xception41", "timm takes those of xception41 out through hooks"),
    ],
)
def test_encoders_that_cannot_be_used_say_why(encoder, message):
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_model(f"unet:{encoder}", classes=2)
