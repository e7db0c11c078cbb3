"""Checkpoints that hold something else than a trained model: one message that names the file and what is wrong."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from app.checkpoint.file import load_checkpoint, save_checkpoint
from app.prediction.trained_model import load_model
from app.settings.cli import RunError
from tests.helpers.hand_made_checkpoint import CLASSIFIER, write_checkpoint

CPU = torch.device("cpu")


def without(key: str) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.pop(key)


def setting(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state["settings"].update({key: value})


def replaced(key: str, value: object) -> Callable[[dict[str, Any]], None]:
    return lambda state: state.update({key: value})


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("settings"), "no model"),
        (without("classes"), "no classes"),
        (without("model"), "no model"),
        (without("step"), "no step"),
        (replaced("settings", [1]), "settings"),
        (replaced("classes", [1, 2]), "classes"),
        (replaced("classes", []), "classes"),
        (replaced("model", {}), "weights"),
        (replaced("model", {"0.weight": 3}), "weights"),
        (replaced("average", {"0.weight": torch.zeros(1, 2, 3, 4, 5)}), "weights"),
        (setting("tile", "x"), "tile 'x'"),
        (setting("tile", -4), "tile -4"),
        (setting("tile", None), "tile None"),
        (setting("mpp", "half"), "mpp 'half'"),
        (setting("model", 7), "model 7"),
        (lambda state: state["settings"].pop("norm"), "no norm"),
        (lambda state: state["settings"].clear(), "no mpp"),
    ],
)
def test_odd_content_is_named(change: Callable[[dict[str, Any]], None], says: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=64, mpp=0.5)
    state = load_checkpoint(path)
    change(state)
    save_checkpoint(path, state)
    with pytest.raises(RunError, match=says) as fault:
        load_model(path, CLASSIFIER, CPU)
    assert str(path) in str(fault.value)


def test_a_run_in_tf32_is_predicted_in_float32_without_a_gpu(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "best.pt", CLASSIFIER, tile=64, mpp=0.5, precision="tf32")
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = True
    try:
        load_model(path, CLASSIFIER, CPU)
        assert not torch.backends.cudnn.allow_tf32
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
