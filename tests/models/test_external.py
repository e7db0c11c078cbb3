"""Models of users, of torchvision, timm and segmentation-models-pytorch."""

import sys

import pytest
import torch
import torch.fx
import torchvision
from torch import nn

from app.planning.workload import Workload
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
def factories(tmp_path, monkeypatch):
    (tmp_path / "users_models.py").write_text(FACTORIES)
    (tmp_path / "users_broken.py").write_text("import surely_not_installed\n")
    (tmp_path / "users_typo.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("users_models", "users_broken", "users_typo"):
        monkeypatch.delitem(sys.modules, name, raising=False)


@pytest.mark.usefixtures("factories")
def test_a_factory_or_a_class_of_the_user_builds_and_its_faults_are_the_users_to_see():
    for name in ("users_models:small", "users_models:Net"):
        assert build_model(name, classes=5)(torch.rand(2, 3, 8, 9)).shape == (2, 5)
    with pytest.raises(KeyError, match="inside the factory"):
        build_model("users_models:breaks", classes=2)


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
def test_a_factory_that_cannot_be_used_says_why(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(name, classes=2)


@pytest.mark.parametrize(
    ("name", "logits"),
    [
        *((f"torchvision:{name}", (2, 3)) for name in ("resnet18", "googlenet", "inception_v3", "densenet121")),
        ("torchvision:mobilenet_v3_small", (2, 3)),
        *((f"torchvision:{name}_resnet50", (2, 3, 128, 160)) for name in ("fcn", "deeplabv3")),
        ("torchvision:lraspp_mobilenet_v3_large", (2, 3, 128, 160)),
        ("timm:resnet18", (2, 3)),
        *((f"smp:{name}", (2, 3, 128, 160)) for name in ("Unet(resnet18)", "FPN(efficientnet-b0)")),
        ("smp:PAN(tu-regnety_002)", (2, 3, 128, 160)),
    ],
)
def test_models_return_one_tensor_of_logits_while_training(name, logits):
    with torch.device("meta"):
        model = build_model(name, classes=3).train()
        assert model(torch.empty(2, 3, 128, 160)).shape == logits
    if name.startswith("torchvision:") and len(logits) == 4:
        torch.fx.symbolic_trace(model)


def test_segmenter_has_torchvisions_names_and_logits():
    torch.manual_seed(0)
    theirs = torchvision.models.segmentation.lraspp_mobilenet_v3_large(
        weights=None, weights_backbone=None, num_classes=3
    ).eval()
    ours = build_model("torchvision:lraspp_mobilenet_v3_large", classes=3).eval()
    ours.load_state_dict(theirs.state_dict())
    x = torch.rand(1, 3, 64, 32)
    torch.testing.assert_close(ours(x), theirs(x)["out"])


@pytest.mark.parametrize(
    "name",
    ["torchvision:densenet121", "torchvision:fcn_resnet50", "timm:resnet18", "unet:resnet18", "smp:Unet(resnet18)"],
)
def test_group_norm_takes_every_batch_norms_place(name):
    with torch.device("meta"):
        before, after = build_model(name, classes=2), build_model(name, classes=2, norm="group")
        after(torch.empty(1, 3, 64, 64))
    assert [(k, p.shape) for k, p in before.named_parameters()] == [(k, p.shape) for k, p in after.named_parameters()]
    assert not [m for m in after.modules() if isinstance(m, nn.BatchNorm2d)]


def test_group_norm_keeps_initial_scales_and_epsilon():
    model = nn.Sequential(nn.BatchNorm2d(64, eps=0.25))
    nn.init.zeros_(model[0].weight)
    replace_norm(model, "it", "group")
    assert isinstance(model[0], nn.GroupNorm)
    assert model[0].eps == 0.25
    assert not model[0].weight.any()


def test_frozen_norms_are_those_of_the_model_in_evaluation():
    """Also where timm joins the norm with the activation."""
    torch.manual_seed(0)
    model, plain = (build_model("timm:efficientnet_b0", classes=2, norm=norm) for norm in ("frozen", "batch"))
    plain.load_state_dict(model.state_dict())
    for part in model.train().modules():
        assert not (isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training)
    x = torch.rand(2, 3, 64, 64)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x))


@pytest.mark.parametrize(
    ("name", "settings", "words"),
    [
        ("timm:efficientnet_b0", {"norm": "group"}, "normalises with BatchNormAct2d; use --norm batch"),
        ("torchvision:vit_b_16", {"norm": "group"}, "has no BatchNorm2d to replace"),
        ("torchvision:vit_b_16", {"norm": "frozen"}, "no BatchNorm with running statistics; use --norm batch"),
        ("timm:resnet18", {"norm": "instance"}, "instance is for MegaTile's own models; model timm:resnet18 takes"),
        ("smp:Unet(resnet18)", {"norm": "instance"}, "instance is for MegaTile's own models"),
    ],
)
def test_what_foreign_models_do_not_take_is_refused(name, settings, words):
    with torch.device("meta"), pytest.raises(ValueError, match=words):
        build_model(name, classes=2, **settings)


def test_smp_encoders_that_look_at_numbers_are_planned_and_names_beside_newer_ones_build_without_a_warning():
    """Without data the first cannot be built, which was told as if the decoder did not go with it."""
    assert Workload("smp:Segformer(mit_b0)", 64, 2).build().segmentation_head[0].out_channels == 2
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
def test_what_it_has_not_is_named(name, message):
    with pytest.raises(ValueError, match=message):
        build_model(f"smp:{name}", classes=2)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "segmentation_models_pytorch", None)
    with pytest.raises(ValueError, match=r'cannot be imported: .*; install it: pip install "megatile\[smp\]"'):
        build_model("smp:Unet(resnet18)", classes=2)
