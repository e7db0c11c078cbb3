"""``--weights pretrained``, and what a run keeps of it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from app.prediction.computation import LocalModel
from app.prediction.trained_model import load_model
from tests.app.conftest import QUICK, Train
from tests.helpers.local_hub import random_timm, use_local_hub


def test_a_name_with_a_tag_trains_from_its_weights_and_predicts_with_their_normalisation(
    classify_slides: Path, train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = random_timm("test_resnet", use_local_hub(tmp_path, monkeypatch))
    run = tmp_path / "run"
    frozen = ("--model", "timm:test_resnet.r160_in1k", "--freeze", "trunk")
    done = train("--slides", classify_slides, *QUICK, *frozen, "--steps", "1", "--out", run)
    assert done.returncode == 0, done.stderr
    log = (run / "run.log").read_text()
    assert "--weights timm test_resnet.r160_in1k: " in log
    assert "mean 0.5, 0.5, 0.5; standard deviation 0.5, 0.5, 0.5" in log
    state = torch.load(run / "checkpoints" / "last.pt", weights_only=True)
    assert torch.equal(state["model"]["conv1.0.weight"], theirs.get_parameter("conv1.0.weight"))
    model = load_model(run / "checkpoints" / "last.pt", None, torch.device("cpu"))
    assert isinstance(model.computation, LocalModel)
    white = model.computation._input(np.full((1, 8, 8, 3), 255, np.uint8), None)
    assert torch.equal(white, torch.ones(1, 3, 8, 8))


def test_frozen_norms_without_weights_are_warned_of(classify_slides: Path, train: Train, tmp_path: Path) -> None:
    arguments = (
        "--model",
        "resnet20_v2",
        "--norm",
        "frozen",
        "--tile",
        "64",
        "--steps",
        "1",
        "--out",
        tmp_path / "run",
    )
    done = train("--slides", classify_slides, *QUICK, *arguments)
    assert done.returncode == 0, done.stderr
    assert "the running statistics were never measured" in (tmp_path / "run" / "run.log").read_text()
