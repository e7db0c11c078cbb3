from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import Tensor, nn

from models.blocks import Norm
from models.registry import build_model
from models.weights import load_weights, read_weights

State = dict[str, Tensor]


@pytest.fixture
def source() -> nn.Module:
    torch.manual_seed(1)
    return build_model("unet_w16", classes=2)


def assert_same(model: nn.Module, state: State, *, but: tuple[str, ...] = ()) -> None:
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]) != (key in but), key


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state, "lr": 0.1},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"model": {"state_dict": {f"module.{key}": value for key, value in state.items()}}},
    ],
    ids=["bare", "model", "state_dict", "module", "all"],
)
def test_every_wrapping_of_a_state_dict_loads(
    wrap: Callable[[State], dict[str, Any]], source: nn.Module, tmp_path: Path
) -> None:
    torch.save(wrap(dict(source.state_dict())), tmp_path / "w.pt")
    model = build_model("unet_w16", classes=2)
    assert load_weights(model, read_weights(tmp_path / "w.pt")).left == ()
    assert_same(model, source.state_dict())


def test_safetensors_load(source: nn.Module, tmp_path: Path) -> None:
    save_file(dict(source.state_dict()), tmp_path / "w.safetensors")
    model = build_model("unet_w16", classes=2)
    assert load_weights(model, read_weights(tmp_path / "w.safetensors")).left == ()
    assert_same(model, source.state_dict())


def test_torchvision_weights_load_into_our_resnet_but_for_the_head(tmp_path: Path) -> None:
    theirs = torchvision.models.get_model("resnet18", weights=None).state_dict()
    torch.save(theirs, tmp_path / "resnet18.pth")
    model = build_model("resnet18", classes=3)
    fresh = load_weights(model, read_weights(tmp_path / "resnet18.pth")).left
    assert [line.split()[0] for line in fresh] == ["fc.weight", "fc.bias"]
    assert "file (1000, 512), model (3, 512)" in fresh[0]
    for key, tensor in model.state_dict().items():
        assert key.startswith("fc.") or torch.equal(tensor, theirs[key])


def test_a_head_missing_from_the_file_stays_fresh(source: nn.Module, tmp_path: Path) -> None:
    state = {key: value for key, value in source.state_dict().items() if not key.startswith("head.")}
    torch.save(state, tmp_path / "backbone.pt")
    model = build_model("unet_w16", classes=2)
    head = model.head.weight.clone()
    assert load_weights(model, read_weights(tmp_path / "backbone.pt")).left == (
        "head.weight (not in the file)",
        "head.bias (not in the file)",
    )
    assert torch.equal(model.head.weight, head)


def test_auxiliary_heads_of_the_file_are_passed_over_and_named(tmp_path: Path) -> None:
    theirs = torchvision.models.googlenet(weights=None, aux_logits=True, num_classes=2, init_weights=False)
    torch.save(theirs.state_dict(), tmp_path / "googlenet.pth")
    fresh = load_weights(build_model("torchvision:googlenet", classes=2), read_weights(tmp_path / "googlenet.pth")).left
    assert fresh
    assert all(line.startswith("aux") and line.endswith("(auxiliary head, not in the model)") for line in fresh)


def test_a_head_of_two_layers_stays_fresh_as_a_whole(tmp_path: Path) -> None:
    """LR-ASPP adds the logits of two convolutions; both depend on the number of classes."""
    theirs = build_model("torchvision:lraspp_mobilenet_v3_large", classes=21)
    torch.save(theirs.state_dict(), tmp_path / "w.pth")
    fresh = load_weights(
        build_model("torchvision:lraspp_mobilenet_v3_large", classes=2), read_weights(tmp_path / "w.pth")
    ).left
    assert {line.split(".")[1] for line in fresh} == {"low_classifier", "high_classifier"}


@pytest.mark.parametrize(("trained", "built"), [("batch", "group"), ("group", "batch")])
def test_weights_with_other_norms_name_the_flag_of_norms(trained: Norm, built: Norm, tmp_path: Path) -> None:
    torch.save(build_model("resnet18", classes=2, norm=trained).state_dict(), tmp_path / "w.pt")
    weights = read_weights(tmp_path / "w.pt")
    with pytest.raises(ValueError, match="choose the --norm they were trained with"):
        load_weights(build_model("resnet18", classes=2, norm=built), weights)


def test_another_model_is_refused_with_all_faults_and_nothing_loaded(source: nn.Module, tmp_path: Path) -> None:
    state = dict(source.state_dict())
    state["head.spare"] = torch.zeros(1)
    del state["encoder.0.0.0.weight"]
    state["encoder.1.0.0.weight"] = torch.zeros(32, 8, 3, 3)
    torch.save(state, tmp_path / "w.pt")
    model = build_model("unet_w16", classes=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match="are of another model \\(3 of") as fault:
        load_weights(model, read_weights(tmp_path / "w.pt"))
    assert "encoder.1.0.0.weight: file (32, 8, 3, 3), model (32, 16, 3, 3)" in str(fault.value)
    assert "encoder.0.0.0.weight: not in the file" in str(fault.value)
    assert "head.spare: not in the model" in str(fault.value)
    assert_same(model, before)


def test_other_width_and_other_depth_are_refused(source: nn.Module, tmp_path: Path) -> None:
    torch.save(source.state_dict(), tmp_path / "w.pt")
    with pytest.raises(
        ValueError,
        match=r"(?s)another model .* more$",
    ) as fault:
        load_weights(build_model("unet_w8", classes=2), read_weights(tmp_path / "w.pt"))
    assert str(fault.value).count("\n") == 21
    torch.save(build_model("resnet18", classes=2).state_dict(), tmp_path / "r.pt")
    with pytest.raises(ValueError, match="another model"):
        load_weights(build_model("resnet34", classes=2), read_weights(tmp_path / "r.pt"))


def test_a_teacher_of_dino_loads_into_the_model_that_it_is_of(tmp_path: Path) -> None:
    theirs = timm.create_model("test_vit", num_classes=0)
    teacher = {f"module.backbone.{key}": value for key, value in theirs.state_dict().items()}
    teacher |= {"module.head.mlp.0.weight": torch.zeros(4, 64), "module.head.last_layer.weight_v": torch.zeros(9, 4)}
    student = {key: torch.zeros_like(value) for key, value in teacher.items()}
    torch.save({"student": student, "teacher": teacher, "epoch": 3}, tmp_path / "dino.pth")
    model = build_model("timm:test_vit", classes=2)
    loaded = load_weights(model, read_weights(tmp_path / "dino.pth"))
    assert loaded.prefix == "module.backbone."
    assert loaded.left == ("head.weight (not in the file)", "head.bias (not in the file)")
    assert loaded.blocks["head"] == {"loaded": 0, "fresh": 2, "other shape": 0, "unused": 0}
    assert loaded.blocks["module"]["unused"] == 2
    assert_same(model, theirs.state_dict() | {key: model.state_dict()[key] for key in ("head.weight", "head.bias")})


def test_a_classifiers_weights_load_into_the_encoder_of_a_unet(tmp_path: Path) -> None:
    theirs = timm.create_model("resnet18").state_dict()
    save_file(theirs, tmp_path / "resnet18.safetensors")
    model = build_model("unet:resnet18", classes=2)
    decoder = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("encoder.")}
    loaded = load_weights(model, read_weights(tmp_path / "resnet18.safetensors"))
    assert_same(model, {f"encoder.{key}": value for key, value in theirs.items()} | decoder)
    assert loaded.lines[0].endswith(f"{len(theirs) - 2} of {len(model.state_dict())} tensors loaded, into encoder")
    rows = {line.split()[0]: line.split()[1:] for line in loaded.lines[1:]}
    assert rows["block"] == ["loaded", "fresh", "other", "shape", "unused"]
    assert rows["encoder.layer1"] == ["24", "-", "-", "-"]
    assert rows["encoder.fc"] == ["-", "-", "-", "2"]
    assert rows["head"] == ["-", "2", "-", "-"]
    assert len({line.rindex(line.split()[-1]) + len(line.split()[-1]) for line in loaded.lines[1:]}) == 1


def test_a_file_of_which_nothing_matches_is_refused_by_name(tmp_path: Path) -> None:
    torch.save(timm.create_model("test_vit").state_dict(), tmp_path / "vit.pt")
    model = build_model("resnet18", classes=2)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"vit\.pt: none of its \d+ tensors match .*The file has cls_token \(1, 1, 64\)"
    ):
        load_weights(model, read_weights(tmp_path / "vit.pt"))
    assert_same(model, before)


def test_a_checkpoint_of_ours_gives_averages_of_its_weights(source: nn.Module, tmp_path: Path) -> None:
    averages = {name: parameter.detach() + 1 for name, parameter in source.named_parameters()}
    torch.save({"model": source.state_dict(), "average": averages}, tmp_path / "w.pt")
    model = build_model("unet_w16", classes=2)
    load_weights(model, read_weights(tmp_path / "w.pt"))
    assert_same(model, source.state_dict() | averages)


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(self.trace),))


def test_code_in_a_file_is_not_run(tmp_path: Path) -> None:
    torch.save({"model": Runs(tmp_path / "ran")}, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=r"w.pt: not a file of tensors alone.*save model.state_dict\(\)"):
        load_weights(nn.Linear(1, 1), read_weights(tmp_path / "w.pt"))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("content", [b"", b"<html>not found</html>", b"PK\x03\x04 cut off"])
@pytest.mark.parametrize("name", ["w.pt", "w.safetensors"])
def test_damaged_files_are_named(name: str, content: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=name):
        load_weights(nn.Linear(1, 1), read_weights(tmp_path / name))


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere\.pt: there is no such file"):
        load_weights(nn.Linear(1, 1), read_weights(tmp_path / "nowhere.pt"))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([torch.zeros(1)], "it holds no state dict"),
        ({}, "it holds no state dict"),
        ({"weight": torch.zeros(1), "epoch": 3}, "not all are tensors: epoch"),
    ],
)
def test_files_without_a_state_dict_are_refused(content: object, message: str, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "w.pt")
    with pytest.raises(ValueError, match=message):
        load_weights(nn.Linear(1, 1), read_weights(tmp_path / "w.pt"))
