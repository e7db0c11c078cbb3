"""Runs on normalised slides: the same on ranks and in boxes, kept in the run folder, followed by prediction."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from app.prediction.trained_model import TrainedModel, load_model
from pipelines.catalog.catalog import find_slides
from pipelines.tiles.stain_fit import StainFit
from tests.app.conftest import QUICK, Train
from tests.helpers.in_process import call

TARGET = "slide_0002"
RUN = (*QUICK, "--steps", "2", "--stain", "macenko", f"--stain-target={TARGET}")

pytestmark = pytest.mark.process


def losses(run: Path) -> list[float]:
    with (run / "metrics.csv").open(newline="") as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def run(classify_slides: Path, tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    out = tmp_path_factory.mktemp("stain") / "run"
    done = train("--slides", classify_slides, *RUN, "--out", out)
    assert done.returncode == 0, done.stderr
    assert "stains of 6 slides are looked at (macenko)" in done.stdout
    return out


def test_ranks_and_boxes_compute_the_same(run: Path, classify_slides: Path, tmp_path: Path, train_ranks: Train) -> None:
    ways = {"ranks": ("--ranks", "2", "--parallel", "gpipe"), "boxes": ("--parallel", "single", "--stream", "64")}
    for name, words in ways.items():
        (tmp_path / name).mkdir()
        shutil.copy(run / "tiles.parquet", tmp_path / name)
        done = train_ranks("--slides", classify_slides, *RUN, *words, "--out", tmp_path / name)
        assert done.returncode == 0, done.stderr
        assert losses(tmp_path / name) == pytest.approx(losses(run), rel=1e-4), name


def test_a_resumed_run_uses_what_was_found_and_other_stains_are_refused(
    run: Path, classify_slides: Path, train: Train
) -> None:
    stored = (run / "stains.json").read_bytes()
    resumed = train("--slides", classify_slides, *RUN, "--steps", "3", "--resume", "--extend", "--out", run)
    assert resumed.returncode == 0, resumed.stderr
    assert "are looked at" not in resumed.stdout
    assert (run / "stains.json").read_bytes() == stored
    other = train("--slides", classify_slides, *RUN, "--steps", "3", "--stain", "reinhard", "--resume", "--out", run)
    assert other.returncode == 2
    assert "stain: the run has 'macenko', asked is 'reinhard'" in other.stderr
    (run.parent / "new").mkdir()
    for name in ("tiles.parquet", "stains.json"):
        shutil.copy(run / name, run.parent / "new")
    unknown = train("--slides", classify_slides, *RUN, "--stain-target=nobody", "--out", run.parent / "new")
    assert unknown.returncode == 2
    assert "stain-target nobody cannot be the target: no slide of --slides" in unknown.stderr
    cpu = train("--slides", classify_slides, *RUN, "--augment", "cpu", "--out", run)
    assert cpu.returncode == 2
    assert "--augment cpu varies colours before tiles reach the device" in cpu.stderr


def test_prediction_follows_the_checkpoint(
    run: Path, classify_slides: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[StainFit] = []
    begin = TrainedModel.begin

    def told(
        model: TrainedModel, images: np.ndarray, shape: tuple[int, ...], stain: StainFit | None = None
    ) -> Callable[[], np.ndarray]:
        assert stain is not None
        asked.append(stain)
        with_it, without = (begin(model, images, shape, fit) for fit in (stain, None))
        assert np.abs(with_it() - without()).max() > 1e-4, "it was not normalised"
        return with_it

    monkeypatch.setattr(TrainedModel, "begin", told)
    slides = tmp_path / "slides"
    slides.mkdir()
    spec = find_slides(classify_slides)[0]
    (slides / spec.path.name).symlink_to(spec.path)
    done = call(
        *(
            "app.predict",
            "--slides",
            slides,
            "--checkpoint",
            run / "checkpoints" / "last.pt",
            "--out",
            tmp_path / "out",
        ),
        *("--model", "tests.helpers.tiny_models:classifier"),
        env={"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    stored = json.loads((run / "stains.json").read_text())["slides"]
    assert set(asked) == {StainFit("macenko", tuple(stored[spec.slide_id]["numbers"]))}
    model = load_model(run / "checkpoints" / "last.pt", "tests.helpers.tiny_models:classifier", torch.device("cpu"))
    assert model.stain_target == StainFit("macenko", tuple(stored[TARGET]["numbers"]))
