"""A cache of the Hugging Face hub and of torch in a folder of its own, and models put there as a download would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file
from torch import nn


def use_local_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Take models from empty caches in ``tmp_path``, without network; return it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    return tmp_path


def put_on_hub(hub: Path, repository: str, model: nn.Module, revision: str = "0" * 40, branch: str = "main") -> None:
    """Put ``model`` into the cache, as a download would."""
    folder = hub / "hub" / f"models--{repository.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / branch).write_text(revision)
    snapshot = folder / "snapshots" / revision
    snapshot.mkdir(parents=True)
    save_file(model.state_dict(), snapshot / "model.safetensors")
    cfg = getattr(model, "pretrained_cfg", {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_range": [0, 255]})
    config = {"architecture": cfg.get("architecture"), "num_classes": 1000, "pretrained_cfg": cfg, **cfg}
    (snapshot / "config.json").write_text(json.dumps(config))


def random_timm(name: str, hub: Path, **options: object) -> nn.Module:
    """Return a model of timm with random weights, which are on the hub now."""
    torch.manual_seed(1)
    model: nn.Module = timm.create_model(name, **options)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)  # timm's heads begin with zeros
    put_on_hub(hub, model.pretrained_cfg["hf_hub_id"], model)
    return model
