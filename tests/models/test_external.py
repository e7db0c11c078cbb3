from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.fx
import torchvision
from torch import nn

from models.external import replace_norm
from models.registry import build_model

FACTORIES = """
import torch
from torch import nn

width = 3

class Net(nn.Sequential):
    def __init__(self, classes: int = 2) -> None:
        super().__init__(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, classes))

def small(*, classes):
    return Net(classes)

def number(classes):
    return classes

def other_signature(n_classes):
    return Net(n_classes)

def breaks(classes):
    raise KeyError("inside the factory")
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "users_models.py").write_text(FACTORIES)
    (tmp_path / "users_broken.py").write_text("import surely_not_installed\n")
    (tmp_path / "users_typo.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("users_models", "users_broken", "users_typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize("name", ["users_models:small", "users_models:Net"])
def test_a_factory_or_a_class_of_the_user_builds(name: str) -> None:
    assert build_model(name, classes=5)(torch.rand(2, 3, 8, 9)).shape == (2, 5)


@pytest.mark.usefixtures("factories")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("users_nowhere:f", "module 'users_nowhere' cannot be imported: ModuleNotFoundError.*run from the folder"),
        ("users_broken:f", "ModuleNotFoundError: No module named 'surely_not_installed'"),
        ("users_typo:f", "cannot be imported: SyntaxError"),
        ("users_models:smal", "users_models.py has no 'smal'; did you mean small"),
        ("users_models:zzzzzzzz", "known are Net, breaks, number, other_signature, small$"),
        ("users_models:width", "width is no function or class but a int"),
        ("users_models:number", "must return a torch.nn.Module; got a int"),
        ("users_models:other_signature", r"called as other_signature\(classes=2\), but its signature is .*n_classes"),
    ],
)
def test_a_factory_that_cannot_be_used_says_why(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_model(name, classes=2)


@pytest.mark.usefixtures("factories")
def test_a_fault_inside_a_factory_is_the_users_to_see() -> None:
    with pytest.raises(KeyError, match="inside the factory"):
        build_model("users_models:breaks", classes=2)


@pytest.mark.parametrize("name", ["resnet18", "googlenet", "inception_v3", "mobilenet_v3_small", "densenet121"])
def test_torchvision_classifiers_return_one_tensor_while_training(name: str) -> None:
    with torch.device("meta"):
        logits = build_model(f"torchvision:{name}", classes=3).train()(torch.empty(2, 3, 96, 96))
    assert logits.shape == (2, 3)


@pytest.mark.parametrize("name", ["fcn_resnet50", "deeplabv3_resnet50", "lraspp_mobilenet_v3_large"])
def test_torchvision_segmenters_return_logits_of_every_pixel(name: str) -> None:
    with torch.device("meta"):
        model = build_model(f"torchvision:{name}", classes=3).train()
        assert model(torch.empty(2, 3, 64, 96)).shape == (2, 3, 64, 96)
        torch.fx.symbolic_trace(model)


def test_segmenter_has_torchvisions_names_and_logits() -> None:
    torch.manual_seed(0)
    theirs = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    ours = build_model("torchvision:lraspp_mobilenet_v3_large", classes=3).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(1, 3, 64, 32)
    torch.testing.assert_close(ours(x), theirs(x)["out"])


def test_timm_model_takes_classes_and_channels() -> None:
    with torch.device("meta"):
        assert build_model("timm:resnet18", classes=3, in_channels=4)(torch.empty(2, 4, 40, 56)).shape == (2, 3)


@pytest.mark.parametrize("name", ["torchvision:densenet121", "torchvision:fcn_resnet50", "timm:resnet18"])
def test_group_norm_takes_every_batch_norms_place(name: str) -> None:
    with torch.device("meta"):
        before = build_model(name, classes=2)
        after = build_model(name, classes=2, norm="group")
        after(torch.empty(1, 3, 64, 64))
    assert [(k, p.shape) for k, p in before.named_parameters()] == [(k, p.shape) for k, p in after.named_parameters()]
    assert not [m for m in after.modules() if isinstance(m, nn.BatchNorm2d)]


def test_group_norm_keeps_initial_scales_and_epsilon() -> None:
    model = nn.Sequential(nn.BatchNorm2d(64, eps=0.25))
    nn.init.zeros_(model[0].weight)
    replace_norm(model, "it", "group")
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0].eps == 0.25
    assert not model[0].weight.any()


def test_frozen_norms_are_those_of_the_model_in_evaluation() -> None:
    """Also where timm joins the norm with the activation."""
    torch.manual_seed(0)
    model = build_model("timm:efficientnet_b0", classes=2, norm="frozen")
    plain = build_model("timm:efficientnet_b0", classes=2)
    plain.load_state_dict(model.state_dict())
    for part in model.train().modules():
        assert not (isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))
    with pytest.raises(ValueError, match="no BatchNorm with running statistics; use --norm batch"):
        build_model("torchvision:vit_b_16", classes=2, norm="frozen")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("timm:efficientnet_b0", "normalises with BatchNormAct2d; use --norm batch"),
        ("torchvision:vit_b_16", "has no BatchNorm2d to replace"),
    ],
)
def test_group_norm_where_it_cannot_be_had_is_an_error(name: str, message: str) -> None:
    with torch.device("meta"), pytest.raises(ValueError, match=message):
        build_model(name, classes=2, norm="group")


def test_foreign_models_refuse_what_only_ours_offer() -> None:
    with pytest.raises(ValueError, match="instance is for MegaTile's own models; model timm:resnet18 takes"):
        build_model("timm:resnet18", classes=2, norm="instance")
    with pytest.raises(ValueError, match="model torchvision:resnet18 takes 3 channels; got in_channels 4"):
        build_model("torchvision:resnet18", classes=2, in_channels=4)
