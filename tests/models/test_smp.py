"""``--model smp:NAME(ENCODER)``: networks of segmentation-models-pytorch."""

from __future__ import annotations

import sys

import pytest
import torch

from app.planning.workload import Workload
from app.settings.strategy import StrategySettings
from app.verify import VerifyCommand, verify
from models.registry import build_model


@pytest.mark.parametrize("name", ["Unet(resnet18)", "FPN(efficientnet-b0)", "PAN(tu-regnety_002)"])
def test_a_decoder_over_an_encoder_gives_logits_of_every_pixel(name: str) -> None:
    with torch.device("meta"):
        model = build_model(f"smp:{name}", classes=4, in_channels=5)
    assert model(torch.empty(2, 5, 128, 160, device="meta")).shape == (2, 4, 128, 160)


def test_an_encoder_that_looks_at_numbers_while_it_is_built_can_be_planned() -> None:
    """Without data it cannot be built, which was told as if the decoder did not go with it."""
    assert Workload("smp:Segformer(mit_b0)", 64, 2).build().segmentation_head[0].out_channels == 2


def test_names_that_the_package_keeps_beside_newer_ones_build_without_a_warning() -> None:
    assert build_model("smp:Linknet(timm-tf_efficientnet_lite0)", classes=2).classification_head is None


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Unt(resnet18)", r"smp:Unt\(resnet18\): segmentation-models-pytorch has no decoder 'Unt'; did you mean Unet"),
        ("", "has no decoder ''; known are DPT, DeepLabV3, DeepLabV3Plus, FPN, Linknet, MAnet"),
        ("Unet(resnet18", r"has no decoder 'Unet\(resnet18'"),
        ("Unet", r"smp:Unet names no encoder: write one in parentheses, such as smp:Unet\(resnet34\)"),
        ("Unet()", r"smp:Unet\(\) names no encoder"),
        ("Unet(resnt18)", "has no encoder 'resnt18'; did you mean resnet18.*Encoders of timm are written tu-NAME"),
        ("Unet(tu-resnt18)", "encoder tu-resnt18: resnt18 is not in timm; did you mean resnet18"),
        (
            "DPT(resnet18)",
            r"DPT does not go with the encoder resnet18: ValueError: .*smp:DPT\(tu-vit_tiny_patch16_224\)",
        ),
        pytest.param("PAN(vgg11)", r"vgg11: ValueError: .*choose another, such as smp:PAN\(re", marks=pytest.mark.long),
    ],
)
def test_what_it_has_not_is_named(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(f"smp:{name}", classes=2)


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ValueError, match=r'cannot be imported: .*; install it: pip install "megatile\[smp\]"'):
        build_model("smp:Unet(resnet18)", classes=2)


def test_norm_group_replaces_batch_norm_and_instance_is_refused() -> None:
    model = build_model("smp:Unet(resnet18)", classes=2, norm="group")
    assert not [part for part in model.modules() if isinstance(part, torch.nn.BatchNorm2d)]
    with pytest.raises(ValueError, match="instance is for MegaTile's own models"):
        build_model("smp:Unet(resnet18)", classes=2, norm="instance")


@pytest.mark.long
def test_two_stages_of_it_are_exact() -> None:
    asked = StrategySettings("1f1b", ranks=2, batch=4, microbatches=2)
    result = verify(VerifyCommand(asked, model="smp:Unet(resnet18)", tile=32, steps=1))
    assert result is not None
    assert result.passed, result
