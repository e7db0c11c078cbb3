"""Weights of the libraries, from their own caches: no test here needs a network."""

import pytest
import timm
import torch
from torchvision import models

from models.registry import build_model, names_weights, pretrained_weights
from models.weights import IMAGENET, load_weights
from tests.helpers.local_hub import put_on_hub, random_timm, use_local_hub

CENTRED = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    return use_local_hub(tmp_path, monkeypatch)


@pytest.mark.parametrize("name", ["test_convnext", "test_vit.r160_in1k"])
def test_logits_of_timm_models_are_timms_own(name, hub):
    random_timm(name, hub)
    theirs = timm.create_model(name, pretrained=True).eval()
    ours = build_model(f"timm:{name}", classes=1000).eval()
    weights = pretrained_weights(f"timm:{name}")
    assert not load_weights(ours, weights).left
    x = torch.randn(2, 3, 160, 160)
    assert torch.equal(ours(x), theirs(x))
    assert weights.normalisation == CENTRED == (theirs.pretrained_cfg["mean"], theirs.pretrained_cfg["std"])


def test_weights_in_a_cache_that_cannot_be_written(hub):
    """It belongs to somebody else, or is mounted read-only."""
    theirs = random_timm("test_resnet", hub)
    (hub / "torch").touch()  # not even root can make a folder below it
    weights = pretrained_weights("timm:test_resnet")
    assert torch.equal(weights.tensors["conv1.0.weight"], theirs.conv1[0].weight)


def test_heads_of_other_classes_are_fresh_and_position_embeddings_follow_the_tile(hub):
    random_timm("test_vit", hub)
    ours = build_model("timm:test_vit", classes=3, side=96).eval()
    left = load_weights(ours, pretrained_weights("timm:test_vit", 96)).left
    assert sorted(line.partition(" ")[0] for line in left) == ["head.bias", "head.weight"]
    theirs = timm.create_model("test_vit", pretrained=True, img_size=96).eval()
    x = torch.randn(1, 3, 96, 96)
    assert torch.equal(ours.forward_features(x), theirs.forward_features(x))


def test_a_model_by_its_name_on_the_hub(hub):
    theirs = timm.create_model("test_resnet")
    put_on_hub(hub, "someone/foundation", theirs)
    name = "timm:hf-hub:someone/foundation"
    ours = build_model(name, classes=1000).eval()
    load_weights(ours, pretrained_weights(name))
    x = torch.randn(1, 3, 64, 64)
    assert torch.equal(ours(x), theirs.eval()(x))


def test_an_encoder_of_a_unet_starts_from_timms_weights(hub):
    theirs = random_timm("test_resnet", hub)
    ours = build_model("unet:test_resnet", classes=2)
    loaded = load_weights(ours, pretrained_weights("unet:test_resnet"))
    assert torch.equal(ours.encoder.conv1[0].weight, theirs.conv1[0].weight)
    assert {name for name, counts in loaded.blocks.items() if counts["fresh"]} == {"decoder", "full", "head"}


def put_torchvision(hub, model, weights):
    """Put a model where torch's hub keeps what it has downloaded."""
    (hub / "torch" / "hub" / "checkpoints").mkdir(parents=True)
    torch.save(model.state_dict(), hub / "torch" / "hub" / "checkpoints" / weights.url.rpartition("/")[2])


@pytest.mark.parametrize("name", ["torchvision:resnet18", "resnet18"])
def test_logits_of_torchvisions_models_are_its_own(name, hub):
    theirs = models.resnet18(num_classes=1000).eval()
    put_torchvision(hub, theirs, models.ResNet18_Weights.DEFAULT)
    weights = pretrained_weights(name)
    ours = build_model(name, classes=1000).eval()
    assert not load_weights(ours, weights).left
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(ours(x), theirs(x), rtol=0, atol=0)
    assert weights.normalisation == IMAGENET


def test_torchvisions_inception_expects_centred_images(hub):
    """GoogLeNet's pretrained weights come with ``transform_input``, which undoes the usual normalisation."""
    theirs = models.googlenet(num_classes=1000, aux_logits=False, transform_input=True, init_weights=True).eval()
    put_torchvision(hub, theirs, models.GoogLeNet_Weights.DEFAULT)
    weights = pretrained_weights("torchvision:googlenet")
    ours = build_model("torchvision:googlenet", classes=1000).eval()
    load_weights(ours, weights)
    pixels = torch.rand(1, 3, 64, 64)

    def normalised(normalisation):
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in normalisation)
        return (pixels - mean) / std

    torch.testing.assert_close(ours(normalised(weights.normalisation)), theirs(normalised(IMAGENET)))


def test_encoders_of_smp(hub):
    smp = pytest.importorskip("segmentation_models_pytorch")
    from segmentation_models_pytorch.encoders import encoders

    theirs = smp.encoders.get_encoder("resnet18")
    where = encoders["resnet18"]["pretrained_settings"]["imagenet"]
    put_on_hub(hub, where["repo_id"], theirs, where["revision"])
    ours = build_model("smp:FPN(resnet18)", classes=2)
    weights = pretrained_weights("smp:FPN(resnet18)")
    load_weights(ours, weights)
    assert torch.equal(ours.encoder.conv1.weight, theirs.conv1.weight)
    assert weights.normalisation[0] == pytest.approx([0.1 / 255, 0.2 / 255, 0.3 / 255])


def test_names_that_name_weights():
    named = "timm:resnet18.a1_in1k timm:hf-hub:MahmoodLab/UNI unet:resnet18.a1_in1k smp:FPN(tu-resnet18.a1_in1k)"
    assert all(map(names_weights, named.split()))
    assert not any(map(names_weights, ["timm:resnet18", "resnet18", "smp:FPN(resnet18)", "package.module:factory"]))


@pytest.mark.parametrize(
    ("get", "words"),
    [
        (lambda: pretrained_weights("timm:test_resnet"), r"timm:test_resnet cannot be .*HF_HUB_OFFLINE.*HF_TOKEN"),
        (lambda: pretrained_weights("amoebanet(6,190)"), "no library has weights for model amoebanet"),
        (lambda: build_model("timm:hf-hub:a/b", classes=2), r"configuration cannot be read.*HF_HOME"),
        (lambda: build_model("timm:test_resnet.no", classes=2), "no weights 'no' of test_resnet; known are r160_in1k"),
    ],
)
def test_what_cannot_be_had_says_what_to_do(hub, get, words):
    with pytest.raises(ValueError, match=words):
        get()
