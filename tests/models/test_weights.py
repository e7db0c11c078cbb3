"""Weights from files: every wrapping, heads that stay fresh, and files that are refused."""

import os

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file
from torch import nn

from models.registry import build_model
from models.weights import load_weights, read_weights


@pytest.fixture
def source():
    torch.manual_seed(1)
    return build_model("unet_w16", classes=2)


def load_into(name, path, **settings):
    """A new model with the weights of ``path``, and what was loaded."""
    model = build_model(name, **{"classes": 2} | settings)
    return model, load_weights(model, read_weights(path))


def assert_same(model, state):
    for key, tensor in model.state_dict().items():
        assert torch.equal(tensor, state[key]), key


@pytest.mark.parametrize(
    "wrap",
    [
        lambda state: state,
        lambda state: {"model": state, "epoch": 3},
        lambda state: {"state_dict": state, "lr": 0.1},
        lambda state: {f"module.{key}": value for key, value in state.items()},
        lambda state: {"model": {"state_dict": {f"module.{key}": value for key, value in state.items()}}},
        None,
    ],
    ids=["bare", "model", "state_dict", "module", "all", "safetensors"],
)
def test_every_wrapping_of_a_state_dict_loads(wrap, source, tmp_path):
    path, state = tmp_path / ("w.pt" if wrap else "w.safetensors"), dict(source.state_dict())
    if wrap:
        torch.save(wrap(state), path)
    else:
        save_file(state, path)
    model, loaded = load_into("unet_w16", path)
    assert loaded.left == ()
    assert_same(model, source.state_dict())


def test_torchvision_weights_load_into_our_resnet_but_for_the_head(tmp_path):
    theirs = torchvision.models.get_model("resnet18", weights=None).state_dict()
    torch.save(theirs, tmp_path / "resnet18.pth")
    model, loaded = load_into("resnet18", tmp_path / "resnet18.pth", classes=3)
    assert [line.split()[0] for line in loaded.left] == ["fc.weight", "fc.bias"]
    assert "file (1000, 512), model (3, 512)" in loaded.left[0]
    for key, tensor in model.state_dict().items():
        assert key.startswith("fc.") or torch.equal(tensor, theirs[key])


def test_heads_that_do_not_fit_stay_fresh_and_are_named(source, tmp_path):
    """LR-ASPP adds the logits of two convolutions; both depend on the number of classes."""
    path = tmp_path / "w.pth"
    torch.save({key: value for key, value in source.state_dict().items() if not key.startswith("head.")}, path)
    torch.manual_seed(2)
    head = build_model("unet_w16", classes=2).head.weight
    torch.manual_seed(2)
    model, loaded = load_into("unet_w16", path)
    assert loaded.left == ("head.weight (not in the file)", "head.bias (not in the file)")
    assert torch.equal(model.head.weight, head)
    theirs = torchvision.models.googlenet(weights=None, aux_logits=True, num_classes=2, init_weights=False)
    torch.save(theirs.state_dict(), path)
    left = load_into("torchvision:googlenet", path)[1].left
    assert left
    assert all(line.startswith("aux") and line.endswith("(auxiliary head, not in the model)") for line in left)
    name = "torchvision:lraspp_mobilenet_v3_large"
    torch.save(build_model(name, classes=21).state_dict(), path)
    assert {line.split(".")[1] for line in load_into(name, path)[1].left} == {"low_classifier", "high_classifier"}


@pytest.mark.parametrize(("trained", "built"), [("batch", "group"), ("group", "batch")])
def test_weights_with_other_norms_name_the_flag_of_norms(trained, built, tmp_path):
    torch.save(build_model("resnet18", classes=2, norm=trained).state_dict(), tmp_path / "w.pt")
    with pytest.raises(ValueError, match="choose the --norm they were trained with"):
        load_into("resnet18", tmp_path / "w.pt", norm=built)


def refused_by(model, path, words):
    """The message with which the weights of ``path`` are refused; nothing of them is loaded."""
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=words) as error:
        load_weights(model, read_weights(path))
    assert_same(model, before)
    return str(error.value)


def test_another_model_is_refused_with_all_faults_and_nothing_loaded(source, tmp_path):
    path, state = tmp_path / "w.pt", dict(source.state_dict())
    torch.save(state, path)
    assert refused_by(build_model("unet_w8", classes=2), path, r"(?s)another model .* more$").count("\n") == 21
    state["head.spare"] = torch.zeros(1)
    del state["encoder.0.0.0.weight"]
    state["encoder.1.0.0.weight"] = torch.zeros(32, 8, 3, 3)
    torch.save(state, path)
    message = refused_by(build_model("unet_w16", classes=2), path, "are of another model \\(3 of")
    for words in (
        "encoder.1.0.0.weight: file (32, 8, 3, 3), model (32, 16, 3, 3)",
        "encoder.0.0.0.weight: not in the file",
        "head.spare: not in the model",
    ):
        assert words in message
    torch.save(build_model("resnet18", classes=2).state_dict(), path)
    refused_by(build_model("resnet34", classes=2), path, "another model")
    torch.save(timm.create_model("test_vit").state_dict(), path)
    words = r"w\.pt: none of its \d+ tensors match .*The file has cls_token \(1, 1, 64\)"
    refused_by(build_model("resnet18", classes=2), path, words)


def test_a_teacher_of_dino_loads_into_the_model_that_it_is_of(tmp_path):
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


def test_a_classifiers_weights_load_into_the_encoder_of_a_unet(tmp_path):
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


def test_a_checkpoint_of_ours_gives_averages_of_its_weights(source, tmp_path):
    averages = {name: parameter.detach() + 1 for name, parameter in source.named_parameters()}
    torch.save({"model": source.state_dict(), "average": averages}, tmp_path / "w.pt")
    assert_same(load_into("unet_w16", tmp_path / "w.pt")[0], source.state_dict() | averages)


class Runs:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return (os.mkdir, (str(self.trace),))


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        *(
            (name, content, name)
            for name in ("w.pt", "w.safetensors")
            for content in (b"", b"<html>not found</html>", b"PK\x03\x04 cut off")
        ),
        ("nowhere.pt", None, r"nowhere\.pt: there is no such file"),
        ("w.pt", Runs, r"w.pt: not a file of tensors alone.*save model.state_dict\(\)"),
        ("w.pt", [torch.zeros(1)], "it holds no state dict"),
        ("w.pt", {}, "it holds no state dict"),
        ("w.pt", {"weight": torch.zeros(1), "epoch": 3}, "not all are tensors: epoch"),
    ],
)
def test_files_that_are_damaged_run_code_or_hold_no_state_dict_are_refused(name, content, words, tmp_path):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    elif content is not None:
        torch.save({"model": Runs(tmp_path / "ran")} if content is Runs else content, tmp_path / name)
    with pytest.raises(ValueError, match=words):
        load_weights(nn.Linear(1, 1), read_weights(tmp_path / name))
    assert not (tmp_path / "ran").exists()
