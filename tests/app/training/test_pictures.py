"""``--pictures resize`` from end to end: class folders of small pictures, their scores, ranks, resume and refusals."""

from __future__ import annotations

import csv
import json
import shutil
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import roc_auc_score
from torchvision.transforms import v2

from app import index
from app.evaluation import classification
from app.launch.rank_guard import Interrupt
from pipelines.catalog.failures import FailedSlides
from tests.app.conftest import Train, summary_of
from tests.app.test_train import equal, model_of
from tests.helpers import tiny_models
from tests.helpers.in_process import call
from tests.helpers.real import SVS

CLASSIFIER = "tests.helpers.tiny_models:classifier"
RUN = ("--pictures", "resize", "--tile", "32", "--model", CLASSIFIER, "--batch", "4", "--lr", "0.01")
RUN += (
    "--parallel",
    "single",
    "--microbatches",
    "2",
    "--twin-steps=0",
    "--validate-every=1000",
    "--steps",
)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two classes whose pictures have the same names, of mixed sizes; a broken one, and a slide that is none."""
    root = tmp_path_factory.mktemp("pictures")
    numbers = np.random.default_rng(0)
    for split, count in (("train", 6), ("val", 3)):
        for c, name in enumerate(("ants", "bees")):
            folder = root / split / name
            folder.mkdir(parents=True)
            for k in range(count):
                width, height = ((50, 37), (24, 24), (33, 80))[k % 3]
                pixels = numbers.integers(0, 120, (height, width, 3)).astype(np.uint8)
                pixels[..., 2 * c] += 100
                cv2.imwrite(str(folder / f"{k}.{'png' if k % 2 else 'JPEG'}"), pixels)
    (root / "train" / "ants" / "broken.jpg").write_bytes((root / "train" / "ants" / "0.JPEG").read_bytes()[:300])
    shutil.copy(SVS, root / "train" / "bees")
    return root


@pytest.fixture(scope="module")
def run(pictures: Path, tmp_path_factory: pytest.TempPathFactory, train: Train) -> Path:
    out = tmp_path_factory.mktemp("pictures") / "run"
    done = train("--slides", pictures, *RUN, "4", "--out", out)
    assert done.returncode == 0, done.stderr
    assert "slides by split: train 12, val 6, test 0" in done.stdout
    return out


def test_bad_pictures_are_named_and_the_others_scored_as_torchvision_cuts_them(run: Path, pictures: Path) -> None:
    failed = {slide: error for slide, _, error in FailedSlides(run / "failed_slides.csv").rows()}
    assert set(failed) == {"train/ants/broken", "train/bees/CMU-1-Small-Region"}
    assert "this is a slide (read by tiled): leave out --pictures" in failed["train/bees/CMU-1-Small-Region"]
    model = tiny_models.classifier(2)
    model.load_state_dict(model_of(run))
    cut = v2.Compose([v2.Resize(37), v2.CenterCrop(32), v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    normal = v2.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    with (run / "predictions.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6
    for row in rows:
        (path,) = (pictures / row["slide"]).parent.glob(f"{Path(row['slide']).name}.*")
        assert row["label"] == path.parent.name
        with torch.no_grad():
            scores = model.eval()(normal(cut(Image.open(path)))[None]).softmax(1)[0]
        assert [float(row["score_ants"]), float(row["score_bees"])] == pytest.approx(scores.tolist(), abs=1e-5)


def test_predictions_are_those_of_validation_and_are_evaluated(
    run: Path, pictures: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classification, "RESAMPLES", 20)
    best, out = run / "checkpoints" / "best.pt", tmp_path / "out"
    done = call("app.predict", "--slides", pictures, "--checkpoint", best, "--model", CLASSIFIER, "--out", out)
    assert done.returncode == 0, done.stderr
    failed = {slide: error for slide, _, error in FailedSlides(out / "failed_slides.csv").rows()}
    assert set(failed) == {"train/ants/broken", "train/bees/CMU-1-Small-Region"}
    assert "this is a slide (read by tiled): leave out --pictures" in failed["train/bees/CMU-1-Small-Region"]
    predicted, held_out = table(out / "slides.csv"), table(run / "predictions.csv")
    assert (len(predicted), len(held_out)) == (18, 6)
    for slide, row in held_out.items():
        for score in ("score_ants", "score_bees"):
            assert float(predicted[slide][score]) == pytest.approx(float(row[score]), abs=1e-6)
    again = call("app.predict", "--slides", pictures, "--checkpoint", best, "--model", CLASSIFIER, "--out", out)
    assert "already: 18 slides" in again.stdout
    done = call("app.evaluate", "--predictions", out, "--labels", run / "predictions.csv", "--slides", pictures)
    assert done.returncode == 0, done.stderr
    right = [row["label"] == "bees" for row in held_out.values()]
    scores = [float(row["score_bees"]) for row in held_out.values()]
    value = json.loads((out / "evaluation.json").read_text())["slide_auc"]["value"]
    assert value == pytest.approx(roc_auc_score(right, scores))
    assert "whole pictures, resized to 32 px" in (out / "report.html").read_text()
    assert "picture AUC" in done.stdout
    assert "slide AUC" not in done.stdout
    log, page = (run / "run.log").read_text(), (run / "report.html").read_text()
    assert "picture_auc" in log
    assert "slide_auc" not in log
    assert "Picture AUC" in page
    assert "Slide AUC" not in page


def table(path: Path) -> dict[str, dict[str, str]]:
    """Rows of a table, by slide."""
    with path.open(newline="") as file:
        return {row["slide"]: row for row in csv.DictReader(file)}


def test_a_resumed_run_ends_with_the_same_weights(
    run: Path, pictures: Path, tmp_path: Path, train: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "resumed").mkdir()
    shutil.copy(run / "tiles.parquet", tmp_path / "resumed")
    asked = iter([False, True])
    resumed = (*("--slides", pictures), *RUN, "4", "--out", tmp_path / "resumed")
    with monkeypatch.context() as patch:
        patch.setattr(Interrupt, "requested", property(lambda _: next(asked), lambda _, value: None), raising=False)
        assert train(*resumed).returncode == 0
    assert summary_of(tmp_path / "resumed")["steps"] == 2
    assert train(*resumed, "--resume").returncode == 0
    assert equal(model_of(tmp_path / "resumed"), model_of(run))


def test_other_uses_are_refused_by_name(run: Path, pictures: Path, tmp_path: Path, train: Train) -> None:
    for words, message in (
        (("--mpp", "1"), "--mpp says nothing of --pictures resize"),
        (("--tile", "slide"), "--pictures resize needs a --tile"),
        (("--augment", "cpu"), "--augment cpu is for tiles"),
        (("--task", "segment"), "--pictures resize gives each picture one class"),
    ):
        refused = train("--slides", pictures, *RUN, "4", *words, "--out", tmp_path / "refused")
        assert refused.returncode == 2
        assert message in refused.stderr
    words = ["--slides", str(pictures), "--out", str(tmp_path / "index"), "--pictures", "resize", "--tile", "32"]
    assert index.main(words) == 0
