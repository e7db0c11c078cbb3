"""Runs with averaged weights, layer-wise rates and frozen parts, and runs that end before their last step."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from app.checkpoint.file import save_checkpoint
from app.prediction.trained_model import load_model
from app.settings.optimization import OptimizerSettings
from app.settings.run import RunConfig, ScoreSettings
from app.training import model as model_module
from app.training.dataset import Dataset, prepare
from app.training.loop import TrainingLoop
from app.training.run_folder import RunFolder
from tests.app.conftest import QUICK, Train, summary_of
from tests.app.training.test_parallel_train import (
    MODELS,
    Ran,
    different,
    interrupted_after,
    run_config,
    train_on_threads,
)

UPDATES = OptimizerSettings(optimizer="sgd", lr=0.05, ema=0.9, layer_decay=0.5, freeze=("0", "1"))
SCORES = ScoreSettings(validation_tiles=1, validate_every=1)


@pytest.fixture
def one_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads share the generator that weights are drawn with, so they are drawn once."""
    monkeypatch.setattr(model_module, "build_model", lambda name, **_: copy.deepcopy(MODELS[name]))


@pytest.fixture(scope="module")
def data(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Dataset]:
    out = tmp_path_factory.mktemp("data")
    return classify_slides, prepare(run_config(classify_slides, out), RunFolder(out), lambda line: None)


def config_of(data: tuple[Path, Dataset], out: Path, **strategy: Any) -> RunConfig:
    return dataclasses.replace(run_config(data[0], out, **strategy), optimization=UPDATES, score=SCORES)


def interrupted(config: RunConfig, data: tuple[Path, Dataset], steps: int) -> Ran:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_finish_step", interrupted_after(steps))
        return train_on_threads(config, data[1])


@pytest.mark.usefixtures("one_model")
def test_an_interrupted_run_goes_on_bit_by_bit_with_its_averages(data: tuple[Path, Dataset], tmp_path: Path) -> None:
    undisturbed = train_on_threads(config_of(data, tmp_path / "whole"), data[1])
    config = config_of(data, tmp_path / "halves")
    interrupted(config, data, 2)
    resumed = train_on_threads(dataclasses.replace(config, resume=True), data[1])
    assert resumed.losses == undisturbed.losses
    assert different(resumed.state, undisturbed.state) == []
    assert resumed.metrics == undisturbed.metrics
    average, model = undisturbed.state["average"], undisturbed.state["model"]
    assert average.keys() == {"3.weight", "4.weight", "4.bias", "9.weight", "9.bias"}
    assert all(not torch.equal(average[name], model[name]) for name in average)
    for name in ("0.weight", "1.weight", "1.running_mean", "1.num_batches_tracked"):
        assert torch.equal(model[name], MODELS["tiny"].state_dict()[name])


@pytest.mark.usefixtures("one_model")
def test_predictions_are_those_of_the_averages(data: tuple[Path, Dataset], tmp_path: Path) -> None:
    config = config_of(data, tmp_path / "run")
    config = dataclasses.replace(config, net=dataclasses.replace(config.net, model="tests.helpers:tiny"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(MODELS, "tests.helpers:tiny", MODELS["tiny"])
        patch.setattr("app.prediction.trained_model.build_model", lambda name, **_: copy.deepcopy(MODELS[name]))
        state = train_on_threads(config, data[1]).state
        state.pop("format")
        raw = {key: value for key, value in state.items() if key != "average"}
        states = {"kept": state, "raw": raw, "in place": raw | {"model": state["model"] | state["average"]}}
        images = np.random.default_rng(0).integers(0, 255, (2, 128, 128, 3), dtype=np.uint8)
        found = {}
        for name, each in states.items():
            save_checkpoint(tmp_path / f"{name}.pt", each)
            model = load_model(tmp_path / f"{name}.pt", "tests.helpers:tiny", torch.device("cpu"))
            assert model.averaged == (name == "kept")
            found[name] = model.probabilities(images, (2, 3, 128, 128))
    assert np.array_equal(found["kept"], found["in place"])
    assert not np.allclose(found["kept"], found["raw"], atol=1e-4)


@pytest.mark.usefixtures("one_model")
def test_a_run_that_gets_no_better_ends_on_all_ranks(data: tuple[Path, Dataset], tmp_path: Path) -> None:
    """Weights that hardly move: the first validation stays the best, also where an interruption lies between."""
    still, score = dataclasses.replace(UPDATES, lr=1e-30), dataclasses.replace(SCORES, patience=2)
    config = config_of(data, tmp_path / "run", parallel="gpipe", ranks=2)
    config = dataclasses.replace(config, optimization=still, score=score, steps=8)
    state = interrupted(config, data, 3).state
    assert (state["step"], state["stale"], state["best"]["step"]) == (3, 1, 1)
    state = train_on_threads(dataclasses.replace(config, resume=True), data[1]).state
    assert (state["step"], state["stale"], state["best"]["step"]) == (4, 2, 1)


def test_the_summary_says_why_a_run_ended_early(classify_slides: Path, tmp_path: Path, train: Train) -> None:
    out = tmp_path / "run"
    arguments = ["--slides", str(classify_slides), *QUICK, "--lr", "1e-30", "--freeze", "0", "--steps", "9"]
    arguments += ["--out", str(out), "--validate-every=1"]
    done = train(*arguments, "--patience", "1")
    assert done.returncode == 0, done.stderr
    early = summary_of(out)["stopped_early"]
    assert (summary_of(out)["status"], summary_of(out)["steps"]) == ("completed", 2)
    assert (early["step"], early["validations"], early["best_step"]) == (2, 1, 1)
    assert (
        f"stopped early at step 2: 1 validations in a row without a better score than {early['best_metric']}"
        in done.stdout
    )
    assert "--freeze 0: 626 of 1,226 numbers are trained; without --weights the rest stays as" in done.stdout
    assert "--freeze 0: 626 of" in (out / "run.log").read_text()
    assert (
        "was stopped early at step 2; ask for more --patience"
        in train(*arguments, "--patience", "1", "--resume").stdout
    )
    assert train(*arguments, "--patience", "3", "--resume").returncode == 0
    assert (summary_of(out)["steps"], summary_of(out)["stopped_early"]["validations"]) == (4, 3)
